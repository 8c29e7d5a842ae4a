"""Choosing the ridge by held-out private log-likelihood.

The score of a ridge is the mean −log P̃(z) on pairs left out of its fit. It reads only released labels, so the choice
is post-processing and costs no privacy; it is a proper score, so its minimum is the fit closest to the truth in
Kullback-Leibler distance, unlike the accuracy against z. The uncorrected baseline is scored by its own loss, since it
does not know α.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from private_rlhf.core.noise import LabelNoise, Noise
from private_rlhf.reward_models.basis import FeatureArray, FeatureBasis, as_double, identity_basis
from private_rlhf.reward_models.bound import check_reward_bound
from private_rlhf.reward_models.linear import PairProblem, check_labels, minimize
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.spread import ALONE, Spread
from torch import Tensor

# Standard deviations of the margin under the prior that a ridge stands for, in nats.
_MARGIN_SCALES = (0.03, 0.1, 0.2, 0.4, 0.7, 1.2, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class RidgeSelection:
    """The cross-validation table, ridges in falling order.

    `held_out_loss` (m,) mean nats per pair; `paired_standard_error` (m,) that of the per-pair difference to the best
    ridge (0 for the best itself); `null_loss` is that of a reward of zero everywhere (log 2).
    """

    ridge: float
    ridges: tuple[float, ...]
    held_out_loss: tuple[float, ...]
    paired_standard_error: tuple[float, ...]
    null_loss: float
    num_folds: int


def ridge_from_margin_scale(margin_scale: float, num_components: int) -> float:
    """λ such that θ ~ N(0, I/λ) gives margins the standard deviation `margin_scale` in a `pair_basis`: k/scale²."""
    if not margin_scale > 0:
        raise ValueError(f"margin_scale must be above 0, not {margin_scale!r}")
    return num_components / margin_scale**2


def default_ridges(num_components: int) -> tuple[float, ...]:
    """A grid of ridges that spans margin scales from 0.03 to 8 nats, strongest first."""
    return tuple(ridge_from_margin_scale(scale, num_components) for scale in _MARGIN_SCALES)


def assign_folds(num_pairs: int, num_folds: int, groups: Sequence[object] | None, seed: int) -> np.ndarray:
    """Fold number (n,) of each pair; pairs of one group (say, one prompt) share a fold. ValueError if too few
    groups.
    """
    if groups is not None and len(groups) != num_pairs:
        raise ValueError(f"groups has {len(groups)} entries for {num_pairs} pairs")
    if groups is None:
        ids = np.arange(num_pairs)
    else:
        first_seen: dict[object, int] = {}
        ids = np.array([first_seen.setdefault(group, len(first_seen)) for group in groups])
    count = int(ids.max()) + 1 if num_pairs else 0
    if not 2 <= num_folds <= count:
        raise ValueError(f"num_folds must lie between 2 and the number of groups ({count}), not {num_folds}")
    order = np.random.default_rng(seed).permutation(count)
    return (order % num_folds)[ids]


def select_ridge(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    noise: Noise,
    *,
    ridges: Sequence[float] | None = None,
    basis: FeatureBasis | None = None,
    reward_bound: float | None = None,
    loss: str = "private_likelihood",
    folds: Tensor | None = None,
    tolerance: float = 1e-4,
    spread: Spread = ALONE,
) -> RidgeSelection:
    """k-fold choice of λ; arguments as in `fit_linear`. Each fold walks down the grid with warm starts.

    `folds` (n,) int64 is the fold that each pair is held out with, 0, 1, …, or −1 for a pair that is always learnt from
    and never judges (None: five folds at random). `tolerance` is the Newton decrement (nats over the fold) at which a
    fit counts as done: far below the noise of the score. With a `spread` each process brings the pairs that it holds,
    and their folds.
    """
    noise = LabelNoise.of(noise, allow_zero=False)
    first, second = as_double(phi_a, "phi_a", 2), as_double(phi_b, "phi_b", 2)
    label = check_labels(private_label, len(first))
    basis = identity_basis(first.shape[1]) if basis is None else basis
    grid = tuple(sorted(ridges if ridges is not None else default_ridges(basis.num_components), reverse=True))
    if not grid or grid[-1] <= 0:
        raise ValueError("ridges must be a non-empty list of numbers above 0")
    if folds is None:
        folds = torch.from_numpy(assign_folds(len(first), 5, None, 0))
    judging = spread.all(folds[folds >= 0])
    if folds.shape != label.shape or len(judging) == 0:
        raise ValueError(f"folds must be one number for each of {len(label)} pairs, and some must be held out")
    num_folds = int(judging.max()) + 1
    x_a, x_b = basis.coordinates(first), basis.coordinates(second)
    bound = check_reward_bound(reward_bound)
    score = get_loss("uncorrected" if loss == "uncorrected" else "private_likelihood")
    held_out = torch.zeros(len(grid), len(first), dtype=torch.float64)

    def problem(rows: Tensor) -> PairProblem:
        return PairProblem(x_a[rows], x_b[rows], label[rows], noise, bound, get_loss(loss), spread)

    for fold in range(num_folds):
        training, testing = problem(folds != fold), problem(folds == fold)
        theta = torch.zeros(basis.num_components, dtype=torch.float64)
        for row, ridge in enumerate(grid):
            theta, _ = minimize(training, ridge, theta, tolerance=tolerance)
            held_out[row, folds == fold] = score.value(testing.margin(theta), testing.private_label, noise)
    return _table(grid, spread.all(held_out[:, folds >= 0].T.contiguous()).T, num_folds, spread)


def _table(grid: tuple[float, ...], held_out: Tensor, num_folds: int, spread: Spread) -> RidgeSelection:
    means = spread.first(held_out.mean(1))
    best = int(means.argmin())
    differences = held_out - held_out[best]
    errors = differences.std(1) / held_out.shape[1] ** 0.5
    return RidgeSelection(
        ridge=grid[best],
        ridges=grid,
        held_out_loss=tuple(means.tolist()),
        paired_standard_error=tuple(errors.tolist()),
        null_loss=float(np.log(2.0)),
        num_folds=num_folds,
    )
