"""Theorem 5.2 where all of its conditions are met: a linear value function, a ridge on G, and its own step sizes.

V(s) = φ(s)·θ with |φ| ≤ 1: the gradient is Lipschitz, and bounded on the box without a clip. f gets −½ρ|ω|², so that F
is strongly concave in ω by μ = λ_min(E φφᵀ) + ρ; L_F is the norm of F's constant Hessian. η, κ, b are the largest
(smallest, b) that the theorem and its proof allow. The statement has ν_t = 1/(4√(t + b)) with b ≥ 3; the proof takes
1/(16√(t + b)) and needs ν_t ≤ 1/27, which covers Lemma C.6's 8αν_t ≤ 1. At b = 3 the statement's ν_0 is .144; here
ν_t is the statement's, and b is large enough for the proof. The noise is Theorem 5.1's at a β' that meets its
conditions, or an accountant's.

The theorem contradicts itself: at T = nε/√(d log 1/δ), its noise has σ'² = 3.5·T·α'/(n²β'ε), which falls like 1/n at a
fixed β', but its condition is σ'² ≥ 0.7. So β' must fall and σ stays, while the momentum factor falls like T^(−1/2):
the error of the momentum estimate, σ/√(2αν_T), grows like T^(1/4), and Eq. 4 with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from private_rlhf.accounting.subset_sampling import least_noise_multiplier
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation.bandits import slope_of_mean
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.accounting.dptd import joint_sensitivity
from private_rlhf_lab.studies.dptd.algorithms import project
from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.noise import MOMENTUM, Budget, Kind, admissible_noise
from private_rlhf_lab.studies.dptd.scaling import BOUND
from private_rlhf_lab.studies.dptd.trajectories import GAMMA, Transitions

RIDGE = 2.0  # ρ: large enough that ω*(θ) stays inside the box
LARGEST_STEP = 1.0 / 27.0  # of ν_t, in the proof of Theorem 5.2
DELTA, MOMENTS = 1e-5, 16


@dataclass(frozen=True)
class Linear:
    """now, then (n, d): φ(s), and γφ(s') (0 where s' is terminal); reward (n,), times 1 − γ, a public unit."""

    now: Array
    then: Array
    reward: Array

    @property
    def hessian(self) -> Array:
        """Of F in (θ, ω), (2d, 2d)."""
        cross = self.now.T @ (self.then - self.now) / len(self.now)
        dual = self.now.T @ self.now / len(self.now) + RIDGE * np.eye(self.now.shape[1])
        return np.block([[np.zeros_like(cross), cross.T], [cross, -dual]])

    @property
    def gradient_bound(self) -> float:
        """G: no gradient of either player is longer anywhere in the box, whatever the record."""
        side = math.sqrt(self.now.shape[1])  # of |θ| and |ω|
        error = (1.0 - GAMMA) + (1.0 + GAMMA) * side
        return max(side * (1.0 + GAMMA), error + side + RIDGE * side)


def linear(data: Transitions) -> Linear:
    """Features: the state within its public scale, and 1; divided by √d, so that |φ| ≤ 1. Rewards of size ≤ 1."""

    def features(state: Array) -> Array:
        ones = np.ones((len(state), 1))
        return np.concatenate([np.clip(state, -1.0, 1.0), ones], axis=1) / math.sqrt(state.shape[1] + 1)

    reward = (1.0 - GAMMA) * np.clip(data.reward, -1.0, 1.0)
    return Linear(features(data.state), data.discount[:, None] * features(data.following), reward)


@dataclass(frozen=True)
class Constants:
    """mu, smoothness (L_F) of the data; eta, kappa, shift (b) as Theorem 5.2 and its proof allow them."""

    mu: float
    smoothness: float
    eta: float
    kappa: float
    shift: float


def constants(problem: Linear) -> Constants:
    """Theorem 5.2's, at equality; b at that of the proof's bounds on ν_t, where they ask for more."""
    hessian, size = problem.hessian, problem.now.shape[1]
    mu = float(np.linalg.eigvalsh(-hessian[size:, size:])[0])
    smoothness = float(np.linalg.norm(hessian, 2))
    eta = mu / (4.0 * smoothness**2)
    kappa = eta * mu**2 / (9.0 * smoothness**2)
    largest = min(LARGEST_STEP, mu / (16.0 * kappa * smoothness**2))
    shift = max((2.0 * kappa * smoothness**2 / mu) ** 2, 3.0, (0.25 / largest) ** 2)
    return Constants(mu, smoothness, eta, kappa, shift)


def utility(problem: Linear, chosen: Constants, noise: Array, runs: int, generator: np.random.Generator) -> Array:
    """Eq. 4 of Algorithm 1, mean of MOMENTS of its steps: (runs,). noise (T,): deviation on each momentum estimate."""
    size, steps = problem.now.shape[1], len(noise)
    theta, omega = generator.uniform(-1.0, 1.0, (2, runs, size))
    sizes = 0.25 / np.sqrt(np.arange(steps) + chosen.shift)
    moments = set(np.linspace(0, steps - 1, MOMENTS).astype(int).tolist())
    hessian, linear_term = problem.hessian, problem.now.T @ problem.reward / len(problem.now)
    p = d = np.zeros((runs, size))
    total = np.zeros(runs)
    for step in range(steps):
        row = generator.integers(0, len(problem.now), runs)
        now, then, reward = problem.now[row], problem.then[row], problem.reward[row]
        ahead, along = then - now, (now * omega).sum(axis=1)
        rest = reward + (ahead * theta).sum(axis=1) - along
        weight = MOMENTUM * sizes[step - 1] if step else 1.0
        drawn = noise[step] * generator.standard_normal((2, runs, size))
        p = (1.0 - weight) * p + weight * along[:, None] * ahead + drawn[0]
        d = (1.0 - weight) * d + weight * (rest[:, None] * now - RIDGE * omega) + drawn[1]
        moved = project(theta - chosen.kappa * p) - theta
        if step in moments:
            best = np.linalg.solve(-hessian[size:, size:], (linear_term + theta @ hessian[size:, :size].T).T).T
            error = omega @ hessian[size:, :size] - p
            for term in (moved / chosen.kappa, error, chosen.smoothness * (omega - project(best))):
                total += np.linalg.norm(term, axis=1)
        theta = theta + sizes[step] * moved
        omega = omega + sizes[step] * (project(omega + chosen.eta * d) - omega)
    return np.asarray(total / len(moments), dtype=np.float64)


@dataclass(frozen=True)
class Point:
    """One (n, ε): T, the first deviation, Eq. 4 of every run, and the constants."""

    rows: int
    epsilon: float
    steps: int
    sigma: float
    totals: Array
    chosen: Constants


def measure(pool: Transitions, grid: Sequence[tuple[int, float]], kind: Kind, runs: int) -> list[Point]:
    """DPTD inside the theorem on the first n rows of the shuffled `pool` for every (n, ε) of `grid`; seeded."""
    generator = np.random.default_rng(17)
    order, points = generator.permutation(len(pool)), []
    for rows, epsilon in grid:
        problem = linear(pool.take(order[:rows]))
        chosen = constants(problem)
        budget = Budget(epsilon, DELTA, 1, problem.gradient_bound, rows, 1, rows)
        steps = max(1, round(budget.theorem_steps(problem.now.shape[1])))
        budget = replace(budget, steps=steps)
        if kind == "paper":
            met = admissible_noise(budget)
            noise = np.full(steps, met.sigma if met else math.inf)
        else:
            multiplier = least_noise_multiplier(epsilon, rows, steps, DELTA)
            factors = MOMENTUM * 0.25 / np.sqrt(np.arange(steps - 1) + chosen.shift)
            noise = multiplier * joint_sensitivity(budget.clip) * np.concatenate([[1.0], factors])
        totals = utility(problem, chosen, noise, runs, generator)
        points.append(Point(rows, epsilon, steps, float(noise[0]), totals, chosen))
    return points


def claims(points: Mapping[Kind, Sequence[Point]]) -> Iterator[Claim]:
    """The exponent of Theorem 5.2 inside its conditions, for both noises."""
    for kind, measured in points.items():
        totals = np.array([point.totals for point in measured])
        across = np.array([point.rows * point.epsilon for point in measured])
        what = f"slope of log Eq. 4 in log(n epsilon), {across[0]:g} to {across[-1]:g}, T by the theorem with C = 1"
        named = {"paper": "Theorem 5.1's noise, its conditions met", "accountant": "the accountant's noise"}[kind]
        yield within(f"Inside Theorem 5.2 (linear values, ridge {RIDGE:g}, its kappa, eta, nu), Eq. 4 falls at least "
                     f"like (n epsilon)^(-1/4), {named}", "DPTD Theorem 5.2",
                     bootstrap(slope_of_mean(across), totals, 18), high=BOUND, what=what,
                     kind="statement" if kind == "paper" else "corrected", paper="-1/4")


def rows(points: Sequence[Point], kind: Kind) -> list[dict[str, object]]:
    """For inside.csv."""
    return [
        {"calibration": kind, "rows": point.rows, "epsilon": point.epsilon, "steps": point.steps,
         "first_sigma": point.sigma, "mu": point.chosen.mu, "smoothness": point.chosen.smoothness,
         "eta": point.chosen.eta, "kappa": point.chosen.kappa, "shift": point.chosen.shift,
         "utility": point.totals.mean(), "utility_sd": point.totals.std(ddof=1)}
        for point in points
    ]
