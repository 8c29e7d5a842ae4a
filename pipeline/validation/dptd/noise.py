"""How much Gaussian noise: the paper's theorems with their side conditions, or dp-accounting.

The paper adds N(0, σ²) to the momentum estimate (1 − αν)p + αν·g itself, so that step t's noise multiplier is
σ/(αν_{t−1}·2√2·G), weakest at t = 0, where there is no factor. The accountant's calibration adds αν_{t−1}·N(0, σ²),
one multiplier for all steps. Both players use one sampled transition, hence √2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.accounting.dptd import (
    composed_subsampled_gaussian_epsilon,
    joint_sensitivity,
    least_noise_multiplier,
)
from pipeline.validation.dptd.environments import Array

Neighbors = Literal["transition", "trajectory"]
Kind = Literal["paper", "accountant"]
MOMENTUM = 3.0  # α = β
# Rényi orders that calibrate: a tenth of the accountant's work, a little more noise than all orders would ask for.
ORDERS = (1.05, 1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 36, 40, 48, 64, 96, 512)
HIGH_ORDERS = (32, 64, 96, 128, 192, 512)  # for ε < SMALL
SMALL = 0.5
BUCKET = 1.15  # multipliers of steps are rounded down to powers of this: a valid bound, with few distinct steps


def step_sizes(steps: int) -> Array:
    """ν_t = 1/(4√(t + 3)), t = 0 … steps − 1 (Appendix G)."""
    return 0.25 / np.sqrt(np.arange(steps) + 3.0)


@dataclass(frozen=True)
class Budget:
    """The claim (epsilon, delta) for `steps` gradient queries with clip G on n rows in m trajectories, the longest of
    which has `longest` rows. trajectory neighbours: one whole trajectory is replaced.
    """

    epsilon: float
    delta: float
    steps: int
    clip: float
    rows: int
    trajectories: int
    longest: int
    neighbors: Neighbors = "transition"

    @property
    def population(self) -> int:
        """What a step draws one of: n or m."""
        return self.rows if self.neighbors == "transition" else self.trajectories

    def theorem_steps(self, parameters: int) -> float:
        """T = nε/√(d log 1/δ), for trajectories mε/(n√(d log 1/δ)): Theorems 5.2 and A.2 with C = 1. May be below 1."""
        root = math.sqrt(parameters * math.log(1.0 / self.delta))
        size = self.rows if self.neighbors == "transition" else self.trajectories / self.longest
        return size * self.epsilon / root


@dataclass(frozen=True)
class PaperNoise:
    """Theorem 5.1 (A.1 for trajectories) at β' = `split`. sigma: of each player's added noise at every step.

    relative_variance: σ'², which must be >= 0.7. order: α', which must be <= order_limit.
    """

    split: float
    sigma: float
    relative_variance: float
    order: float
    order_limit: float

    @property
    def admissible(self) -> bool:
        """Whether both side conditions are met."""
        return self.relative_variance >= 0.7 and self.order <= self.order_limit


def least_noise_split(epsilon: float, delta: float) -> float:
    """β' at which the theorem asks for the least noise: b² − 2(1 + L)b + 1 + L = 0 with L = log(1/δ)/ε."""
    size = 1.0 + math.log(1.0 / delta) / epsilon
    return size - math.sqrt(size * (size - 1.0))


def paper_noise(budget: Budget, split: float | None = None) -> PaperNoise:
    """The published noise; `split` None is the choice that asks for the least.

    The limit on α' is read as printed, with σ² and not σ'², in units of G: the weaker condition of the two.
    """
    split = least_noise_split(budget.epsilon, budget.delta) if split is None else split
    order = math.log(1.0 / budget.delta) / ((1.0 - split) * budget.epsilon) + 1.0
    # Trajectories: sensitivity 2nG instead of 2G, and m instead of n.
    sensitivity = 2.0 * budget.clip * (budget.longest if budget.neighbors == "trajectory" else 1)
    relative = 3.5 * budget.steps * order / (budget.population**2 * split * budget.epsilon)
    ratio = budget.population / (order * (1.0 + relative))
    limit = 2.0 * (4.0 * relative) * math.log(ratio) / 3.0 + 1.0
    return PaperNoise(split, math.sqrt(relative) * sensitivity, relative, order, limit)


def admissible_noise(budget: Budget) -> PaperNoise | None:
    """The published noise at the largest β' that meets the side conditions, to 1 %; None if none of 1 … 1e-9 does."""
    for split in np.exp(-np.arange(0.01, math.log(1e9), 0.01)):
        found = paper_noise(budget, float(split))
        if found.admissible:
            return found
    return None


def paper_certified(budget: Budget, sigma: float) -> float:
    """ε at the budget's δ that dp-accounting certifies for constant noise σ on the momentum; infinite for none."""
    first = sigma / joint_sensitivity(budget.clip)
    multipliers = first / (MOMENTUM * step_sizes(budget.steps - 1))
    powers, counts = np.unique(np.floor(np.log(multipliers) / math.log(BUCKET)), return_counts=True)
    phases = [(first, 1)] + [(BUCKET ** float(power), int(many)) for power, many in zip(powers, counts, strict=True)]
    return composed_subsampled_gaussian_epsilon(budget.population, phases, budget.delta, orders=ORDERS)


def accountant_sigma(budget: Budget) -> float:
    """σ of each player's noise in units of the gradient, before the factor αν, so that the claim holds.

    Theorem and assumptions: `pipeline.accounting.dptd.dptd`.
    """
    orders = ORDERS if budget.epsilon >= SMALL else HIGH_ORDERS
    multiplier = least_noise_multiplier(budget.epsilon, budget.population, budget.steps, budget.delta, orders=orders)
    return multiplier * joint_sensitivity(budget.clip)


def deviations(kind: Kind, budget: Budget) -> Array:
    """Standard deviation of what is added to each player's momentum estimate p_t, t = 0 … steps − 1: (steps,)."""
    if kind == "paper":
        return np.full(budget.steps, paper_noise(budget).sigma)
    scales = np.concatenate([[1.0], MOMENTUM * step_sizes(budget.steps - 1)])
    return accountant_sigma(budget) * scales
