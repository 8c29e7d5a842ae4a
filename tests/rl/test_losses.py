"""PPO's losses against loops over tokens, closed cases and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.rl.ppo_losses import clipped_policy_loss, clipped_value_loss

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
