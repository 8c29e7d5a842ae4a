"""`compare --output`: the page and, for runs of several ε, the curve beside it."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.commands import compare
from private_rlhf.evaluation.runs import Run, utility_by_epsilon
from private_rlhf.report import plots
from support.compared_runs import a_run

SWEEP = [replace(a_run(f"{epsilon:g}", gain, 1), epsilon=epsilon)
         for epsilon, gain in ((0.5, 0.0), (2.0, 1.0), (math.inf, 2.0))]  # fmt: skip


def test_a_row_has_what_is_known_on_the_first_run_s_terms() -> None:
    other = replace(SWEEP[1], terms=SWEEP[1].terms | {"kl_coef": "0.1"})
    first, second = utility_by_epsilon([SWEEP[0], other])
    assert first["J"]["value"] == pytest.approx(sum(row["objective_gain"] for row in SWEEP[0].rows.values()) / 120)
    assert first["J"]["ci_low"] < first["J"]["value"] < first["J"]["ci_high"]
    assert (second["epsilon"], bool(second["J"]), bool(second["win rate"])) == (2.0, False, True)


def test_a_curve_needs_two_epsilons_and_draws_no_withheld_rate() -> None:
    rows = utility_by_epsilon(SWEEP)
    assert plots.utility_curve("u", [rows[0], rows[0]]) is None
    few = {"value": 0.7, "ci_low": 0.6, "ci_high": 0.8, "n": 11}
    assert plots.utility_curve("u", [row | {"J": None, "win rate": few} for row in rows]) is None
    drawn = plots.utility_curve("u", rows)
    assert drawn is not None
    withheld = plots.utility_curve("u", [row | {"win rate": few} for row in rows])
    assert withheld is not None
    marks = [len(re.findall(r"<use ", each)) for each in (drawn, withheld)]
    assert marks[0] - marks[1] >= 3  # a dot a run


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Run]:
    runs = {run.name: run for run in SWEEP}
    monkeypatch.setattr(compare, "read_run", lambda folder: runs[folder.name])
    monkeypatch.chdir(tmp_path)
    return runs


def test_the_figure_stands_beside_the_page_and_is_written_again(sweep: dict[str, Run], tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["compare", "--output", "sweep.md", *sweep]) == 0
    assert "](sweep.svg)" in (tmp_path / "sweep.md").read_text(encoding="utf-8")
    root = xml.parse(tmp_path / "sweep.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "--policy: #" in root[0].text  # type: ignore[operator]
    (tmp_path / "one.svg").write_text("<svg>mine</svg>")
    assert main(["compare", "--output", "one.md", *sweep]) == 2
    assert main(["compare", "--output", "sweep.svg", *sweep]) == 2
    assert (tmp_path / "one.svg").read_text() == "<svg>mine</svg>"


def test_runs_of_one_epsilon_have_no_figure(sweep: dict[str, Run], tmp_path: Path) -> None:
    assert main(["compare", "--output", "same.md", "2", "2"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["same.md"]
