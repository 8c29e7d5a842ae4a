"""The central label-DP reward: without noise it is the ridge fit, with noise its covariance holds the truth."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.counts import Bits
from private_rlhf.privacy.prf import Prf
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf_lab.league.noisy_sum_fit import GRID, fit_statistic, public_rows, release_statistic


def bits(number: int) -> Bits:
    return Bits(Prf(bytes(range(32))), hashlib.sha256(b"central %d" % number).digest())


def drawn(seed: int, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (n, d) within norm 1, y (n,), θ* (d,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    x /= torch.linalg.vector_norm(x, dim=1, keepdim=True)
    theta = torch.randn(dim, generator=generator, dtype=torch.float64)
    coins = torch.rand(count, generator=generator, dtype=torch.float64)
    return x, torch.where(coins < torch.sigmoid(x @ theta), 1.0, -1.0).double(), theta


@pytest.mark.parametrize("delta", [1e-6, 0.0])
def test_without_noise_it_is_the_ridge_fit(delta: float) -> None:
    """ε so large that the noise is below a step of the grid: the same θ and information as `fit_linear`'s."""
    x, y, _ = drawn(0, 400, 5)
    statistic = release_statistic(x, y, 1e15, delta, clip=1.0, bits=bits(0))
    ours = fit_statistic(statistic, ridge=2.0)
    theirs = fit_linear(x, torch.zeros_like(x), y, math.inf, ridge=2.0, tolerance=1e-14)
    assert torch.allclose(ours.theta, theirs.theta, atol=1e-4)
    assert torch.allclose(ours.information, theirs.information, rtol=1e-4, atol=1e-4)


def test_rows_are_short_and_tell_nothing_of_labels() -> None:
    """Each is at most GRID long in exact integers, whatever the length of what it came from; zeros stay."""
    x = torch.randn(300, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10.0
    x[0], x[1] = 0.0, 1e9
    rows, clip = public_rows(x)
    assert clip == float(torch.linalg.vector_norm(x, dim=1).median())
    assert int((rows**2).sum(axis=1).max()) <= GRID**2 * (1 + 1e-9)
    assert not rows[0].any()


def test_the_covariance_holds_the_truth() -> None:
    """Mean of (θ̂ − θ*)ᵀ·information·(θ̂ − θ*) over d is near 1 where θ* is drawn from the prior: four standard errors,
    fixed seeds; noise of the release outweighs that of the labels.
    """
    dim, found = 6, []
    for seed in range(60):
        x, y, theta = drawn(seed, 1500, dim)
        statistic = release_statistic(x, y, 0.5, 1e-6, clip=1.0, bits=bits(seed))
        assert statistic.variance > 0.25 * 1500 / dim * 0.5
        fit = fit_statistic(statistic, ridge=1.0)
        off = fit.theta - theta
        found.append(float(off @ fit.information @ off) / dim)
    assert abs(np.mean(found) - 1.0) < 4 * math.sqrt(2.0 / dim / len(found))


@pytest.mark.parametrize("delta", [1e-6, 0.0])
def test_it_learns_and_chooses_its_ridge(delta: float) -> None:
    x, y, theta = drawn(3, 20000, 6)
    fit = fit_statistic(release_statistic(x, y, 1.0, delta, clip=1.0, bits=bits(1)))
    assert torch.linalg.vector_norm(fit.theta - theta) < 0.3 * torch.linalg.vector_norm(theta)


def test_noise_beyond_all_sums_still_fits() -> None:
    """s̃ lies far outside what any labels give; the objective stays strictly convex."""
    x, y, _ = drawn(4, 20, 6)
    fit = fit_statistic(release_statistic(x, y, 0.001, 0.0, clip=1.0, bits=bits(2)))
    assert bool(fit.theta.isfinite().all())
    assert torch.linalg.vector_norm(fit.theta) < 10.0


def test_bad_input_is_refused() -> None:
    x, y, _ = drawn(5, 10, 3)
    with pytest.raises(ValueError, match="clip"):
        release_statistic(x, y, 1.0, 0.0, clip=0.0)
    with pytest.raises(ValueError, match="label must be -1 or \\+1"):
        release_statistic(x, 0.5 * y, 1.0, 0.0)
    with pytest.raises(UserError, match="epsilon"):
        release_statistic(x, y, math.inf, 0.0)
