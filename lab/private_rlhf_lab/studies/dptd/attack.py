"""How much DPTD's published noise gives away: the exact privacy loss of real runs, from the iterates alone.

Whoever sees θ_t and ω_t knows p_t and d_t (as long as the box does not cut, and it is published in Algorithm 1 anyway).
With w the momentum factor, y = p_t − (1 − w)p_{t−1} is w·g of one uniformly drawn transition plus noise, for both
players, so the likelihood of y is a mixture of n Gaussians: it is evaluated exactly under two data sets that differ in
one transition. E over runs on the first of (1 − e^{ε − loss})₊ is the δ that the mechanism spends at ε on this pair: a
lower bound on what it must state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from private_rlhf.core.stats import Estimate

from private_rlhf_lab.studies.dptd.algorithms import STEP, project
from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.network import gradients, initial
from private_rlhf_lab.studies.dptd.noise import MOMENTUM, step_sizes
from private_rlhf_lab.studies.dptd.trajectories import Transitions

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Attack:
    """drawn: probability that the transition in question is used at all. losses (R,): log-likelihood ratio of all
    iterates in runs in which it is, in nats.
    """

    drawn: float
    losses: Array

    def delta(self, epsilon: float) -> Estimate:
        """δ at ε on this pair, at least; its interval by Hoeffding, each side 2.5 %.

        Runs that do not use the transition are counted as 0, though they may add to δ.
        """
        spent = float(np.maximum(-np.expm1(epsilon - np.maximum(self.losses, epsilon)), 0.0).mean())
        margin = math.sqrt(math.log(40.0) / (2.0 * len(self.losses)))
        low, high = max(spent - margin, 0.0), min(spent + margin, 1.0)
        return Estimate(self.drawn * spent, self.drawn * low, self.drawn * high, len(self.losses))


def extreme_neighbour(data: Transitions) -> Transitions:
    """`data` with its first transition replaced by a fall from the corner of the state space."""
    changed = data.take(np.arange(len(data)))
    changed.state[0] = changed.following[0] = 1.0
    changed.discount[0] = 0.0
    return changed


def rows_using(row: int, rows: int, steps: int, runs: int, generator: np.random.Generator) -> Rows:
    """(steps, R) uniform rows given that `row` occurs in each run: the first occurrence has its geometric law."""
    found = generator.integers(0, rows, (steps, runs))
    law = (1.0 - 1.0 / rows) ** np.arange(steps)
    first = generator.choice(steps, size=runs, p=law / law.sum())
    others = generator.integers(1, rows, (steps, runs))
    early = np.arange(steps)[:, None] < first
    found = np.where(early, (row + others) % rows, found)
    found[first, np.arange(runs)] = row
    return found


def _log_mixture(gap: Array, weight: float, samples: Array, sigma: float) -> float:
    """log Σ_i exp(−|gap − w·g_i|²/2σ²) for gap (2d,), samples (n, 2d); for comparisons on one gap only."""
    exponents = (weight * (samples @ gap) - 0.5 * weight**2 * (samples**2).sum(axis=1)) / sigma**2
    return float(np.logaddexp.reduce(exponents))


def attack(data: Transitions, deviation: Array, clip: float, runs: int, seed: int) -> Attack:
    """Runs of DPTD on `extreme_neighbour(data)`, the loss against `data`; deviation (T,) as in `noise.deviations`."""
    generator = np.random.default_rng(seed)
    changed = extreme_neighbour(data)
    steps, count = len(deviation), len(data)
    rows = rows_using(0, count, steps, runs, generator)
    both = changed.take(np.arange(count + 1) % count)
    for column, original in ((both.state, data.state), (both.following, data.following)):
        column[count] = original[0]
    both.discount[count], both.reward[count] = data.discount[0], data.reward[0]
    single = np.arange(count + 1)[:, None]
    losses = np.zeros(runs)
    sizes = step_sizes(steps)
    for run in range(runs):
        theta, omega = initial(2, data.state.shape[1], generator)
        estimate = np.zeros((2, len(theta)))
        for step in range(steps):
            shape = (count + 1, len(theta))
            found = gradients(np.broadcast_to(theta, shape), np.broadcast_to(omega, shape), both.take(single), clip)
            samples = np.concatenate([found.theta, found.omega], axis=1)
            weight = MOMENTUM * sizes[step - 1] if step else 1.0
            noise = deviation[step] * generator.standard_normal(samples.shape[1])
            gap = weight * samples[rows[step, run]] + noise
            # The rows 1 … n − 1 are common; row 0 is the new transition, row n the one it replaced.
            losses[run] += _log_mixture(gap, weight, samples[:count], deviation[step])
            losses[run] -= _log_mixture(gap, weight, samples[1:], deviation[step])
            estimate = (1.0 - weight) * estimate + gap.reshape(2, -1)
            theta = theta + sizes[step] * (project(theta - STEP * estimate[0]) - theta)
            omega = omega + sizes[step] * (project(omega + STEP * estimate[1]) - omega)
    return Attack(1.0 - (1.0 - 1.0 / count) ** steps, losses)
