"""Is DPTD as it runs as private as its noise was calibrated for? By other formulas than those that calibrated it.

From below: the gradients of a worst pair of records, the noise and the draws are *measured* on the code that the
figures use; what they give away to one pair of data sets follows from dp-accounting's own Gaussian mechanism.
From above: the dominating pair's δ by quadrature and one Fourier transform.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from private_rlhf.core.stats import Estimate, wilson
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.accounting.subset_pairs import pair_epsilon
from private_rlhf_lab.studies.dptd.algorithms import momentum_runs, sampled_rows
from private_rlhf_lab.studies.dptd.network import BOX, gradients
from private_rlhf_lab.studies.dptd.noise import MOMENTUM, Budget, deviations, step_sizes
from private_rlhf_lab.studies.dptd.study import EPSILON, Problem
from private_rlhf_lab.studies.dptd.trajectories import Transitions

STEPS = 60  # of the noise that is measured
DRAWS = (4000, 500)  # steps and runs whose rows are counted
NONE = 0.05  # a noise multiplier that is as good as none: it names every record that is drawn
GREAT = 1e6  # reward of the worst records: any record may replace any other


@dataclass(frozen=True)
class Observed:
    """distance: ℓ2, between both players' gradients of the two worst records. deviation: of the noise, in the same
    unit, the smaller of both players'. rate: share of the draws that take one record. edge: largest |parameter|.
    """

    distance: float
    deviation: float
    rate: Estimate
    edge: float


def worst_records(data: Transitions) -> Transitions:
    """Two terminal transitions (2,) from one state, with rewards ±GREAT: opposite gradients of any length."""
    pair = data.take(np.zeros(2, dtype=np.int64))
    return replace(pair, reward=np.array([GREAT, -GREAT], data.reward.dtype), discount=np.zeros_like(pair.discount))


def observe(problem: Problem, budget: Budget) -> Observed:
    """Measurements on `momentum_runs` with the accountant's noise for `budget`; seeded."""
    generator, data = np.random.default_rng(41), problem.data
    theta, omega = problem.start()
    runs, pair = len(theta), worst_records(data)
    ends = [gradients(theta, omega, pair.take(np.full((runs, 1), row)), budget.clip) for row in (0, 1)]
    gap = np.concatenate([ends[0].theta - ends[1].theta, ends[0].omega - ends[1].omega], axis=1)
    noise = np.repeat(deviations("accountant", budget)[:STEPS, None], runs, axis=1)
    rows = sampled_rows(data, len(noise), runs, budget.neighbors, generator)
    moments = range(len(noise))
    silent = momentum_runs(data, (theta, omega), rows, noise, np.zeros(runs), moments, generator)
    weights = np.concatenate([[1.0], MOMENTUM * step_sizes(len(noise) - 1)])[:, None, None]
    spreads = []
    for estimate in (silent.momentum, silent.dual):
        before = np.concatenate([np.zeros_like(estimate[:1]), estimate[:-1]])
        spreads.append(float(np.sqrt((((estimate - (1.0 - weights) * before) / weights) ** 2).mean())))
    reading = momentum_runs(data, (theta, omega), rows, noise, np.full(runs, budget.clip), moments, generator)
    drawn = sampled_rows(data, *DRAWS, budget.neighbors, generator)
    return Observed(
        float(np.linalg.norm(gap, axis=1).max()),
        min(spreads),
        wilson(int((drawn == 0).sum()), drawn.size),
        float(max(np.abs(reading.theta).max(), np.abs(reading.omega).max())),
    )


def spent_delta(rate: float, multiplier: float, steps: int, epsilon: float, fineness: int = 32) -> float:
    """δ at ε of the dominating pair of docs/explanation/subset-sampling.md, `steps` times, to about 0.1 %.

    Its losses by quadrature over the Gaussian, shared between the two nearest multiples of a width (which keeps their
    mean), then one Fourier transform: no bound, but no code of the accountant either.
    """
    if multiplier < NONE:
        return 1.0 - (1.0 - rate) ** steps
    half = np.linspace(0.0, 9.0 + 1.0 / multiplier, 200_001)
    z = 0.5 / multiplier + 0.5 * (half[1:] + half[:-1])
    weak = np.exp(-0.5 * z**2) * (half[1] - half[0]) / math.sqrt(2.0 * math.pi)
    growth = np.expm1(z / multiplier - 0.5 / multiplier**2)
    loss, strong = np.log1p(rate * growth), weak * (1.0 + rate * growth)
    width = math.sqrt(float((loss**2 * (strong + weak)).sum())) / fineness
    size = 2 ** math.ceil(math.log2(4.0 * (loss[-1] + 12.0 * fineness * width * math.sqrt(steps)) / width))
    place, masses = loss / width, np.zeros(size)
    floor = np.floor(place).astype(np.int64)
    for signed, mass in ((1, strong), (-1, weak)):
        np.add.at(masses, signed * floor, mass * (1.0 - (place - floor)))
        np.add.at(masses, signed * (floor + 1), mass * (place - floor))
    masses[0] += 1.0 - masses.sum()
    total = np.fft.irfft(np.fft.rfft(masses) ** steps, size)[: size // 2]
    return float((total * -np.expm1(np.minimum(epsilon - np.arange(size // 2) * width, 0.0))).sum())


def direction(problem: Problem) -> Claim:
    """θ goes down and ω up in the first step of Algorithm 1 without noise: cosines with the gradients at the start."""
    theta, omega = problem.start()
    runs = len(theta)
    rows, free = np.zeros((2, runs), dtype=np.int64), np.full(runs, np.inf)
    path = momentum_runs(problem.data, (theta, omega), rows, np.zeros((2, runs)), free, range(2),
                         np.random.default_rng(0))
    found = gradients(theta, omega, problem.data.take(rows[0][:, None]))
    cosines = [
        sign * (moved[1] - moved[0]).ravel() @ slope.ravel()
        / max(float(np.linalg.norm(moved[1] - moved[0]) * np.linalg.norm(slope)), 1e-30)
        for sign, moved, slope in ((-1.0, path.theta, found.theta), (1.0, path.omega, found.omega))
    ]  # fmt: skip
    return within("Without noise Algorithm 1 descends in theta and ascends in omega", "DPTD Algorithm 1",
                  float(min(cosines)), low=0.5, what="smaller cosine of the first step with the gradient",
                  kind="control")


def claims(problem: Problem, budget: Budget) -> Iterator[Claim]:
    """The calibration "accountant" at `budget`, steps of single transitions: from below, from above, and the box."""
    seen = observe(problem, budget)
    setting = f"T = {budget.steps}, n = {budget.rows}, clip {budget.clip:g}"


    def spent(rate: float) -> float:
        multiplier = seen.deviation / seen.distance
        return math.inf if multiplier < NONE else pair_epsilon(rate, [(multiplier, budget.steps)], budget.delta)

    value, low, high = map(spent, (seen.rate.value, seen.rate.ci_low, seen.rate.ci_high))
    yield within(f"As it runs, DPTD spends at most its epsilon on the worst pair found, {setting}", "this project",
                 Estimate(value, low, high, seen.rate.n), high=EPSILON,
                 what="epsilon of one pair of neighbours; gradients, noise and draws measured")
    multiplier = float(deviations("accountant", budget)[0]) / seen.distance
    yield within(f"A second computation of delta confirms the accountant's noise, {setting}", "this project",
                 spent_delta(1.0 / budget.rows, multiplier, budget.steps, EPSILON), high=budget.delta,
                 what="delta at epsilon 1 by quadrature and a Fourier transform, gradients measured")
    yield within("The iterates of both players stay in the box", "DPTD Section 6", seen.edge, high=BOX * (1.0 + 1e-6),
                 what="largest |parameter|", kind="control")
