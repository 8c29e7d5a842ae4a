"""The linear experiment inside Theorem 5.2: its constants bound what they must, and its iterates are Algorithm 1's."""

from __future__ import annotations

import numpy as np
import pytest
from private_rlhf.validation import temporal_differences
from private_rlhf.validation.temporal_differences import RIDGE
from private_rlhf_lab.studies.dptd import inside
from private_rlhf_lab.studies.dptd.trajectories import Transitions


@pytest.fixture
def problem() -> inside.Linear:
    generator = np.random.default_rng(0)
    states = generator.normal(size=(2, 30, 3))
    rewards, owners = generator.normal(size=30), np.zeros(30, dtype=np.int64)
    return inside.linear(Transitions(states[0], rewards, states[1], np.full(30, 0.95), owners))


def value(problem: inside.Linear, theta: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """f of every record."""
    along = problem.now @ omega
    error = problem.reward + (problem.then - problem.now) @ theta
    return np.asarray(error * along - 0.5 * along**2 - 0.5 * RIDGE * omega @ omega)


def test_constants_meet_the_theorem(problem: inside.Linear) -> None:
    """The Hessian by differences; strong concavity, smoothness, the conditions, the bound on all gradients."""
    generator, size = np.random.default_rng(1), problem.now.shape[1]
    hessian, chosen, step = problem.hessian, temporal_differences.constants(problem), 1e-3
    point = generator.uniform(-1, 1, 2 * size)

    def total(at: np.ndarray) -> float:
        return float(value(problem, at[:size], at[size:]).mean())

    units = np.eye(2 * size) * step
    for i in range(2 * size):
        for j in range(2 * size):
            plus, minus = total(point + units[i] + units[j]), total(point - units[i] - units[j])
            cross = total(point + units[i] - units[j]) + total(point - units[i] + units[j])
            assert (plus + minus - cross) / (4 * step**2) == pytest.approx(hessian[i, j], abs=1e-6)
    assert np.linalg.eigvalsh(hessian[size:, size:]).max() == pytest.approx(-chosen.mu)
    assert chosen.mu >= RIDGE
    assert np.linalg.svd(hessian)[1][0] == pytest.approx(chosen.smoothness)
    assert chosen.eta <= chosen.mu / (4 * chosen.smoothness**2) + 1e-12
    assert chosen.kappa <= chosen.eta * chosen.mu**2 / (9 * chosen.smoothness**2) + 1e-12
    first = 0.25 / np.sqrt(chosen.shift)  # ν_0
    assert 8 * temporal_differences.MOMENTUM * first <= 1.0  # Lemma C.6
    assert first <= min(1 / 27, chosen.mu / (16 * chosen.kappa * chosen.smoothness**2)) + 1e-12  # the proof
    for _ in range(200):
        theta, omega = np.sign(generator.uniform(-1, 1, (2, size)))
        rest = problem.reward + (problem.then - problem.now) @ theta - problem.now @ omega
        dual = rest[:, None] * problem.now - RIDGE * omega
        primal = (problem.now @ omega)[:, None] * (problem.then - problem.now)
        longest = max(np.linalg.norm(dual, axis=1).max(), np.linalg.norm(primal, axis=1).max())
        assert longest <= problem.gradient_bound


def test_without_noise_the_utility_falls(problem: inside.Linear) -> None:
    chosen = temporal_differences.constants(problem)
    short, long = (
        temporal_differences.utility(problem, chosen, np.zeros(steps), 8, np.random.default_rng(2)).mean()
        for steps in (20, 4000)
    )
    assert long < 0.4 * short
    loud = temporal_differences.utility(problem, chosen, np.full(20, 10.0), 8, np.random.default_rng(2)).mean()
    assert loud > 5 * short


def test_the_paper_s_noise_cannot_fall_inside_its_conditions() -> None:
    """σ'² ≥ 0.7 holds σ up while T grows: Eq. 4 rises. With the accountant's, it falls. One small grid, fixed seeds."""
    generator = np.random.default_rng(3)
    states = generator.normal(size=(2, 2000, 3))
    owners = np.zeros(2000, dtype=np.int64)
    pool = Transitions(states[0], np.ones(2000), states[1], np.full(2000, 0.95), owners)
    grid = ((500, 2.0), (1000, 4.0), (2000, 8.0))
    found = {kind: inside.measure(pool, grid, kind, 5) for kind in ("paper", "accountant")}
    assert found["paper"][2].totals.mean() > found["paper"][0].totals.mean()
    assert found["accountant"][2].totals.mean() < found["accountant"][0].totals.mean()
    assert [claim.verdict for claim in inside.claims(found)] == ["refuted", "holds"]  # type: ignore[arg-type]
    assert min(point.sigma for point in found["paper"]) >= (4 * 0.7) ** 0.5
    assert len(inside.rows(found["paper"], "paper")) == 3
