"""A linear reward under central label-DP: one noisy vector carries the labels, the fit is post-processing.

The holder of the labels adds noise to s = Σ x_i over y_i = +1, x_i = φ(a) − φ(b) (`noisy_sum`). Then s̃ = m(θ) +
noise with m(θ) = Σ σ(x_i·θ)x_i, cov(s̃) = H + v·I, H = Σ σ'(x_i·θ) x_i x_iᵀ and θ ~ N(0, I/λ). Its maximum is near that
of the convex Σ log(1 + exp(x_i·θ)) − s̃·θ + ½θᵀΛθ, Λ = λ(I + v·H₀⁻¹), H₀ = H at θ = 0.
docs/explanation/central-label-dp.md has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.privacy.counts import Bits
from private_rlhf.reward_models.basis import FeatureArray, as_double
from private_rlhf.reward_models.linear import check_labels
from private_rlhf.reward_models.ridge import LOG_SCALE_SPREAD, MARGIN_SCALE, evidence_ridges
from torch import Tensor

from private_rlhf_lab.league.noisy_sum import gaussian_for, laplace_for, noisy_statistic

GRID = 1 << 20  # steps of a row's longest norm: what rounding moves is far below the noise of one label


@dataclass(frozen=True)
class NoisyStatistic:
    """The released sum `value` s̃ (k,) float64 with noise of `variance` v in each coordinate, the public rows x (n, k)
    float64 shortened to the clip."""

    value: Tensor
    variance: float
    x: Tensor


@dataclass(frozen=True)
class CentralFit:
    """theta (k,); information (k, k) = H(H + v·I)⁻¹H + λI, whose inverse is θ's covariance: labels, noise, prior."""

    theta: Tensor
    information: Tensor


def public_rows(difference: FeatureArray, clip: float | None = None) -> tuple[np.ndarray, float]:
    """(rows (n, k) int64, clip): differences (n, k) shortened to the norm `clip` (default: the median norm), towards
    zero on a grid of clip/GRID. ValueError for a clip that is not above 0 and finite."""
    x = as_double(difference, "difference", 2)
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    bound = float(norm.median()) if clip is None else float(clip)
    if not 0.0 < bound < math.inf:
        raise ValueError(f"clip must be a finite number above 0, got {bound!r}")
    shortened = x / torch.maximum(norm, torch.tensor(bound, dtype=torch.float64))
    return (shortened * GRID).trunc().numpy().astype(np.int64), bound


def release_statistic(
    difference: FeatureArray,
    true_label: FeatureArray,
    epsilon: float,
    delta: float,
    *,
    clip: float | None = None,
    bits: Bits | None = None,
) -> NoisyStatistic:
    """The sum of difference (n, k), in coordinates that no label chose, under true_label (n,) ±1: (epsilon, delta)-DP
    for replacing one label, by the discrete Gaussian, or at delta 0 discrete Laplace. A second call costs its ε again.
    """
    rows, bound = public_rows(difference, clip)
    labels = check_labels(true_label, len(rows)).numpy().astype(np.int64)
    noise = gaussian_for(rows, Fraction(zcdp_rho(epsilon, delta))) if delta else laplace_for(rows, epsilon)
    value, step = noisy_statistic(rows, labels, noise, bits), bound / GRID
    released = torch.tensor([float(entry) for entry in value], dtype=torch.float64) * step
    return NoisyStatistic(released, float(noise.variance) * step**2, torch.from_numpy(rows).double() * step)


def fit_statistic(statistic: NoisyStatistic, ridge: float | None = None) -> CentralFit:
    """θ from s̃ and public features; deterministic. ridge: λ > 0, default that of the largest marginal likelihood."""
    x, noise = statistic.x, statistic.variance
    values, axes = torch.linalg.eigh(0.25 * x.T @ x)  # H₀
    values = values.clamp_min(1e-9 * max(float(values[-1]), 1e-300))
    if ridge is None:
        ridge = _likeliest_ridge(values, axes.T @ (statistic.value - 0.5 * x.sum(dim=0)), noise, len(x))
    penalty = (axes * (ridge * (1.0 + noise / values))) @ axes.T
    theta = _newton(x, statistic.value, penalty)
    slope = _curvature(x, theta)
    eye = torch.eye(len(theta), dtype=torch.float64)
    information = slope @ torch.linalg.solve(slope + noise * eye, slope) + ridge * eye
    return CentralFit(theta, 0.5 * (information + information.T))


def _likeliest_ridge(values: Tensor, gap: Tensor, noise: float, count: int) -> float:
    """λ of `evidence_ridges` with the largest density of s̃ − m(0) under N(0, H + v·I + H²/λ), times the prior's.

    H is its mean over the prior's margins u ~ N(0, τ²), τ² the mean of ‖x‖²/λ, by MacKay's E σ'(u) ≈ ¼(1 + πτ²/8)^(−½).
    """
    squares = 4.0 * float(values.sum()) / count

    def worth(ridge: float) -> float:
        slope = values / math.sqrt(1.0 + math.pi / 8.0 * squares / ridge)
        variance = slope + noise + slope**2 / ridge
        apart = math.log((len(values) / ridge) ** 0.5 / MARGIN_SCALE) / LOG_SCALE_SPREAD
        return -0.5 * float((gap**2 / variance + variance.log()).sum()) - 0.5 * apart**2

    return max(evidence_ridges(len(values)), key=worth)


def _curvature(x: Tensor, theta: Tensor) -> Tensor:
    """H = Σ σ'(x_i·θ) x_i x_iᵀ (k, k)."""
    share = torch.sigmoid(x @ theta)
    return x.T @ (x * (share * (1.0 - share))[:, None])


def _newton(x: Tensor, statistic: Tensor, penalty: Tensor) -> Tensor:
    """argmin Σ log(1 + exp(x_i·θ)) − s̃·θ + ½θᵀΛθ, Λ positive definite: strictly convex, so from 0 with backtracking."""

    def objective(theta: Tensor) -> float:
        loss = torch.nn.functional.softplus(x @ theta).sum() - statistic @ theta
        return float(loss + 0.5 * theta @ penalty @ theta)

    theta = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(100):
        gradient, value = x.T @ torch.sigmoid(x @ theta) - statistic + penalty @ theta, objective(theta)
        step = torch.linalg.solve(_curvature(x, theta) + penalty, gradient)
        decrement = float(gradient @ step)
        trials = ((theta - size * step, size) for size in (0.5**halvings for halvings in range(40)))
        better = next((new for new, size in trials if objective(new) <= value - 1e-4 * size * decrement), None)
        if decrement <= 1e-10 or better is None:
            return theta
        theta = better
    return theta
