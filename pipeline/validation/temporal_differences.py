"""DPTD Algorithm 1, private primal-dual temporal differences, where all conditions of its theorems are met.

Cart Pole with V(s) = φ(s)·θ, |φ| ≤ 1, on the box [−1, 1]^d. f gets −½ρ|ω|², so that F is strongly concave in ω by μ;
L_F is the norm of F's constant Hessian. η, κ, b are the largest (smallest, b) that Theorem 5.2 and its proof allow: ν_t
= 1/(4√(t + b)) ≤ 1/27.

The theorem contradicts itself: at T = nε/√(d log 1/δ) its noise falls like 1/n at a fixed β', but its condition is σ'²
≥ 0.7. So β' must fall, while the momentum factor falls like T^(−1/2), and Eq. 4 grows like T^(1/4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.accounting.subset_sampling import least_noise_multiplier
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation.bandits import Array, slope_of_mean
from private_rlhf.validation.lab import COLOURS, Claim, Report, Row, new_figure, within

GAMMA, DELTA = 0.95, 1e-5
MOMENTUM = 3.0  # α = β
RIDGE = 2.0  # ρ: large enough that ω*(θ) stays inside the box
LARGEST_STEP = 1.0 / 27.0  # of ν_t, in the proof of Theorem 5.2
MOMENTS = 16
GRID = ((250, 1.0), (500, 2.0), (1000, 4.0), (2000, 8.0), (4000, 16.0), (8000, 32.0))
SCALE = np.array([2.4, 3.0, 0.2095, 3.5])  # position, speed, angle, angular speed: public ends of an episode
Noise = Literal["paper", "accountant"]
NOISES: tuple[Noise, ...] = ("paper", "accountant")


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

    @property
    def sensitivity(self) -> float:
        """2√2·G: the largest ℓ2 change of both players' gradients when the transition of a step is replaced."""
        return 2.0 * math.sqrt(2.0) * self.gradient_bound


def features(state: Array) -> Array:
    """The state (n, p) within its public scale, and 1; divided by √(p + 1), so that |φ| ≤ 1."""
    ones = np.ones((len(state), 1))
    return np.concatenate([np.clip(state, -1.0, 1.0), ones], axis=1) / math.sqrt(state.shape[1] + 1)


def linear(state: Array, following: Array, discount: Array, reward: Array) -> Linear:
    """Of transitions: states (n, p) in public units, discount (n,) γ or 0, reward (n,) cut to [−1, 1]."""
    unit = (1.0 - GAMMA) * np.clip(reward, -1.0, 1.0)
    return Linear(features(state), discount[:, None] * features(following), unit)


def cart_pole(rows: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """`rows` transitions of Gymnasium's Cart Pole, shuffled, for `linear`; the policy pushes to the side to which the
    pole falls, and takes every third action at random.
    """
    import gymnasium

    generator, environment = np.random.default_rng(seed), gymnasium.make("CartPole-v1")
    transitions: list[tuple[Array, Array, float, float]] = []
    state, over, episode = np.zeros(4), True, 0
    while len(transitions) < rows:
        if over:
            state, episode = environment.reset(seed=seed + episode)[0] / SCALE, episode + 1
        action = int(generator.integers(2)) if generator.random() < 1 / 3 else int(state[2] + state[3] > 0.0)
        observed, reward, terminated, truncated, _ = environment.step(action)
        following, over = observed / SCALE, terminated or truncated
        transitions.append((state, following, 0.0 if terminated else GAMMA, float(reward)))
        state = following
    environment.close()
    order = generator.permutation(rows)
    states, followings, discounts, rewards = (np.array(column)[order] for column in zip(*transitions, strict=True))
    return states, followings, discounts, rewards


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


def project(parameters: Array) -> Array:
    """Onto the box [−1, 1]^d."""
    return np.clip(parameters, -1.0, 1.0)


def utility(problem: Linear, limits: Constants, noise: Array, runs: int, generator: np.random.Generator) -> Array:
    """Eq. 4 of Algorithm 1, mean of MOMENTS of its steps: (runs,). noise (T,): deviation on each momentum estimate."""
    size, steps = problem.now.shape[1], len(noise)
    theta, omega = generator.uniform(-1.0, 1.0, (2, runs, size))
    sizes = 0.25 / np.sqrt(np.arange(steps) + limits.shift)
    moments = set(np.linspace(0, steps - 1, MOMENTS).astype(int).tolist())
    hessian, linear_term = problem.hessian, problem.now.T @ problem.reward / len(problem.now)
    p = d = np.zeros((runs, size))
    total = np.zeros(runs)
    for step in range(steps):
        row = generator.integers(0, len(problem.now), runs)
        now, then, reward = problem.now[row], problem.then[row], problem.reward[row]
        ahead, along = then - now, (now * omega).sum(axis=1)
        rest = reward + (ahead * theta).sum(axis=1) - along
        # At t = 0 the estimate is the gradient itself, without a momentum factor.
        weight = MOMENTUM * sizes[step - 1] if step else 1.0
        noise_drawn = noise[step] * generator.standard_normal((2, runs, size))
        p = (1.0 - weight) * p + weight * along[:, None] * ahead + noise_drawn[0]
        d = (1.0 - weight) * d + weight * (rest[:, None] * now - RIDGE * omega) + noise_drawn[1]
        moved = project(theta - limits.kappa * p) - theta
        if step in moments:
            best = np.linalg.solve(-hessian[size:, size:], (linear_term + theta @ hessian[size:, :size].T).T).T
            error = omega @ hessian[size:, :size] - p
            for term in (moved / limits.kappa, error, limits.smoothness * (omega - project(best))):
                total += np.linalg.norm(term, axis=1)
        theta = theta + sizes[step] * moved
        omega = omega + sizes[step] * (project(omega + limits.eta * d) - omega)
    return np.asarray(total / len(moments), dtype=np.float64)


def theorem_steps(epsilon: float, rows: int, parameters: int) -> int:
    """T = nε/√(d log 1/δ), Theorem 5.2 with C = 1; at least 1."""
    return max(1, round(rows * epsilon / math.sqrt(parameters * math.log(1.0 / DELTA))))


@dataclass(frozen=True)
class PaperNoise:
    """Theorem 5.1 at β' = `split`. relative_variance: σ'², which must be >= 0.7, of noise σ'·(sensitivity 2G).

    order: α', which must be <= order_limit.
    """

    split: float
    relative_variance: float
    order: float
    order_limit: float

    @property
    def admissible(self) -> bool:
        """True where both side conditions are met."""
        return self.relative_variance >= 0.7 and self.order <= self.order_limit


def paper_noise(epsilon: float, delta: float, steps: int, population: int, split: float) -> PaperNoise:
    """The published noise. The limit on α' is read as printed, with σ² and not σ'², in units of G: the weaker one."""
    order = math.log(1.0 / delta) / ((1.0 - split) * epsilon) + 1.0
    relative = 3.5 * steps * order / (population**2 * split * epsilon)
    ratio = population / (order * (1.0 + relative))
    return PaperNoise(split, relative, order, 2.0 * (4.0 * relative) * math.log(ratio) / 3.0 + 1.0)


def least_noise_split(epsilon: float, delta: float) -> float:
    """β' at which the theorem asks for the least noise: b² − 2(1 + L)b + 1 + L = 0 with L = log(1/δ)/ε."""
    size = 1.0 + math.log(1.0 / delta) / epsilon
    return size - math.sqrt(size * (size - 1.0))


def admissible_noise(epsilon: float, delta: float, steps: int, population: int) -> PaperNoise | None:
    """The published noise at the largest β' that meets the side conditions, to 1 %; None if none of 1 … 1e-9 does."""
    splits = np.exp(-np.arange(0.01, math.log(1e9), 0.01)).tolist()
    each = (paper_noise(epsilon, delta, steps, population, split) for split in splits)
    return next((noise for noise in each if noise.admissible), None)


@dataclass(frozen=True)
class Point:
    """One (n, ε): T, the first deviation, Eq. 4 of every run (R,), and the constants."""

    rows: int
    epsilon: float
    steps: int
    sigma: float
    totals: Array
    chosen: Constants


def point(problem: Linear, epsilon: float, noise: Noise, runs: int, generator: np.random.Generator) -> Point:
    """Algorithm 1 at Theorem 5.2's number of steps, with one of NOISES; infinite noise where the paper has none."""
    rows, size = problem.now.shape
    chosen, steps = constants(problem), theorem_steps(epsilon, rows, size)
    if noise == "paper":
        met = admissible_noise(epsilon, DELTA, steps, rows)
        deviation = math.sqrt(met.relative_variance) * 2.0 * problem.gradient_bound if met else math.inf
        deviations = np.full(steps, deviation)
    else:
        multiplier = least_noise_multiplier(epsilon, rows, steps, DELTA)
        factors = MOMENTUM * 0.25 / np.sqrt(np.arange(steps - 1) + chosen.shift)
        deviations = multiplier * problem.sensitivity * np.concatenate([[1.0], factors])
    totals = utility(problem, chosen, deviations, runs, generator)
    return Point(rows, epsilon, steps, float(deviations[0]), totals, chosen)


def claims(points: Mapping[Noise, Sequence[Point]]) -> Iterator[Claim]:
    """The exponent of Theorem 5.2 inside its conditions, for both noises."""
    for noise, measured in points.items():
        totals = np.array([each.totals for each in measured])
        across = np.array([each.rows * each.epsilon for each in measured])
        what = f"slope of log Eq. 4 in log(n epsilon), {across[0]:g} to {across[-1]:g}, T by the theorem with C = 1"
        label = {"paper": "Theorem 5.1's noise, its conditions met", "accountant": "the accountant's noise"}[noise]
        yield within(f"Inside Theorem 5.2 (linear values, ridge {RIDGE:g}, its kappa, eta, nu), Eq. 4 falls at least "
                     f"like (n epsilon)^(-1/4), {label}", "DPTD Theorem 5.2",
                     bootstrap(slope_of_mean(across), totals, 18), high=-0.25, what=what,
                     kind="statement" if noise == "paper" else "corrected", paper="-1/4")


def condition_claim(epsilon: float = 1.0, rows: int = 8000) -> Claim:
    """Theorem 5.1's condition at its least noise and Theorem 5.2's number of steps."""
    steps = theorem_steps(epsilon, rows, len(SCALE) + 1)
    noise = paper_noise(epsilon, DELTA, steps, rows, least_noise_split(epsilon, DELTA))
    return within(f"Theorem 5.1's condition sigma'^2 >= 0.7 is met with the least noise that it asks for, T = {steps}"
                  f" (Theorem 5.2, C = 1), n = {rows}, epsilon {epsilon:g}", "DPTD Theorem 5.1",
                  noise.relative_variance, low=0.7, what="sigma'^2", kind="assumption", paper=">= 0.7")


def rows(points: Sequence[Point], noise: Noise) -> list[Row]:
    """For inside.csv."""
    return [
        {"calibration": noise, "rows": each.rows, "epsilon": each.epsilon, "steps": each.steps,
         "first_sigma": each.sigma, "mu": each.chosen.mu, "smoothness": each.chosen.smoothness,
         "eta": each.chosen.eta, "kappa": each.chosen.kappa, "shift": each.chosen.shift,
         "utility": each.totals.mean(), "utility_sd": each.totals.std(ddof=1)}
        for each in points
    ]


def figure(points: Mapping[Noise, Sequence[Point]]) -> Figure:
    """Eq. 4 against nε for both noises, with the theorem's slope."""
    drawing, (axes,) = new_figure()
    for place, (noise, measured) in enumerate(points.items()):
        across = np.array([each.rows * each.epsilon for each in measured])
        mean = np.array([each.totals.mean() for each in measured])
        axes.plot(across, mean, "o-", color=COLOURS[place], label=f"noise: {noise}")
        axes.plot(across, mean[0] * (across / across[0]) ** -0.25, ":", color=COLOURS[place], linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="n ε", title="Eq. 4 (dotted: the theorem's slope)")
    axes.legend()
    return drawing


def run(quick: bool) -> Report:
    """Both noises over GRID, bit-reproducible; `quick` takes fewer runs and smaller n."""
    grid, generator = (GRID[:4] if quick else GRID), np.random.default_rng(17)
    pool = cart_pole(grid[-1][0], 500)
    problems = [linear(*(column[:number] for column in pool)) for number, _ in grid]
    points = {
        noise: [point(problem, epsilon, noise, 4 if quick else 10, generator)
                for problem, (_, epsilon) in zip(problems, grid, strict=True)]
        for noise in NOISES
    }  # fmt: skip
    table = [row for noise, measured in points.items() for row in rows(measured, noise)]
    return Report("dptd", [condition_claim(), *claims(points)], {"inside": table}, {"scaling": figure(points)})
