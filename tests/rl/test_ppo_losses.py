"""PPO's formulas against loops over tokens, closed cases, enumeration and finite differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.rl.ppo_losses import (
    KlController,
    clipped_policy_loss,
    clipped_value_loss,
    generalised_advantages,
    kl_estimate,
    token_rewards,
    whiten,
)

CLIP = 0.2


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(new, old, third, mask): rows of 4, 1 and 3 of 4 tokens."""
    mask = (torch.arange(4) < torch.tensor([4, 1, 3])[:, None]).double()
    return 0.4 * normal(3, 4, seed=seed), 0.4 * normal(3, 4, seed=seed + 1), normal(3, 4, seed=seed + 2), mask


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), clip=st.floats(0.01, 0.5))
def test_policy_loss_is_the_loop_over_tokens(seed: int, clip: float) -> None:
    new, old, advantages, mask = batch(seed)
    loss = clipped = divergence = 0.0
    for row in range(3):
        for t in range(int(mask[row].sum())):
            ratio = math.exp(new[row, t] - old[row, t])
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            loss -= min(ratio * float(advantages[row, t]), bounded * float(advantages[row, t]))
            clipped += bounded != ratio
            divergence += ratio - 1 - math.log(ratio)
    found = clipped_policy_loss(new, old, advantages, mask, clip)
    assert float(found.loss) == pytest.approx(loss, abs=1e-9)
    assert float(found.clipped) == clipped
    assert float(found.approx_kl) == pytest.approx(divergence, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), clip=st.floats(0.01, 0.5))
def test_value_loss_is_the_loop_over_tokens(seed: int, clip: float) -> None:
    new, old, returns, mask = batch(seed)
    loss = 0.0
    for row in range(3):
        for t in range(int(mask[row].sum())):
            value, before, target = float(new[row, t]), float(old[row, t]), float(returns[row, t])
            bounded = before + min(max(value - before, -clip), clip)
            loss += 0.5 * max((value - target) ** 2, (bounded - target) ** 2)
    assert float(clipped_value_loss(new, old, returns, mask, clip)) == pytest.approx(loss, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "learns"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.4, False),  # already far enough up
        (0.5, 2.0, -1.0, True),  # a good token became rare: pull it back
        (0.5, -2.0, 1.6, False),  # already far enough down
        (1.5, -2.0, 3.0, True),  # a bad token became frequent: push it back
    ],
)
def test_clipping_in_closed_cases(ratio: float, advantage: float, loss: float, learns: bool) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found = clipped_policy_loss(new, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1), CLIP)
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert gradient.item() == pytest.approx(-ratio * advantage if learns else 0.0, abs=1e-6)


def test_at_the_old_policy_the_gradient_is_the_policy_gradient() -> None:
    _, old, advantages, mask = batch(0)
    new = old.clone().requires_grad_()
    found = clipped_policy_loss(new, old, advantages, mask, CLIP)
    (gradient,) = torch.autograd.grad(found.loss, new)
    torch.testing.assert_close(gradient, -advantages * mask)
    assert found.clipped == 0
    assert found.approx_kl == 0


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_those_of_finite_differences(seed: int) -> None:
    new, old, third, mask = batch(seed)

    def policy(values: torch.Tensor) -> torch.Tensor:
        return clipped_policy_loss(values, old, third, mask, CLIP).loss

    def value(values: torch.Tensor) -> torch.Tensor:
        return clipped_value_loss(values, old, third, mask, CLIP)

    for function in (policy, value):
        assert torch.autograd.gradcheck(function, (new.clone().requires_grad_(),), eps=1e-6, atol=1e-5)


def test_what_stands_under_the_mask_has_no_effect_and_no_gradient() -> None:
    new, old, third, mask = batch(3)
    new.requires_grad_()
    junk = 1e3 * (1 - mask)
    clean = clipped_policy_loss(new, old, third, mask, CLIP)
    dirty = clipped_policy_loss(new, old - junk, third + junk, mask, CLIP)
    assert dirty.loss == clean.loss  # exp(1000) must not turn into inf · 0
    assert dirty.approx_kl == clean.approx_kl
    (gradient,) = torch.autograd.grad(dirty.loss, new)
    assert torch.isfinite(gradient).all()
    assert not gradient[mask == 0].any()


def test_losses_of_shards_add_up() -> None:
    new, old, third, mask = batch(7)
    rows = [slice(0, 1), slice(1, 3)]
    whole = clipped_policy_loss(new, old, third, mask, CLIP)
    parts = [clipped_policy_loss(new[r], old[r], third[r], mask[r], CLIP) for r in rows]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    values = [clipped_value_loss(new[r], old[r], third[r], mask[r], CLIP) for r in rows]
    torch.testing.assert_close(values[0] + values[1], clipped_value_loss(new, old, third, mask, CLIP))


# --- advantages -------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def single(*shape: int, seed: int) -> torch.Tensor:
    return normal(*shape, seed=seed).float()


def mask_of(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()


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
    rewards = single(*mask.shape, seed=seed) * mask
    values = single(*mask.shape, seed=seed + 1000)  # also where masked
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
    log_ratio, scores = single(*mask.shape, seed=seed), single(len(lengths), seed=seed)
    rewards = token_rewards(scores, log_ratio, mask, kl_coef, "k1")
    torch.testing.assert_close(rewards.sum(1), scores - kl_coef * (log_ratio * mask).sum(1), atol=1e-5, rtol=1e-5)


def test_both_estimators_average_to_the_kl_divergence() -> None:
    """E_π[k1] = E_π[k3] = KL(π‖π_ref), by enumeration; k3 is never negative and 0 only at a ratio of 1."""
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    log_ratio = (policy / reference).log()
    divergence = (policy * log_ratio).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy * kl_estimate(log_ratio, estimator)).sum(), divergence)
    assert (kl_estimate(single(1000, seed=0), "k3") >= 0).all()
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
    values = 5 + 3 * single(*mask.shape, seed=seed)
    kept = values[mask.bool()].double().numpy()
    expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    white = whiten(values, mask)
    np.testing.assert_allclose(white[mask.bool()].numpy(), expected, atol=1e-4)
    assert not white[~mask.bool()].any()


def test_whitening_ignores_what_stands_under_the_mask_and_survives_a_constant() -> None:
    mask = mask_of([1, 2])
    values = single(*mask.shape, seed=0)
    assert torch.equal(whiten(values, mask), whiten(values + 1e3 * (1 - mask), mask))
    assert torch.isfinite(whiten(torch.full((2, 2), 3.0), mask)).all()


# --- the coefficient of KL --------------------------------------------------------------------------------------------


def test_without_a_target_the_coefficient_is_fixed() -> None:
    controller = KlController(0.1, None, 1000)
    controller.update(1e6, 500)
    assert controller.value == 0.1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_the_step_is_proportional_and_clipped(kl: float, factor: float) -> None:
    """A tenth of the horizon: an error of 10 % changes 1 %, and errors count at most 20 %."""
    controller = KlController(0.5, 6.0, 100)
    controller.update(kl, 10)
    assert controller.value == pytest.approx(0.5 * factor)


@given(kls=st.lists(st.floats(-10, 1e6), max_size=50), responses=st.integers(1, 100_000))
def test_the_coefficient_stays_within_its_bounds(kls: list[float], responses: int) -> None:
    controller = KlController(0.1, 1.0, 100, lower=0.01, upper=2.0)
    for kl in kls:
        controller.update(kl, responses)
        assert 0.01 <= controller.value <= 2.0


def test_it_settles_where_kl_meets_the_target() -> None:
    """In a world where KL = 1/kl_coef, the fixed point is 1/target."""
    controller = KlController(5.0, 4.0, 100)
    for _ in range(500):
        controller.update(1 / controller.value, 16)
    assert controller.value == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("bounds", "reached"),
    [
        ({}, 0.1 * 0.8),  # KL is 0 in the first iteration, far below its target
        ({"kl_coef_min": 0.095}, 0.095),
        ({"kl_target": 1e-9, "kl_coef_max": 0.105}, 0.105),
    ],
)
def test_the_recipe_s_bounds_hold_in_training(problem: Any, bounds: dict[str, float], reached: float) -> None:
    settings = {"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 16, "learning_rate": 1e-2, **bounds}
    trainer = problem.trainer(rollouts=16, minibatch_size=16, ppo_epochs=1, **settings)
    for iteration in range(2 if "kl_coef_max" in bounds else 1):
        trainer.controller.value = 0.1
        trainer.update(trainer.collect(iteration)[0], iteration)
    assert trainer.controller.value == pytest.approx(reached)
    assert trainer.config.kl_coef == 0.1  # J is taken at this one
