"""GAE, token rewards and whitening against naive references and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.rl.ppo_losses import generalised_advantages, kl_estimate, token_rewards, whiten

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def mask_of(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()


def normal(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γV_{t+1} − V_t, term by term (Schulman et al. 2016, Eq. 11 and 16)."""
    count = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(count)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, count)) for t in range(count)]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, gamma=st.floats(0.1, 1.0), lam=st.floats(0.0, 1.0), seed=st.integers(0, 999))
def test_gae_is_the_double_sum(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    mask = mask_of(lengths)
    rewards, values = normal(mask.shape, seed) * mask, normal(mask.shape, seed + 1000)  # values also where masked
    advantages, returns = generalised_advantages(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        expected = naive_advantages(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row, :length], torch.tensor(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(returns[row, :length], advantages[row, :length] + values[row, :length])
        assert not advantages[row, length:].any()
        assert not returns[row, length:].any()


def test_gae_at_lambda_one_is_the_return_and_at_zero_one_step() -> None:
    mask, rewards = torch.ones(1, 3), torch.tensor([[1.0, 2.0, 4.0]])
    values = torch.tensor([[0.5, 0.25, -1.0]])
    _, returns = generalised_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[7.0, 6.0, 4.0]]))
    advantages, _ = generalised_advantages(rewards, values, mask, gamma=0.5, lam=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[1 + 0.125 - 0.5, 2 - 0.5 - 0.25, 4 + 1.0]]))


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_the_score_stands_on_the_last_real_token() -> None:
    mask = mask_of([1, 3, 2])
    log_ratio = torch.tensor([[0.1, 9.0, 9.0], [0.2, -0.4, 0.6], [1.0, 2.0, 9.0]])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0]), log_ratio, mask, 0.5, "k1")
    expected = torch.tensor([[10 - 0.05, 0, 0], [-0.1, 0.2, 20 - 0.3], [-0.5, 30 - 1.0, 0]])
    torch.testing.assert_close(rewards, expected)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 999), kl_coef=st.floats(0.01, 2))
def test_rewards_sum_to_score_minus_kl(lengths: list[int], seed: int, kl_coef: float) -> None:
    mask = mask_of(lengths)
    log_ratio, scores = normal(mask.shape, seed), normal(torch.Size([len(lengths)]), seed)
    rewards = token_rewards(scores, log_ratio, mask, kl_coef, "k1")
    torch.testing.assert_close(rewards.sum(1), scores - kl_coef * (log_ratio * mask).sum(1), atol=1e-5, rtol=1e-5)


def test_both_estimators_average_to_the_kl_divergence() -> None:
    """E_π[k1] = E_π[k3] = KL(π‖π_ref), by enumeration; k3 is never negative and 0 only at a ratio of 1."""
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    log_ratio = (policy / reference).log()
    divergence = (policy * log_ratio).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy * kl_estimate(log_ratio, estimator)).sum(), divergence)
    assert (kl_estimate(normal(torch.Size([1000]), 0), "k3") >= 0).all()
    assert kl_estimate(torch.zeros(1), "k3").item() == 0
    small = torch.tensor([1e-4])  # ½x² here; e^{−x} − 1 + x without expm1 would lose it to rounding
    torch.testing.assert_close(kl_estimate(small.double(), "k3"), small.double() ** 2 / 2, rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="'k1' or 'k3', got 'k2'"):
        kl_estimate(log_ratio, "k2")


# --- whitening --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5), seed=st.integers(0, 999))
def test_whitening_is_numpy_s(lengths: list[int], seed: int) -> None:
    mask = mask_of(lengths)
    values = 5 + 3 * normal(mask.shape, seed)
    kept = values[mask.bool()].double().numpy()
    expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    white = whiten(values, mask)
    np.testing.assert_allclose(white[mask.bool()].numpy(), expected, atol=1e-4)
    assert not white[~mask.bool()].any()


def test_whitening_ignores_what_stands_under_the_mask_and_survives_a_constant() -> None:
    mask = mask_of([1, 2])
    values = normal(mask.shape, 0)
    assert torch.equal(whiten(values, mask), whiten(values + 1e3 * (1 - mask), mask))
    assert torch.isfinite(whiten(torch.full((2, 2), 3.0), mask)).all()
