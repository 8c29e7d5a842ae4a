"""The bench of `docs/results/cost.md`, in small."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import cost_curves
import pytest


@pytest.mark.thorough
def test_each_size_has_its_seconds_and_memory(tmp_path: Path) -> None:
    table = tmp_path / "cost.csv"
    sizes = ["--privatize", "50", "200", "--reward", "200", "--prompts", "--tokens"]
    command = [sys.executable, cost_curves.__file__, *sizes, "--csv", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured = [(row["what"], int(row["size"])) for row in rows]
    assert measured == [("privatize", 50), ("privatize", 200), ("reward", 200)]
    assert all(float(row["seconds"]) > 0 and int(row["peak_mib"]) > 50 for row in rows)


def test_the_power_leaves_starting_out() -> None:
    rows = [{"size": size, "seconds": 7 + size**1.5} for size in (0, 10, 100)]
    assert cost_curves.exponent(rows) == pytest.approx(1.5)
    assert cost_curves.exponent(rows[:2]) is None
    assert cost_curves.exponent([{"size": size, "seconds": 7} for size in (0, 10, 100)]) is None
