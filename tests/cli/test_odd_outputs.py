"""Outputs that no release can take the place of are found out before the ledger is charged; work folders that are links
or another user's are neither followed nor emptied."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.core.errors import one_line
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.ledger import Ledger

ROWS = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(8)]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `privatize` on good data to an output; what it said on stderr."""
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "--output", "own.key"]) == 0
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(output: str, code: int, *more: str) -> str:
        capsys.readouterr()
        options = ["--data=rows.jsonl", "--epsilon=1", "--key=own.key", "--budget=1", f"--output={output}", *more]
        assert main(["privatize", *options]) == code
        err = capsys.readouterr().err
        assert err.count("\n") == bool(code)
        return err

    return run


def spent() -> list[str]:
    """Sources and states in the ledger."""
    return [f"{entry['source']} {entry['status']}" for entry in Ledger.open(load_key("own.key")).show()["releases"]]


def test_a_place_that_refuses_the_rename_is_found_out_first(
    release: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a busy mount point does, whatever it says of itself."""
    replace = os.replace

    def busy(source: Path, target: Path) -> None:
        if Path(target).name == "release":
            raise OSError(16, "Device or resource busy", str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", busy)
        assert "busy" in release("release", 2)
    assert spent() == []
    assert not Path("release").exists()


def test_a_linked_work_folder_is_not_followed(release: Callable[..., str], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    (victim / "thesis.txt").write_text("years of work")
    (tmp_path / ".release.work").symlink_to(victim)
    assert ".release.work: is a link" in release("release", 2)
    assert (victim / "thesis.txt").read_text() == "years of work"
    assert (victim.stat().st_mode & 0o777, len(list(victim.iterdir()))) == (0o755, 1)
    assert spent() == []
    (tmp_path / ".release.work").unlink()
    (tmp_path / ".release.work").mkdir()
    (tmp_path / ".release.work" / "inner").symlink_to(victim)
    release("release", 0)
    assert (victim / "thesis.txt").exists()


def test_another_user_s_work_folder_is_left_alone(
    release: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".release.work").mkdir()
    (tmp_path / ".release.work" / "letter").write_text("mine")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "another user's" in release("release", 2)
    assert (tmp_path / ".release.work" / "letter").exists()


def test_labels_that_stay_behind_are_said(release: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *given, **named: None)
    assert "holds true labels and could not be removed" in release("release", 1)


def test_messages_are_one_printable_line() -> None:
    assert one_line("a\nb\t c\x1b[31m\u202e\ud800é") == "a b c\\x1b[31m\\u202e\\ud800é"
    assert len(one_line("x" * 10_000)) <= 1000
