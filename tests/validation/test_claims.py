"""Verdicts follow from the criterion; reports are written whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.core.stats import Estimate
from pipeline.validation import lab
from pipeline.validation.lab import Report, within
from pipeline.validation.panels import new_figure


def estimate(measured: float, interval: tuple[float, float] | None) -> float | Estimate:
    return measured if interval is None else Estimate(measured, *interval, n=1)


@pytest.mark.parametrize(
    ("measured", "interval", "verdict"),
    [
        (0.9, None, "holds"),
        (1.1, None, "refuted"),
        (0.9, (0.8, 0.95), "holds"),
        (0.9, (0.8, 1.2), "undecided"),
        (1.1, (0.8, 1.2), "undecided"),
        (1.1, (1.05, 1.2), "refuted"),
    ],
)
def test_verdict_of_an_upper_bound(measured: float, interval: tuple[float, float] | None, verdict: str) -> None:
    claim = within("c", "s", estimate(measured, interval), high=1.0, what="x")
    assert claim.verdict == verdict
    assert claim.criterion == ("x <= 1" if interval is None else "95 % interval of x <= 1")


def test_two_sided_criterion() -> None:
    made = [within("c", "s", value, low=-1.05, high=-0.95, what="slope").verdict for value in (-1.1, -1.0, -0.9)]
    assert made == ["refuted", "holds", "refuted"]
    wide = within("c", "s", estimate(-1.0, (-1.2, -0.8)), low=-1.05, high=-0.95, what="slope")
    assert wide.verdict == "undecided"
    assert wide.criterion == "95 % interval of slope >= -1.05 and <= -0.95"


@pytest.mark.parametrize(("measured", "interval"), [(float("nan"), None), (float("inf"), None), (2.0, (0.0, 1.0))])
def test_nothing_is_claimed_about_broken_numbers(measured: float, interval: tuple[float, float] | None) -> None:
    with pytest.raises(ValueError):
        within("c", "s", estimate(measured, interval), high=1.0, what="x")


def example() -> Report:
    figure, (axes,) = new_figure()
    axes.plot([0, 1], [0, 1])
    claim = within("a [b] c", "source", estimate(0.5, (0.4, 0.6)), high=1.0, what="x")
    return Report("toy", [claim], {"rows": [{"a": 1, "b": "x"}]}, {"line": figure})


def test_a_report_replaces_the_folder_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "old.csv").write_text("old")
    example().write(folder, quick=True, started=time.monotonic())
    assert {path.name for path in folder.iterdir()} == {"claims.json", "run.json", "rows.csv", "line.png", "line.svg"}
    (claim,) = json.loads((folder / "claims.json").read_text())
    assert list(claim) == ["claim", "source", "criterion", "measured", "interval", "verdict"]
    assert claim["interval"] == [0.4, 0.6]
    assert (folder / "rows.csv").read_text().splitlines() == ["a,b", "1,x"]
    first = (folder / "line.svg").read_bytes()
    example().write(folder, quick=True, started=time.monotonic())
    assert (folder / "line.svg").read_bytes() == first
    example().print_table()
    printed = capsys.readouterr().out
    assert "a [b] c" in printed
    assert "holds" in printed


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "old.csv").write_text("old")
    broken = Report("toy", [], {"rows": [{"a": 1}, {"b": 2}]})
    with pytest.raises(ValueError):
        broken.write(folder, quick=True, started=0.0)
    assert [path.name for path in tmp_path.rglob("*")] == ["toy", "old.csv"]


def test_validate_runs_a_module_and_exits_0_though_a_claim_is_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        @staticmethod
        def run(quick: bool) -> Report:
            assert quick
            return Report("toy", [within("no", "s", 2.0, high=1.0, what="x")])

    monkeypatch.setattr(lab, "STUDIES", ("toy",))
    monkeypatch.setattr(lab.importlib, "import_module", lambda name: {"pipeline.validation.toy.run": Module}[name])
    for name in ("toy", "all"):
        assert main(["validate", name, "--quick", "--output", str(tmp_path)]) == 0
        assert "refuted" in capsys.readouterr().out
    assert json.loads((tmp_path / "toy" / "claims.json").read_text())[0]["verdict"] == "refuted"


def test_an_unknown_module_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "nonsense"]) == 2
    assert "no validation module 'nonsense': choose " in capsys.readouterr().err


def test_every_registered_module_offers_run() -> None:
    import importlib

    for name in lab.STUDIES:
        assert callable(importlib.import_module(f"pipeline.validation.{name}.run").run)
