"""`private-rlhf ledger show | verify | export | init | restore`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from support.ledger_releases import events_of, release

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = keygen(tmp_path / "label.key")
    release(Ledger.open(load_key(path)), events_of("ann", 4), 0.5, Budget(1.0, "event"), source="ward")
    return path


def test_show_in_json(key: Path, capsys: Capture) -> None:
    assert main(["ledger", "show", "--key", str(key), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"epsilon_total", "releases", "events", "labelers", "budgets"} <= shown.keys()
    assert (shown["epsilon_total"], shown["events"], shown["labelers"]["count"]) == (0.5, 4, 1)
    assert shown["budgets"] == {"event": 1.0, "person": None}
    (entry,) = shown["releases"]
    assert {"source", "events", "epsilon", "time", "status"} <= entry.keys()


def test_show_for_reading(key: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["ledger", "show", "--key", str(key)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "largest total of any one record: ε = 0.5 (4 events)"
    assert lines[1] == "budgets: ε = 1 per event"
    assert any("another spelling of an event counts as another one" in line for line in lines)
    assert lines[2].startswith("largest total of any one of 1 labellers: ε = 2, or ")
    assert lines[-2].split() == ["time", "source", "events", "ε", "status"]
    assert lines[-1].split()[1:] == ["ward", "4", "0.5", "released"]
    assert main(["ledger", "show", "--key", str(keygen(tmp_path / "new.key"))]) == 0
    assert capsys.readouterr().out.endswith("no releases yet\n")


def test_names_that_an_older_program_took_are_printed_escaped(key: Path, capsys: Capture) -> None:
    ledger = Ledger.open(load_key(key))
    release(ledger, events_of("bob", 2), 0.5, source="\x1b]0;owned\x07\nhh\x9b2J\u202e" + "x" * 100_000)
    assert main(["ledger", "show", "--key", str(key)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b]0;owned\x07 hh\x9b2J\u202exxx" in shown
    assert shown.replace("\n", "").isprintable()
    assert len(shown) < 2000
    assert main(["ledger", "show", "--key", str(key), "--json"]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert json.loads(shown)["releases"][1]["source"].startswith("\x1b]0;owned\x07\nhh\x9b2J\u202e")


def test_verify_gives_one_line_per_problem_and_exit_code_1(key: Path, capsys: Capture) -> None:
    assert main(["ledger", "verify", "--key", str(key)]) == 0
    assert capsys.readouterr().out == "the ledger and its data are intact\n"
    path = key.with_name("label.key.state") / "ledger.json"
    path.write_text(path.read_text().replace('"ward"', '"yard"'))
    path.chmod(0o644)
    assert main(["ledger", "verify", "--key", str(key)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "its MAC is wrong" in first
    assert "can be reached by others" in second


def test_export(key: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["ledger", "export", "--key", str(key), "--output", str(tmp_path / "officer.json")]) == 0
    assert json.loads((tmp_path / "officer.json").read_text())["releases"][0]["source"] == "ward"
    assert (tmp_path / "officer.json").stat().st_mode & 0o777 == 0o600


def test_a_lost_ledger_begins_again_or_comes_back(key: Path, tmp_path: Path, capsys: Capture) -> None:
    state, backup = key.with_name("label.key.state"), tmp_path / "backup"
    shutil.copytree(state, backup)
    shutil.rmtree(state)
    assert main(["ledger", "show", "--key", str(key)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--i-know EPSILON" in line
    assert main(["ledger", "restore", "--key", str(key), "--from", str(backup), "--i-know", "0"]) == 0
    assert main(["ledger", "show", "--key", str(key)]) == 0
    assert "largest total of any one record: ε = 0.5 (4 events)" in capsys.readouterr().out
    shutil.rmtree(state)
    assert main(["ledger", "init", "--key", str(key), "--i-know", "0.5"]) == 0
    assert main(["ledger", "show", "--key", str(key)]) == 0
    assert "stated by the holder" in capsys.readouterr().out
    assert main(["ledger", "init", "--key", str(key), "--i-know", "0"]) == 2
    assert "holds a ledger" in capsys.readouterr().err
