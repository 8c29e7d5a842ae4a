"""Reports: what they may tell, their law, the runs against naive ones, verdicts that can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf_lab.studies.private_rl import outcome, plateaus, reports, schedules
from private_rlhf_lab.studies.private_rl.updates import fixed
from scipy.stats import chisquare


def test_a_class_and_a_reward_are_all_that_a_trajectory_tells() -> None:
    """The losses of every hypothesis, and the actions that every f plays, are alike within a class."""
    world = outcome.problem("hard")
    classes, one = reports.context_classes(world)
    assert len(one) == 32
    assert np.bincount(classes).tolist() == [2] * 32
    assert (classes[one] == np.arange(32)).all()
    assert (world.predicted == world.predicted[:, one[classes]]).all()
    assert (world.played == world.played[:, one[classes]]).all()


def test_the_law_of_a_report_and_its_largest_ratio() -> None:
    """Chi-square of 40,000 reports of each of 5 truths, false alarm 1e-6; the ratios of that law are at most e^ε."""
    epsilon, kinds = 1.2, 5
    rng = np.random.default_rng(0)
    law = np.full((kinds, kinds), 1.0 / (math.exp(epsilon) + kinds - 1))
    law[np.diag_indices(kinds)] *= math.exp(epsilon)
    assert law.sum(axis=1) == pytest.approx(np.ones(kinds))
    assert np.log(law[:, None] / law[None]).max() == pytest.approx(epsilon)
    for truth in range(kinds):
        seen = np.bincount(reports.randomised(np.full(40_000, truth), kinds, epsilon, rng), minlength=kinds)
        assert chisquare(seen, 40_000 * law[truth]).pvalue > 1e-6


def test_samples_see_the_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reports.told(5.0, 50_000, 0).ci_low < 1.0 < reports.told(5.0, 50_000, 0).ci_high
    sound = reports.randomised
    monkeypatch.setattr(reports, "randomised", lambda truth, kinds, epsilon, rng: sound(truth, kinds, 2 * epsilon, rng))
    assert reports.told(5.0, 50_000, 0).ci_low > 1.5


def naive_run(world: outcome.OutcomeProblem, epsilon: float, episodes: int, rng: np.random.Generator) -> float:
    """Report by report, by a table of contexts with equal losses; final expected regret."""
    kinds = sorted({world.predicted[:, x].tobytes() for x in range(64)})
    context_of = {kind: [x for x in range(64) if world.predicted[:, x].tobytes() == kind] for kind in kinds}
    score, total = 3.0 * world.first_value, 0.0
    for _ in range(episodes):
        best = np.flatnonzero(score == score.max())
        f = int(rng.choice(best))
        total += world.regret[f]
        x = int(rng.integers(64))
        told = (world.predicted[:, x].tobytes(), int(world.reward[x, world.played[f, x]]))
        every = [(kind, r) for kind in kinds for r in (0, 1)]
        odds = np.array([math.exp(epsilon) if each == told else 1.0 for each in every])
        kind, r = every[rng.choice(len(every), p=odds / odds.sum())]
        x = context_of[kind][0]
        score = score - (world.predicted[:, x, world.played[f, x]] - float(r)) ** 2
    return total


def test_the_runs_against_naive_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """ε = 3, 40 episodes, 150 naive runs against 1,500: |z| < 5; a different ε is told apart."""
    monkeypatch.setattr(reports, "EPISODES", 40)
    world, rng = outcome.problem("easy"), np.random.default_rng(1)
    naive = np.array([naive_run(world, 3.0, 40, rng) for _ in range(150)])

    def z(epsilon: float) -> float:
        ours = reports.regret_curves(world, epsilon, 1500, rng).sum(axis=1)
        return float((ours.mean() - naive.mean()) / math.sqrt(ours.var() / ours.size + naive.var() / naive.size))

    assert abs(z(3.0)) < 5.0
    assert z(8.0) < -5.0


def test_without_privacy_they_are_the_non_private_column() -> None:
    world, rng = outcome.problem("easy"), np.random.default_rng(2)
    private = reports.regret_curves(world, 60.0, 200, rng).sum(axis=1)
    plain = outcome.regret_curves(world, fixed(500, 1), math.inf, 200, rng).sum(axis=1)
    spread = math.sqrt((private.var() + plain.var()) / 200)
    assert abs(private.mean() - plain.mean()) < 4.0 * spread


def test_verdicts_follow_the_plateaus() -> None:
    worlds = [outcome.problem(name) for name in outcome.PUBLISHED]
    cells = reports.measure(worlds, 5, (8.0, 5.0, 1.0))
    assert len(reports.rows(cells)) == 6
    planned = {
        (name, name): plateaus.Cell(name, "plan", np.full((50, 500), 9.0, np.float32)) for name in outcome.PUBLISHED
    }
    assert planned.keys() < {(goal, world) for goal in schedules.PLANS for world in outcome.PUBLISHED}
    early, late = np.zeros((50, 500), np.float32), np.ones((50, 500), np.float32)
    early[:, :4] = 1.0
    for curve, verdict in ((early, "holds"), (late, "refuted")):
        made = {key: replace(one, cumulative=curve.cumsum(axis=1)) for key, one in cells.items()}
        assert [claim.verdict for claim in reports.claims(made, planned)] == [verdict] * 5
