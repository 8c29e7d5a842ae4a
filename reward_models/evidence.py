"""Choosing the ridge by the marginal likelihood of the private labels: no fold, no held-out pair.

A ridge λ is the prior θ ~ N(0, I/λ). By Laplace's approximation around the penalised maximum θ̂ (d components)

    log P(z | λ) ≈ Σ log P̃(z_i) − λ‖θ̂‖²/2 + (d/2) log λ − ½ log det H,   H = Σ ω δg δgᵀ + λI,

ω the expected information of a private label (MacKay 1992, with the private likelihood in the place of a Gaussian's).
It reads only released labels. Unlike a cross-validated score it sees all labels at once: with few or noisy ones, where
held-out likelihood cannot tell a ridge of 2 from one of 800, it is the steadier guide. Where even it is flat, or where
Laplace flatters a fit that saturates, a prior on the margin scale √(d/λ) decides: log-normal about `MARGIN_SCALE`,
within a factor of four with 95 %.
"""

from __future__ import annotations

import math

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.linear import PairProblem, minimize
from private_rlhf.reward_models.losses import PreferenceLoss, fisher_weight, get_loss
from private_rlhf.reward_models.ridge import ridge_from_margin_scale
from private_rlhf.reward_models.spread import ALONE, Spread
from torch import Tensor

MARGIN_SCALE = 0.7
"""Nats: standard deviation of a margin before there are labels. Differences of two answers of one model are mild."""
LOG_SCALE_SPREAD = 0.7


def evidence_ridges(num_components: int) -> tuple[float, ...]:
    """Ridges of margin scales from 0.03 to 4 nats, strongest first."""
    scales = torch.logspace(math.log10(0.03), math.log10(4.0), 15, dtype=torch.float64)
    return tuple(ridge_from_margin_scale(scale, num_components) for scale in scales.tolist())


def log_evidence(problem: PairProblem, ridge: float, start: Tensor | None = None) -> tuple[float, Tensor]:
    """(log P(z | λ) in nats, θ̂ (d,)); start: where the fit begins."""
    theta = torch.zeros(problem.x_a.shape[1], dtype=torch.float64) if start is None else start
    theta, _ = minimize(problem, ridge, theta, tolerance=1e-5)
    information = problem.information(theta)
    information.diagonal().add_(ridge)
    fit = -problem.total_loss(theta) - 0.5 * ridge * float(theta @ theta)
    return fit + 0.5 * len(theta) * math.log(ridge) - 0.5 * float(torch.logdet(information)), theta


def ridge_by_evidence(
    x_a: Tensor,
    x_b: Tensor,
    label: Tensor,
    noise: LabelNoise,
    reward_bound: float | None,
    start: float | None = None,
    spread: Spread = ALONE,
) -> float:
    """λ of `evidence_ridges` at which evidence and prior together are highest, by climbing from `start` (None: from the
    prior's scale); coordinates (n, d) in a `pair_basis` of both responses, labels (n,) ±1: those of this process.
    """
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


def ridge_in_units_of(loss: PreferenceLoss, ridge: float, noise: LabelNoise) -> float:
    """The ridge that weighs as much against another loss as `ridge` against the private likelihood, at margin 0."""
    zero = torch.zeros(1, dtype=torch.float64)
    return ridge * float(loss.curvature(zero, noise) / fisher_weight(zero, noise))
