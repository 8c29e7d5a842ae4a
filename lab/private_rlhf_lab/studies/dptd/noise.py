"""How much Gaussian noise: the paper's theorems with their side conditions, or an accountant.

The paper adds N(0, σ²) to the momentum estimate (1 − αν)p + αν·g itself, so that step t's noise multiplier is
σ/(αν_{t−1}·2√2·G), weakest at t = 0, where there is no factor. The accountant's calibration adds αν_{t−1}·N(0, σ²),
one multiplier for all steps. Both players use one sampled transition, hence √2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from private_rlhf.accounting.subset_sampling import Phases, composed_epsilon, least_noise_multiplier
from private_rlhf.validation import temporal_differences
from private_rlhf.validation.temporal_differences import MOMENTUM as MOMENTUM
from private_rlhf.validation.temporal_differences import least_noise_split

from private_rlhf_lab.accounting.dptd import joint_sensitivity
from private_rlhf_lab.accounting.subset_pairs import pair_epsilon, renyi_epsilon
from private_rlhf_lab.studies.dptd.environments import Array

Neighbors = Literal["transition", "trajectory"]
Kind = Literal["paper", "accountant"]
# Rényi orders of the comparison: a tenth of the work.
FEW_ORDERS = (1.25, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 36, 40, 48, 64, 96, 512)
WEAK = 4.0  # times the smallest multiplier
BUCKET = 1.15  # of the multipliers that are accounted together


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
class PaperNoise(temporal_differences.PaperNoise):
    """Theorem 5.1 (A.1 for trajectories). sigma: of each player's added noise at every step."""

    sigma: float


def paper_noise(budget: Budget, split: float | None = None) -> PaperNoise:
    """The published noise; `split` None is the choice that asks for the least."""
    split = least_noise_split(budget.epsilon, budget.delta) if split is None else split
    noise = temporal_differences.paper_noise(budget.epsilon, budget.delta, budget.steps, budget.population, split)
    # Trajectories: sensitivity 2nG instead of 2G, and m instead of n.
    sensitivity = 2.0 * budget.clip * (budget.longest if budget.neighbors == "trajectory" else 1)
    return PaperNoise(**vars(noise), sigma=math.sqrt(noise.relative_variance) * sensitivity)


def admissible_noise(budget: Budget) -> PaperNoise | None:
    """The published noise at the largest β' that meets the side conditions; None if none does."""
    noise = temporal_differences.admissible_noise(budget.epsilon, budget.delta, budget.steps, budget.population)
    return paper_noise(budget, noise.split) if noise else None


@dataclass(frozen=True)
class Bracket:
    """ε at the budget's δ. high: certified. low: spent on one legal pair of neighbours. renyi: certified by the looser
    Rényi bound.
    """

    low: float
    high: float
    renyi: float


def bracket(budget: Budget, sigma: float) -> Bracket:
    """Both bounds for constant noise σ on the momentum; the one from below ignores the noisiest steps."""
    rounded, raised = paper_phases(budget, sigma), paper_phases(budget, sigma, math.ceil)
    weak = [phase for phase in raised if phase[0] <= WEAK * min(raised)[0]]
    return Bracket(
        pair_epsilon(1.0 / budget.population, weak, budget.delta),
        composed_epsilon(budget.population, rounded, budget.delta),
        few_orders(budget.population, rounded, budget.delta),
    )


def few_orders(population: int, phases: Phases, delta: float, sample_size: int = 1) -> float:
    """`renyi_epsilon` in a tenth of its time."""
    return renyi_epsilon(population, phases, delta, sample_size, FEW_ORDERS)


def paper_phases(
    budget: Budget, sigma: float, rounding: Callable[[float], int] = math.floor
) -> list[tuple[float, int]]:
    """(noise multiplier, steps) of constant noise σ on the momentum, rounded to powers of BUCKET: down for a bound
    from above, up for one from below.
    """
    first = sigma / joint_sensitivity(budget.clip)
    multipliers = first / (MOMENTUM * step_sizes(budget.steps - 1))
    powers = Counter(rounding(float(power)) for power in np.log(multipliers) / math.log(BUCKET))
    return [(first, 1)] + [(BUCKET**power, many) for power, many in sorted(powers.items())]


def accountant_sigma(budget: Budget) -> float:
    """σ of each player's noise in units of the gradient, before the factor αν, so that the claim holds.

    Theorem and assumptions: `private_rlhf_lab.accounting.dptd.dptd`.
    """
    multiplier = least_noise_multiplier(budget.epsilon, budget.population, budget.steps, budget.delta)
    return multiplier * joint_sensitivity(budget.clip)


def deviations(kind: Kind, budget: Budget) -> Array:
    """Standard deviation of what is added to each player's momentum estimate p_t, t = 0 … steps − 1: (steps,)."""
    if kind == "paper":
        return np.full(budget.steps, paper_noise(budget).sigma)
    scales = np.concatenate([[1.0], MOMENTUM * step_sizes(budget.steps - 1)])
    return accountant_sigma(budget) * scales
