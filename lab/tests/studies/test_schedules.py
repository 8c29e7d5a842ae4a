"""Searched schedules: what they charge, their draws by a naive loop, a resumable search, verdicts that can fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from private_rlhf_lab.accounting.bounded_range import composed_delta
from private_rlhf_lab.accounting.bounded_range import largest_factor as factor
from private_rlhf_lab.studies.private_rl import outcome, schedules, sweep
from private_rlhf_lab.studies.private_rl.schedules import PLANS, Noise, Plan
from private_rlhf_lab.studies.private_rl.updates import DELTA


def test_an_episode_is_charged_for_every_update_that_reads_it() -> None:
    plan = Plan(10, 20, 1.0, 0.5, 3, 3.0, 1.0, 0.0, "exponential")
    assert sum(plan.sizes) == 500
    assert plan.sizes[:2] == (10, 20)
    assert plan.weights(8.0) == pytest.approx(4.0 * np.array([4.0, 2.0, 1.0]) / 7.0)
    assert schedules.total_epsilon(plan, 8.0) == pytest.approx(8.0)
    for chosen in PLANS.values():
        assert schedules.total_epsilon(chosen, 8.0) <= 8.0 + 1e-9


def test_gumbel_noise_composes_exactly() -> None:
    """Larger weights than by addition, within δ = 1e-5, and a charge that notices weights that are too large."""
    plan = Plan(10, 20, 1.0, 0.5, 4, 3.0, 1.0, 0.0, "gumbel")
    weights = plan.weights(8.0)
    assert weights / weights[0] == pytest.approx(0.5 ** np.arange(4))
    assert 1.02 < weights.sum() / 4.0 < 1.2
    assert composed_delta(2.0 * weights, 8.0) <= DELTA < composed_delta(2.02 * weights, 8.0)
    assert schedules.total_epsilon(plan, 8.0) == 8.0


def test_too_large_weights_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "largest_factor", lambda *given: 1.1 * factor(*given))
    plan = Plan(10, 20, 1.0, 0.5, 4, 3.0, 1.0, 0.0, "gumbel")
    assert 8.4 < schedules.total_epsilon(plan, 8.0) < 9.0


@pytest.mark.parametrize("noise", ["exponential", "gumbel"])
def test_a_draw_of_either_noise(noise: Noise) -> None:
    """The first draw, of two hypotheses a score of 1 apart: e⁻¹/2 of permute-and-flip, 1/(1 + e) of the softmax."""
    world = outcome.problem("easy")
    two = replace(world, first_value=np.array([0.0, 1.0]), losses=world.losses[:, :2], played=world.played[:2],
                  regret=np.array([1.0, 0.0]))  # fmt: skip
    plan = Plan(500, 1, 1.0, 1.0, 1, 1.0, 0.0, 0.0, noise)
    curves = schedules.regret_curves(two, plan, 8.0, 20_000, np.random.default_rng(3))
    share = 0.5 * math.exp(-1.0) if noise == "exponential" else 1.0 / (1.0 + math.e)
    assert curves[:, 0].mean() == pytest.approx(share, abs=4.0 * math.sqrt(share / 20_000))


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
