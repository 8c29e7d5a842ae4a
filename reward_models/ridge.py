"""Choosing the ridge, by held-out private log-likelihood or by the evidence of the private labels.

Both read only released labels. The score of a ridge is the mean −log P̃(z) on pairs left out of its fit, a proper
score; the uncorrected baseline, which does not know α, is scored by its own loss.

The evidence of a prior θ ~ N(0, I/λ), by Laplace's approximation around the maximum θ̂ (d components; MacKay 1992), is

    log P(z | λ) ≈ Σ log P̃(z_i) − λ‖θ̂‖²/2 + (d/2) log λ − ½ log det H,   H = Σ ω δg δgᵀ + λI,

ω the expected information of a private label. It is steadier than held-out likelihood where labels are few or noisy. A
log-normal prior on the margin scale √(d/λ), about `MARGIN_SCALE`, decides where the evidence is flat.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise, group_numbers
from private_rlhf.reward_models.basis import ALONE, FeatureArray, FeatureBasis, Spread, identity_basis
from private_rlhf.reward_models.linear import PairProblem, minimize, pair_problem
from private_rlhf.reward_models.losses import get_loss
from torch import Tensor

MARGIN_SCALE = 0.7
"""Nats: standard deviation of a margin before there are labels. Differences of two answers of one model are mild."""
LOG_SCALE_SPREAD = 0.7
# Standard deviations of the margin under the prior that a ridge stands for, in nats.
_MARGIN_SCALES = (0.03, 0.1, 0.2, 0.4, 0.7, 1.2, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class RidgeSelection:
    """The cross-validation table, ridges in falling order: `held_out_loss` (m,), mean nats per pair, and
    `paired_standard_error` (m,) of the per-pair difference to the best ridge; None where one pair judges."""

    ridge: float
    ridges: tuple[float, ...]
    held_out_loss: tuple[float, ...]
    paired_standard_error: tuple[float | None, ...]


def ridge_from_margin_scale(margin_scale: float, num_components: int) -> float:
    """λ such that θ ~ N(0, I/λ) gives margins the standard deviation `margin_scale` in a `pair_basis`: k/scale²."""
    if not margin_scale > 0:
        raise ValueError(f"margin_scale must be above 0, got {margin_scale!r}")
    return num_components / margin_scale**2


def default_ridges(num_components: int) -> tuple[float, ...]:
    """A grid of ridges that spans margin scales from 0.03 to 8 nats, strongest first."""
    return tuple(ridge_from_margin_scale(scale, num_components) for scale in _MARGIN_SCALES)


def assign_folds(groups: Sequence[Hashable], num_folds: int, seed: int) -> np.ndarray:
    """Fold number (n,) of each pair; pairs of one group (say, one prompt) share a fold. ValueError for few groups."""
    ids = group_numbers(groups)
    count = len(set(groups))
    if not 2 <= num_folds <= count:
        raise ValueError(f"num_folds must lie between 2 and the number of groups ({count}), got {num_folds}")
    order = np.random.default_rng(seed).permutation(count)
    return (order % num_folds)[ids]


def select_ridge(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    noise: AnyNoise,
    *,
    ridges: Sequence[float] | None = None,
    basis: FeatureBasis | None = None,
    reward_bound: float | None = None,
    loss: str = "private_likelihood",
    folds: Tensor,
    tolerance: float = 1e-4,
    spread: Spread = ALONE,
) -> RidgeSelection:
    """k-fold choice of λ; arguments as in `fit_linear`. Each fold walks down the grid with warm starts.

    `folds` (n,) int64: the fold that each pair is held out with, or −1 for one that never judges. `tolerance`: Newton
    decrement, nats over the fold, at which a fit counts as done.
    """
    basis = identity_basis(phi_a.shape[1]) if basis is None else basis
    problem = pair_problem(phi_a, phi_b, private_label, noise, basis, reward_bound, loss, spread)
    grid = tuple(sorted(ridges if ridges is not None else default_ridges(basis.num_components), reverse=True))
    if not grid or grid[-1] <= 0:
        raise ValueError("ridges must be a non-empty list of numbers above 0")
    judges = spread.all(folds[folds >= 0])
    if folds.shape != problem.private_label.shape or len(judges) == 0:
        raise ValueError(f"folds must be one number for each of {len(problem)} pairs, and some must be held out")
    score = get_loss("uncorrected" if loss == "uncorrected" else "private_likelihood")
    losses = torch.zeros(len(grid), len(problem), dtype=torch.float64)
    for fold in range(int(judges.max()) + 1):
        training, test = problem.rows(folds != fold), problem.rows(folds == fold)
        theta = torch.zeros(basis.num_components, dtype=torch.float64)
        for row, ridge in enumerate(grid):
            theta = minimize(training, ridge, theta, tolerance=tolerance)
            losses[row, folds == fold] = score.value(test.margin(theta), test.private_label, test.noise)
    losses = spread.all(losses[:, folds >= 0].T.contiguous()).T
    means = spread.first(losses.mean(1))
    best = int(means.argmin())
    errors = ((losses - losses[best]).std(1) / len(judges) ** 0.5).tolist() if len(judges) > 1 else [None] * len(grid)
    return RidgeSelection(grid[best], grid, tuple(means.tolist()), tuple(errors))


def evidence_ridges(num_components: int) -> tuple[float, ...]:
    """Ridges of margin scales from 0.03 to 4 nats, strongest first."""
    scales = torch.logspace(math.log10(0.03), math.log10(4.0), 15, dtype=torch.float64)
    return tuple(ridge_from_margin_scale(scale, num_components) for scale in scales.tolist())


def log_evidence(problem: PairProblem, ridge: float, start: Tensor | None = None) -> tuple[float, Tensor]:
    """(log P(z | λ) in nats, θ̂ (d,)); start: where the fit begins."""
    theta = torch.zeros(problem.x_a.shape[1], dtype=torch.float64) if start is None else start
    theta = minimize(problem, ridge, theta, tolerance=1e-5)
    information = problem.information(theta)
    information.diagonal().add_(ridge)
    fit = -problem.total_loss(theta) - 0.5 * ridge * float(theta @ theta)
    return fit + 0.5 * len(theta) * math.log(ridge) - 0.5 * float(torch.logdet(information)), theta


def ridge_by_evidence(
    x_a: Tensor,
    x_b: Tensor,
    label: Tensor,
    noise: LabelNoise | LevelledNoise,
    reward_bound: float | None,
    start: float | None = None,
    spread: Spread = ALONE,
) -> float:
    """λ of `evidence_ridges` of the highest evidence times prior, by climbing from `start` (None: the prior's scale);
    coordinates (n, d) in a `pair_basis` of both responses, labels (n,) ±1: those of this process."""
    count = x_a.shape[1]
    ridges = evidence_ridges(count)
    problem = PairProblem(x_a, x_b, label, noise, reward_bound, get_loss("private_likelihood"), spread)
    theta, values = None, {}

    def worth(place: int) -> float:
        nonlocal theta
        if not 0 <= place < len(ridges):
            return -math.inf
        if place not in values:
            local, theta = log_evidence(problem, ridges[place], theta)
            evidence = float(spread.first(torch.tensor(local, dtype=torch.float64)))
            offset = math.log((count / ridges[place]) ** 0.5 / MARGIN_SCALE) / LOG_SCALE_SPREAD
            values[place] = evidence - 0.5 * offset**2
        return values[place]

    begin = start or ridge_from_margin_scale(MARGIN_SCALE, count)
    place = min(range(len(ridges)), key=lambda i: abs(math.log(ridges[i] / begin)))
    while (best := max((place, place - 1, place + 1), key=worth)) != place:
        place = best
    return ridges[place]
