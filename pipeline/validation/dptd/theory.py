"""What Theorems 5.1, 5.2 and A.1 say at the settings of the paper's experiments, checked number by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeline.accounting.dptd import joint_sensitivity, subsampled_gaussian_epsilon
from pipeline.validation.dptd.algorithms import STEP
from pipeline.validation.dptd.attack import attack
from pipeline.validation.dptd.metrics import curvature, subset
from pipeline.validation.dptd.network import HIDDEN, dimension, gradients
from pipeline.validation.dptd.noise import (
    MOMENTUM,
    ORDERS,
    Budget,
    Neighbors,
    accountant_sigma,
    admissible_noise,
    deviations,
    paper_certified,
    paper_noise,
    step_sizes,
)
from pipeline.validation.dptd.study import EPSILON, Problem
from pipeline.validation.dptd.trajectories import Transitions
from pipeline.validation.lab import Claim, within

SINGULAR = 1e-10  # a ratio of eigenvalues below this is a zero in double precision


def theorem_budget(problem: Problem, neighbors: Neighbors = "transition") -> Budget:
    """EPSILON with the number of steps of Theorem 5.2 (A.2) at C = 1, at least one."""
    budget = problem.budget(EPSILON, neighbors)
    return replace(budget, steps=max(1, round(budget.theorem_steps(dimension(problem.task.size)))))


def accountant_certified(budget: Budget, sigma: float) -> float:
    """ε that dp-accounting certifies for noise αν·σ."""
    multiplier = sigma / joint_sensitivity(budget.clip)
    return subsampled_gaussian_epsilon(budget.population, budget.steps, multiplier, budget.delta, orders=ORDERS)


def calibrations(problem: Problem) -> list[dict[str, object]]:
    """Rows of calibration.csv: both neighbour notions, the theorem's number of steps and the figures'."""
    rows: list[dict[str, object]] = []
    notions: tuple[Neighbors, ...] = ("transition", "trajectory")
    for neighbors in notions:
        for which, budget in (
            ("theorem", theorem_budget(problem, neighbors)),
            ("figures", problem.budget(EPSILON, neighbors)),
        ):
            least, met, sigma = paper_noise(budget), admissible_noise(budget), accountant_sigma(budget)
            rows.append(
                {"task": problem.task.name, "parameters": dimension(problem.task.size), "neighbors": neighbors,
                 "rows": budget.rows, "trajectories": budget.trajectories, "steps_of": which, "steps": budget.steps,
                 "theorem_steps": budget.theorem_steps(dimension(problem.task.size)), "claimed_epsilon": budget.epsilon,
                 "delta": budget.delta, "paper_sigma": least.sigma, "relative_variance": least.relative_variance,
                 "order": least.order, "order_limit": least.order_limit,
                 "paper_certified": paper_certified(budget, least.sigma),
                 "admissible_split": met.split if met else None, "admissible_sigma": met.sigma if met else None,
                 "admissible_certified": paper_certified(budget, met.sigma) if met else None, "accountant_sigma": sigma,
                 "accountant_certified": accountant_certified(budget, sigma)}
            )
    return rows


def privacy_claims(problem: Problem, rows: list[dict[str, object]], runs: int) -> Iterator[Claim]:
    """Theorem 5.1 on one task: `rows` are its `calibrations`; `runs` attacked runs."""
    budget = theorem_budget(problem)
    noise = paper_noise(budget)
    setting = f"T = {budget.steps} (Theorem 5.2, C = 1), n = {budget.rows}, epsilon {EPSILON:g}"
    delta = attack(problem.data, deviations("paper", budget), budget.clip, runs, seed=31).delta(EPSILON)
    yield within(f"Theorem 5.1's condition sigma'^2 >= 0.7 is met with the least noise that it asks for, {setting}",
                 "DPTD Theorem 5.1", noise.relative_variance, low=0.7, what="sigma'^2")
    yield within(f"Theorem 5.1's condition on alpha' is met with that noise, {setting}", "DPTD Theorem 5.1",
                 noise.order - noise.order_limit, high=0.0, what="alpha' minus its limit")
    yield within(f"That noise is ({EPSILON:g}, {budget.delta:g})-private for single transitions", "DPTD Theorem 5.1",
                 delta, high=budget.delta, what="delta spent on one pair of neighbours, at least")
    names = {"theorem": "the T of Theorem 5.2", "figures": "the figures' T"}
    for row in rows:
        where = f"{row['neighbors']} neighbours, {names[str(row['steps_of'])]}"
        certified = float(str(row["paper_certified"]))
        if np.isfinite(certified) and row["neighbors"] == "transition":
            yield _certified(f"the paper's least noise, {where}", "DPTD Theorem 5.1", certified)
        if row["admissible_certified"] is not None and row["neighbors"] == "transition":
            chosen = f"the paper's noise at a beta' that meets its conditions, {where}"
            yield _certified(chosen, "DPTD Theorem 5.1", float(str(row["admissible_certified"])))
        own = float(str(row["accountant_certified"]))
        yield _certified(f"calibration accountant, {where}", "this project", own)
    trajectory = theorem_budget(problem, "trajectory").theorem_steps(dimension(problem.task.size))
    yield within("Theorem A.2's number of steps is at least 1 for five trajectories (C = 1)", "DPTD Theorem A.2",
                 trajectory, low=1.0, what="m epsilon / (n sqrt(d log 1/delta))")


def _certified(what: str, source: str, epsilon: float) -> Claim:
    return within(f"dp-accounting certifies epsilon {EPSILON:g} for {what}, both players jointly", source, epsilon,
                  high=EPSILON, what="certified epsilon")


def assumption_claims(problem: Problem) -> list[Claim]:
    """The assumptions behind Theorem 5.2 at the paper's step sizes and network."""
    theta = problem.start()[0][0].astype(np.float64)
    spectrum = curvature(theta, subset(problem.data))
    return [
        within("F is strongly concave in omega (Assumption 3.5)", "DPTD Assumption 3.5",
               float(max(spectrum[0], 0.0) / spectrum[-1]), low=SINGULAR,
               what="smallest / largest eigenvalue of G at the start"),
        within("eta = 2 is at most mu/(4 L_F^2) <= 1/(4 lambda_max(G))", "DPTD Theorem 5.2",
               float(4.0 * STEP * spectrum[-1]), high=1.0, what="4 eta lambda_max(G) at the start"),
        within("nu_0 is at most 1/(8 alpha)", "DPTD Lemma C.6", float(8.0 * MOMENTUM * step_sizes(1)[0]), high=1.0,
               what="8 alpha nu_0"),
        within("The gradient is Lipschitz (Assumption 3.2) with ELU units", "DPTD Assumption 3.2",
               kink_growth(problem.data, theta), high=2.0,
               what="difference quotient of the gradient at step 1e-7 / at 1e-4, across a unit's zero"),
    ]


def kink_growth(data: Transitions, theta: np.ndarray) -> float:
    """Growth of |∇_θ ℓ(θ + h) − ∇_θ ℓ(θ − h)|/2h from h = 1e-4 to 1e-7, where one unit is 0 at one transition."""
    one = data.take(np.array([0]))
    point, size = theta.copy(), data.state.shape[1]
    units = point[:-1].reshape(HIDDEN, size + 2)
    units[0, size] = -units[0, :size] @ one.state[0]
    omega = np.linspace(-1.0, 1.0, len(point))

    def quotient(step: float) -> float:
        ends = np.tile(point, (2, 1))
        ends[:, size] += [step, -step]
        found = gradients(ends, np.tile(omega, (2, 1)), one).theta
        return float(np.linalg.norm(found[0] - found[1]) / (2.0 * step))

    return quotient(1e-7) / quotient(1e-4)
