"""The smooth bound: range, slope, tails."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.reward_models.losses import bound_slope, bounded_reward


@settings(deadline=None, derandomize=True)
@given(raw=st.floats(-1e4, 1e4), bound=st.floats(0.1, 100))
def test_range_oddness_and_slope(raw: float, bound: float) -> None:
    u = torch.tensor([raw], dtype=torch.float64, requires_grad=True)
    reward = bounded_reward(u, bound)
    assert abs(float(reward.detach())) <= bound / 2
    assert torch.equal(bounded_reward(-u, bound), -reward)
    (gradient,) = torch.autograd.grad(reward.sum(), u)
    torch.testing.assert_close(bound_slope(u.detach(), bound), gradient, rtol=1e-6, atol=1e-12)


def test_it_is_the_identity_near_zero_and_without_a_bound() -> None:
    u = torch.tensor([-1e-3, 0.0, 1e-3], dtype=torch.float64)
    torch.testing.assert_close(bounded_reward(u, 10.0), u, rtol=1e-6, atol=0)
    assert torch.equal(bounded_reward(1e6 * u, None), 1e6 * u)
    assert torch.equal(bound_slope(u, None), torch.ones_like(u))
    assert float(bound_slope(torch.zeros(1), 3.0)) == 1.0


def test_slope_keeps_relative_precision_where_one_minus_tanh_squared_is_zero() -> None:
    slope = float(bound_slope(torch.tensor([50.0]), 10.0))
    assert slope == pytest.approx(4 * math.exp(-20), rel=1e-5)
    assert bounded_reward(torch.tensor([1.0], dtype=torch.bfloat16), 10.0).dtype == torch.float32


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_bad_bounds_are_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="reward_bound must be a positive width"):
        bounded_reward(torch.zeros(1), bound)
