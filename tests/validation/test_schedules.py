"""Searched schedules: what they charge, their draws by a naive loop, a resumable search, verdicts that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.validation.private_rl import outcome, schedules, sweep
from pipeline.validation.private_rl.schedules import PLANS, Plan


def test_an_episode_is_charged_for_every_update_that_reads_it() -> None:
    plan = Plan(10, 20, 1.0, 0.5, 3, 3.0, 1.0, 0.0)
    assert sum(plan.sizes) == 500
    assert plan.sizes[:2] == (10, 20)
    assert plan.weights(8.0) == pytest.approx(4.0 * np.array([4.0, 2.0, 1.0]) / 7.0)
    assert schedules.total_epsilon(plan, 8.0) == pytest.approx(8.0)
    for chosen in PLANS.values():
        assert schedules.total_epsilon(chosen, 8.0) <= 8.0 + 1e-9


def test_the_score_reads_no_batch_more_often_than_charged() -> None:
    """A data set in which one batch has no loss at all: the score of update m differs by w_j, j updates later, or 0."""
    world = outcome.problem("easy")
    plan = replace(PLANS["easy"], stay=0.0, optimism=0.0)
    quiet = replace(world, losses=np.zeros_like(world.losses))
    curves = schedules.regret_curves(quiet, plan, 8.0, 400, np.random.default_rng(0))
    assert curves.mean() == pytest.approx(world.regret.mean(), rel=0.05)  # no loss: every draw is uniform


def test_the_search_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GENERATIONS", 2), ("STARTS", 3), ("KEPT", 2), ("CHILDREN", 1), ("RUNS", (3, 3, 3))):
        monkeypatch.setattr(sweep, name, value)
    sweep.run_sweep(tmp_path)
    best = json.loads((tmp_path / "best.json").read_text())
    (tmp_path / "best.json").unlink()
    monkeypatch.setattr(sweep, "judge", None)  # nothing is judged anew
    sweep.run_sweep(tmp_path)
    assert json.loads((tmp_path / "best.json").read_text()) == best
    assert set(sweep.GOALS) < set(best)


def test_verdicts_follow_the_plateaus() -> None:
    worlds = [outcome.problem(name) for name in outcome.PUBLISHED]
    cells = schedules.measure(worlds, 20)
    assert set(cells) == {("both", "easy"), ("both", "hard"), ("easy", "easy"), ("hard", "hard")}
    early, late = np.zeros((50, 500), np.float32), np.ones((50, 500), np.float32)
    early[:, :20] = 1.0
    for curve, verdict in ((early, "holds"), (late, "refuted")):
        made = {key: replace(one, cumulative=curve.cumsum(axis=1)) for key, one in cells.items()}
        assert [claim.verdict for claim in schedules.claims(made)] == [verdict] * 4 + ["holds"]
