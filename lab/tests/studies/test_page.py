"""The page of all results, and the command that runs the studies."""

from __future__ import annotations

import importlib
import math
import time
from pathlib import Path

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.stats import wilson
from private_rlhf.validation.lab import Report, new_figure, within
from private_rlhf_lab.studies import page
from private_rlhf_lab.studies.__main__ import STUDIES, main


def test_the_page_shows_full_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Report(
        "online",
        [within("a | b", "POKL 1", math.inf, high=1.0, what="x", paper="1"),
         within("c", "s", wilson(1, 9), high=1.0, what="y")],
        figures={"line": new_figure()[0]},
    )  # fmt: skip
    page.write(_written(example, tmp_path / "full"), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "- a | b (POKL 1): inf; 1" in text
    rows = (tmp_path / "page" / "online.csv").read_text().splitlines()
    assert rows[1] == "a | b,statement,POKL 1,1,inf,refuted"
    assert len(rows) == 3
    assert "![line](page/online-line.png)" in text
    assert (tmp_path / "page" / "online-line.png").is_file()
    assert main(["online", "--quick", "--page", str(tmp_path / "page.md")]) == 2
    assert "leave out --quick" in capsys.readouterr().err
    with pytest.raises(UserError, match="no results of a full run"):
        page.write(tmp_path / "nowhere", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == text


def _written(report: Report, results: Path) -> Path:
    report.write(results / report.name, quick=False, started=time.monotonic())
    return results


def test_a_study_without_a_sweep_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense", "--sweep", "--output", str(tmp_path)]) == 2
    assert "has no sweep: choose" in capsys.readouterr().err
    assert main(["all", "--sweep", "--quick", "--output", str(tmp_path)]) == 2


def test_a_page_of_another_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("my page")
    monkeypatch.chdir(tmp_path)
    assert main(["kl_dp", "--output=results", "--page=page.md"]) == 2
    assert capsys.readouterr().err.endswith("was not written by this command: choose another file\n")
    assert (tmp_path / "page.md").read_text() == "my page"


def test_every_study_offers_run() -> None:
    for name in STUDIES:
        assert callable(importlib.import_module(f"private_rlhf_lab.studies.{name}.run").run)
