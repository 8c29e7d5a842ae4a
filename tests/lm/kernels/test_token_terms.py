"""Log-probabilities, entropies and their gradients against the plain formulas that autograd differentiates."""

from __future__ import annotations

import pytest
import torch
from private_rlhf.lm.kernels.token_terms import row_chunks, token_kl, token_logprobs, token_terms


def plain(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_mass = torch.log_softmax(logits.double() / temperature, dim=-1)
    return log_mass.gather(-1, ids[:, None]).squeeze(-1), -(log_mass.exp() * log_mass).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_terms_and_gradients_are_those_of_the_plain_formulas(temperature: float, asked: bool, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(11, 70_000, generator=draw)).requires_grad_(True)
    assert len(list(row_chunks(logits))) == 4
    ids = torch.randint(70_000, (11,), generator=draw)
    weights, others = torch.randn(11, generator=draw), torch.randn(11, generator=draw)
    logprobs, entropies = token_terms(logits, ids, temperature, entropy=asked)
    exact = logits.detach().double().requires_grad_(True)
    expected, expected_entropies = plain(exact, ids, temperature)
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-4, rtol=1e-5)
    loss, other = (logprobs * weights).sum(), (expected * weights).sum()
    if asked:
        assert entropies is not None
        torch.testing.assert_close(entropies, expected_entropies.float(), atol=1e-4, rtol=1e-4)
        loss, other = loss + (entropies * others).sum(), other + (expected_entropies * others).sum()
    else:
        assert entropies is None
    loss.backward()
    other.backward()
    assert logits.grad is not None
    assert exact.grad is not None
    error = (logits.grad.double() - exact.grad).norm(dim=-1) / exact.grad.norm(dim=-1).clamp_min(1e-3)
    assert float(error.max()) < 1e-4


def test_bfloat16_logits_are_computed_in_float32_and_keep_their_dtype_in_the_gradient() -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_(True)
    found = torch.cat([token_logprobs(logits, torch.tensor([token])) for token in range(8)])
    assert found.dtype == torch.float32
    assert float(found.detach().double().exp().sum()) == pytest.approx(1, abs=1e-6)
    found[3].backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    expected = torch.eye(8)[3] - found.detach().exp()
    torch.testing.assert_close(logits.grad[0].float(), expected, atol=4e-3, rtol=0)


def entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    found = token_terms(logits, torch.zeros(len(logits)).long(), temperature, entropy=True)[1]
    assert found is not None
    return found


def test_entropy_in_closed_cases() -> None:
    assert entropy(torch.zeros(1, 8)).item() == pytest.approx(2.0794415)
    assert entropy(torch.tensor([[0.0, 0.0, -1e4, -1e4]])).item() == pytest.approx(0.6931472)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(entropy(logits, 2.0), entropy(logits / 2))
    probability = torch.softmax(logits, -1)
    torch.testing.assert_close(entropy(logits), -(probability * probability.log()).sum(-1))


def test_kl_is_that_of_the_distributions() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(11, 70_000, generator=draw), torch.randn(11, 70_000, generator=draw)
    policy = torch.distributions.Categorical(logits=logits.double())
    other = torch.distributions.Categorical(logits=reference.double())
    expected = torch.distributions.kl_divergence(policy, other)
    torch.testing.assert_close(token_kl(logits, reference).double(), expected, atol=1e-4, rtol=1e-4)


def test_no_tokens_at_all() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    logprobs, entropies = token_terms(logits, torch.zeros(0).long(), entropy=True)
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
