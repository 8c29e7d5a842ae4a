"""Verdicts on the figures and on the scaling follow the numbers; made-up outcomes."""

from __future__ import annotations

import numpy as np
import pytest
from private_rlhf_lab.studies.dptd import outcomes, scaling
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.metrics import Utility
from private_rlhf_lab.studies.dptd.outcomes import Outcome
from private_rlhf_lab.studies.dptd.study import FIGURE_1, Problem
from private_rlhf_lab.studies.dptd.trajectories import Transitions

EPSILONS = (1.0, 100.0)


def problem() -> Problem:
    empty = Transitions(np.zeros((3, 4)), np.ones(3), np.zeros((3, 4)), np.ones(3), np.zeros(3, dtype=np.int64))
    return Problem(TASKS["cartpole"], empty, 1.0, 4)


def spread() -> np.ndarray:
    """About 1, of four runs."""
    return 1.0 + 0.01 * np.arange(4)


def outcome(level: float, mspbe: float) -> Outcome:
    """|L| = level at the end, with a little spread over four runs."""
    objective = np.tile(-level * spread(), (6, 1))
    return Outcome(np.arange(6.0), objective, mspbe * spread(), -objective, np.array([0.5, 0.25]))


def found(private: float) -> dict[str, Outcome]:
    """DPTD ends at |L| = `private`, everything else at 1."""
    arms = {name: outcome(1.0, 1.0) for name in (*FIGURE_1, *outcomes.PUBLISHED)}
    for kind in ("accountant", "paper"):
        for epsilon in EPSILONS:
            arms[outcomes.second_figure(kind, epsilon)] = outcome(private if epsilon == 100.0 else 1.0, 1.0)
    return arms | {"DPTD": outcome(private, private)}


@pytest.mark.parametrize(("private", "verdict"), [(0.5, "holds"), (2.0, "refuted")])
def test_verdicts_follow_the_runs(private: float, verdict: str) -> None:
    made = list(outcomes.claims(problem(), found(private), start=3.0 * spread(), epsilons=EPSILONS))
    compared = [claim for claim in made if ": DPTD" in claim.claim]
    assert len(compared) == 10
    assert {claim.verdict for claim in compared} == {verdict}
    (other,) = (claim for claim in made if "L = 0 means" in claim.claim)
    assert (other.measured, other.verdict) == (pytest.approx(2.0 * 1.015), "refuted")
    assert other.interval is not None


@pytest.mark.parametrize(("level", "verdict"), [(0.05, "holds"), (2.0, "refuted")])
def test_td_alone_is_judged_too(level: float, verdict: str) -> None:
    """From |L| = 1 at the start TD goes to `level`; the others stay near 1."""
    arms = found(0.5) | {"TD": outcome(level, level)}
    arms["TD"].objective[0] = 1.0
    made = [claim for claim in outcomes.claims(problem(), arms, 3.0 * spread(), EPSILONS) if ": TD" in claim.claim]
    assert [claim.verdict for claim in made] == [verdict] * 3


def test_the_end_is_the_last_moments() -> None:
    objective = np.vstack([np.full((1, 2), 100.0), np.tile([-1.0, 3.0], (outcomes.LAST, 1))])
    one = Outcome(np.arange(6.0), objective, np.ones(2), objective, np.zeros(2))
    assert one.end.tolist() == [1.0, 3.0]
    assert one.squared_error.tolist() == [1.0, 9.0]


def test_paired_interval() -> None:
    """Four values: t with three degrees of freedom, 3.182."""
    made = outcomes.paired(np.array([1.0, 2.0, 3.0, 4.0]))
    half = 3.18244630 * np.sqrt(5.0 / 3.0) / 2.0
    assert (made.value, made.ci_low, made.ci_high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


@pytest.mark.parametrize(("power", "verdict"), [(-0.5, "holds"), (-0.1, "refuted")])
def test_slope_of_a_power_law(power: float, verdict: str) -> None:
    points = []
    for rows, epsilon in ((100, 1.0), (200, 2.0), (400, 4.0)):
        total = (rows * epsilon) ** power * (1.0 + 0.001 * np.arange(5))
        points.append(scaling.Point(rows, epsilon, 1, 1.0, Utility(total, 0.0 * total, 0.0 * total)))
    assert scaling.slope(points).value == pytest.approx(power, abs=1e-9)
    assert scaling.claim(points, "paper").verdict == verdict


def test_figures_draw() -> None:
    arms = found(0.5)
    figure = outcomes.draw([problem()], [arms], {"DPTD": "DPTD", "TD": "TD"}, "title")
    assert "d = 301" in figure.axes[0].get_title()
    assert len(outcomes.curves(problem(), arms)) == 6 * len(arms)
    assert {row["arm"] for row in outcomes.summary(problem(), arms)} == set(arms)
