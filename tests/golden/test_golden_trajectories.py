"""A change of numerics is a decision: the trained stages report what was recorded, within what their dtype rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.golden_trajectories import RECORDED, held_down, trajectories

TOLERANCES = {"float32": 2e-4, "bfloat16": 3e-2}
"""Absolute (nats, units of the reward) and relative: processors and kernels add in other orders. A wrong sign, a
shifted mask or a lost factor moves these numbers by far more."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_every_stage_reports_what_was_recorded(dtype: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[dtype]
    found = (held_down if dtype == "bfloat16" else trajectories)(tmp_path, dtype)
    assert found.keys() == recorded.keys()
    for stage, numbers in recorded.items():
        assert found[stage] == pytest.approx(numbers, rel=TOLERANCES[dtype], abs=TOLERANCES[dtype]), stage


def test_the_recorded_numbers_move_by_more_than_the_tolerance() -> None:
    """Else the comparison could not fail."""
    for dtype, stages in json.loads(RECORDED.read_text(encoding="utf-8")).items():
        for stage, numbers in stages.items():
            assert len(numbers) >= 6
            assert max(numbers) - min(numbers) > 3 * TOLERANCES[dtype], (dtype, stage)
