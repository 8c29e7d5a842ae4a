"""Labels in the program's own coordinates, the learned distinguisher, bounds on epsilon, and the power of each part."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from audit.worlds import make_world, sound
from private_rlhf.audit.command import render
from private_rlhf.audit.learn import CRITERION, distinguisher
from private_rlhf.audit.released import private_label, row_order
from private_rlhf.audit.suite import Attack, run_attacks
from support.leaky_coordinates import column_of_own_label, raw_evaluation, sorted_by_own_label


def test_rows_sorted_by_the_programs_own_label_are_read(tmp_path: Path) -> None:
    """Seen relative to the id alone: in the order of the texts the same rows are coins."""
    world = make_world(1000, seed=21)
    folder = sorted_by_own_label(world, tmp_path / "bundle")
    outcome = run_attacks([folder], world.truth(), attacks=(row_order,))
    accused = [row for row in outcome.attacks if row.leak]
    assert accused
    assert all("relative to bit 0 of the last digit of record_id" in row.variant for row in accused)
    assert max(row.rate or 0 for row in accused) > 0.98
    assert outcome.epsilon_low is not None
    assert outcome.epsilon_low > 2 > 0.1


@pytest.mark.parametrize("attack", [distinguisher, private_label, row_order])
def test_a_sound_bundle_is_below_its_claim(tmp_path: Path, attack: Attack) -> None:
    """A bound above the claim and a verdict of a leak are the same thing; 1 sound world in 1,000 has one."""
    world = make_world(1500, seed=22)
    outcome = run_attacks([sound(world, tmp_path / "bundle", 0.5)], world.truth(), attacks=(attack,))
    assert not outcome.leak
    assert outcome.epsilon_low is not None
    assert outcome.epsilon_low <= 0.5


@pytest.mark.thorough
def test_the_bound_is_above_the_claim_where_a_guess_is_accused(tmp_path: Path) -> None:
    world = make_world(1000, seed=23)
    outcome = run_attacks([column_of_own_label(world, tmp_path / "bundle")], world.truth())
    claim = math.log(outcome.alpha / (1 - outcome.alpha))
    assert outcome.leak
    assert outcome.epsilon_low is not None
    assert outcome.epsilon_low > claim
    assert CRITERION not in {row.variant for row in outcome.attacks if row.leak}


def test_the_distinguisher_finds_what_a_column_tells(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    world = make_world(1200, seed=24)
    folder = column_of_own_label(world, tmp_path / "bundle")
    outcome = run_attacks([folder], world.truth(), attacks=(distinguisher,))
    assert outcome.untried is None
    (row,) = [row for row in outcome.attacks if row.leak and "last digit" in row.variant]
    assert row.rate is not None
    assert row.rate > 0.98


def test_without_scikit_learn_one_line_says_what_was_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "private_rlhf.audit.learn.find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    world = make_world(300, seed=25)
    outcome = run_attacks([sound(world, tmp_path / "bundle")], world.truth(), attacks=(distinguisher,))
    assert outcome.untried is not None
    assert "private-rlhf[audit]" in outcome.untried
    assert outcome.untried in render(outcome).splitlines()


@pytest.mark.thorough
def test_each_part_has_its_power(tmp_path: Path) -> None:
    """Twenty events are too few for any leak; the text says so instead of passing them."""
    world = make_world(100, seed=26)
    outcome = run_attacks([raw_evaluation(world, tmp_path / "run")], world.truth(), epsilon=4.0)
    events = {name.rpartition("/")[2]: (count, excess) for name, count, excess in outcome.parts}
    assert events["evaluation"][0] == 20
    assert events["evaluation"][1] == pytest.approx(1 - outcome.alpha)
    assert events["release"][0] == 80
    assert "evaluation: 20 events, too few for any leak to be sure" in render(outcome)
    assert np.isfinite(outcome.power_excess)
