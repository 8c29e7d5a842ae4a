"""Numbers in documents: sound statements are not accused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audit.worlds import make_world, sound
from private_rlhf.audit.statistics import statistics
from private_rlhf.audit.view import Answers, View, build_view
from private_rlhf.core.noise import LabelNoise

EPSILON, SIZE = 0.1, 400


@pytest.fixture
def view(tmp_path: Path) -> View:
    world = make_world(SIZE, seed=30)
    return build_view([sound(world, tmp_path / "bundle", EPSILON)], world.truth())[0]


def accusations(view: View, worlds: int) -> int:
    """The number of worlds, each with fair coins and their private labels, in which a document is accused."""
    generator = np.random.default_rng(31)
    accused = 0
    for _ in range(worlds):
        labels = generator.choice([-1, 1], SIZE).astype(np.int8)
        z = np.where(generator.random(SIZE) < LabelNoise.of(EPSILON).keep_prob, labels, -labels).astype(np.int8)
        view.tables[0] = replace(view.tables[0], z=z[view.tables[0].event])
        accused += bool(statistics(view, Answers(labels, np.zeros(0, np.int8))))
    return accused


@pytest.mark.parametrize(
    "statement",
    ["demonstrations: kept 200 of 400 rows", "accuracy 0.5375 on 80 rows", "win_rate 0.4875 on 80 prompts"],
)
def test_sound_statements_are_not_accused(view: View, statement: str) -> None:
    """Two or more of 300 worlds have a probability below 4 % at the stated 0.1 %."""
    (view.roots[0] / "run.log").write_text(statement)
    view.files.append(view.roots[0] / "run.log")
    assert accusations(view, 300) <= 1
