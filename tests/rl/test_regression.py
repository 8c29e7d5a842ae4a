"""The regression's losses, exactly: on an enumerable problem, against RLOO's gradient, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from private_rlhf.rl.regression import importance_weights, variance_loss

KL_COEF = 0.5
ANSWERS = 6


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log π_ref, r̂), (ANSWERS,) float64 each: one prompt, all of its answers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ANSWERS, generator=generator).double().log_softmax(0), torch.randn(
        ANSWERS, generator=generator
    ).double()


def draws(probabilities: torch.Tensor, groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers and their groups, (groups·size,) int64 each."""
    rows = torch.multinomial(probabilities, groups * size, replacement=True, generator=torch.Generator().manual_seed(5))
    return rows, torch.arange(groups).repeat_interleave(size)


@pytest.mark.parametrize("delta", [None, 0.3])
@pytest.mark.parametrize("sampler", ["reference", "uniform", "adverse"])
def test_the_optimum_is_the_gibbs_policy_for_any_sampler(sampler: str, delta: float | None) -> None:
    """A sampler that avoids the best answers gets there too; weighted by what it draws, in expectation."""
    reference, reward = problem(0)
    shapes = {
        "reference": reference.exp(),
        "uniform": torch.ones(ANSWERS).double(),
        "adverse": (-reward / KL_COEF).exp(),
    }
    weights = shapes[sampler] / shapes[sampler].sum()
    logits = torch.zeros(ANSWERS).double().requires_grad_()
    groups = torch.zeros(ANSWERS, dtype=torch.long)
    optimiser = torch.optim.LBFGS([logits], max_iter=2_000, line_search_fn="strong_wolfe", tolerance_change=1e-18)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = variance_loss(logits.log_softmax(0) - reference, reward, KL_COEF, groups, weights, delta)
        loss.backward()
        return loss

    for _ in range(5):
        optimiser.step(closure)
    gibbs = (reference + reward / KL_COEF).log_softmax(0)
    torch.testing.assert_close(logits.detach().log_softmax(0), gibbs, atol=1e-5, rtol=0)


def test_on_policy_the_gradient_is_rloo_s() -> None:
    reference, reward = problem(1)
    logits = torch.randn(ANSWERS, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    rows, groups = draws(logits.detach().softmax(0), 40, 4)
    logprobs = logits.log_softmax(0)[rows]
    loss = KL_COEF * variance_loss(logprobs - reference[rows], reward[rows], KL_COEF, groups) / len(rows)
    ours = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    totals = (reward[rows] - KL_COEF * (logprobs.detach() - reference[rows])).view(-1, 4)
    advantages = (totals - (totals.sum(1, keepdim=True) - totals) / 3).flatten()
    rloo = torch.autograd.grad(-(advantages * logprobs).mean(), logits)[0]
    torch.testing.assert_close(ours, rloo, atol=1e-12, rtol=1e-9)


def test_its_expected_gradient_is_that_of_the_objective() -> None:
    """Over all pairs of answers, by exact sums: no bias from the group's mean."""
    reference, reward = problem(3)
    logits = torch.randn(ANSWERS, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    logprobs = logits.log_softmax(0)
    pairs = torch.cartesian_prod(torch.arange(ANSWERS), torch.arange(ANSWERS)).flatten()
    probability = logprobs.detach().exp()[pairs].view(-1, 2).prod(1)
    halves = [
        variance_loss((logprobs - reference)[pair], reward[pair], KL_COEF, torch.zeros(2, dtype=torch.long))
        for pair in pairs.view(-1, 2)
    ]
    ours = torch.autograd.grad(KL_COEF * (probability * torch.stack(halves)).sum() / 2, logits, retain_graph=True)[0]
    objective = (logprobs.exp() * (reward - KL_COEF * (logprobs - reference))).sum()
    torch.testing.assert_close(ours, -torch.autograd.grad(objective, logits)[0], atol=1e-12, rtol=1e-9)


def test_a_group_of_one_has_no_gradient() -> None:
    log_ratios = torch.tensor([0.3, 1.0, -1.0], requires_grad=True)
    scores, groups = torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1])
    variance_loss(log_ratios, scores, KL_COEF, groups).backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad[0] == 0
    assert log_ratios.grad[1] == -log_ratios.grad[2] != 0


def test_a_shift_of_a_prompt_s_reward_changes_nothing() -> None:
    reference, reward = problem(6)
    rows, groups = draws(reference.exp(), 3, 4)
    log_ratios = torch.randn(12, generator=torch.Generator().manual_seed(7)).double()
    before = variance_loss(log_ratios, reward[rows], KL_COEF, groups)
    after = variance_loss(log_ratios, reward[rows] + torch.tensor([9.0, -3.0, 0.5])[groups], KL_COEF, groups)
    torch.testing.assert_close(before, after, atol=1e-9, rtol=0)


def test_far_residuals_count_linearly() -> None:
    scores, groups = torch.tensor([0.0, 200.0]), torch.zeros(2, dtype=torch.long)
    loss = variance_loss(torch.zeros(2), scores, 1.0, groups, huber_delta=2.0)
    assert float(loss) == pytest.approx(2 * 2 * 2.0 * (100 - 1.0))  # G/(G − 1) · two residuals of 100


def test_only_old_answers_are_weighted() -> None:
    logprobs, drawn = torch.tensor([-1.0, -1.0, -1.0, -9.0]), torch.tensor([-3.0, -3.0, -1.5, -1.0])
    ages = torch.tensor([1, 2, 2, 3])
    weights = importance_weights(logprobs, drawn, ages, 1, 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(0.5), math.exp(-8)])
    assert importance_weights(logprobs, drawn, ages, None, 2.0).tolist() == [1.0] * 4
