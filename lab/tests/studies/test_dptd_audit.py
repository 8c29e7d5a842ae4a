"""The privacy verdicts of the study dptd hold on the code as it is, and each planted error refutes one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from private_rlhf_lab.studies.dptd import algorithms, audit, network, noise, theory
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.study import Problem
from private_rlhf_lab.studies.dptd.trajectories import Transitions


@pytest.fixture
def problem() -> Problem:
    generator, rows = np.random.default_rng(3), 60
    states = generator.normal(size=(2, rows, 4))
    owners = np.repeat([0, 1], rows // 2)
    return Problem(
        TASKS["cartpole"], Transitions(states[0], np.ones(rows), states[1], np.full(rows, 0.95), owners), 5.0, 4
    )


def verdicts(problem: Problem) -> list[str]:
    return [claim.verdict for claim in audit.claims(problem, problem.budget(1.0))]


def test_the_code_as_it_is(problem: Problem) -> None:
    assert verdicts(problem) == ["holds"] * 3


def _scaled(factor: float) -> Callable[[float], float]:
    return lambda clip: factor * 2.0 * np.sqrt(2.0) * clip


def _quiet(*arguments: object) -> algorithms.Path:
    data, start, rows, deviation, *rest = arguments
    return algorithms.momentum_runs(data, start, rows, deviation / 10.0, *rest)  # type: ignore[operator, arg-type]


MUTANTS = {
    "the joint sensitivity forgets one player": (noise, "joint_sensitivity", _scaled(0.5**0.5)),
    "the sensitivity is a tenth": (noise, "joint_sensitivity", _scaled(0.1)),
    "a tenth of the noise is added": (audit, "momentum_runs", _quiet),
    "gradients are not clipped": (network, "_shrink", lambda norm, clip: np.ones_like(norm)),
    "the accountant thinks that one of n^2 records is drawn": (
        noise,
        "least_noise_multiplier",
        lambda epsilon, population, *rest: audit_multiplier(epsilon, population**2, *rest),
    ),
    "iterates are not projected": (algorithms, "project", lambda parameters: parameters),
    "one record is drawn again and again": (
        audit,
        "sampled_rows",
        lambda data, steps, runs, *_: np.zeros((steps, runs), dtype=np.int64),
    ),
}
audit_multiplier = noise.least_noise_multiplier


@pytest.mark.parametrize("planted", MUTANTS)
def test_planted_errors_refute_a_verdict(problem: Problem, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = MUTANTS[planted]
    monkeypatch.setattr(module, name, replacement)
    assert "refuted" in verdicts(problem)


@pytest.mark.parametrize(("low", "high", "verdict"), [(2, 3, "refuted"), (0.2, 0.3, "holds"), (0.5, 2, "undecided")])
def test_a_bound_that_fails_to_certify_refutes_nothing(low: float, high: float, verdict: str) -> None:
    row = {"paper_epsilon_low": low, "paper_epsilon_high": high}
    assert theory._spent("claim", "source", row, "paper", "reading").verdict == verdict


@pytest.mark.parametrize(("multiplier", "steps"), [(0.8, 40), (3.0, 1), (2.0, 300)])
def test_the_second_computation_of_delta(multiplier: float, steps: int) -> None:
    from private_rlhf_lab.accounting.subset_pairs import composed_delta

    bound = composed_delta(100, [(multiplier, steps)], 0.3)
    assert audit.spent_delta(0.01, multiplier, steps, 0.3) == pytest.approx(bound, rel=0.02, abs=1e-12)
