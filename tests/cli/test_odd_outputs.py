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


def test_odd_outputs_cost_nothing(release: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("real", "mount", "dir"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "own.key.state").mkdir(exist_ok=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mount")
    new = "must name a new folder or file"
    said = {
        "link": "is a link", "dangling": "is a link", "link/": "is a link", "mount": "mount point",
        "own.key.state": "state folder", "own.key.state/x": "state folder", "dir/../own.key.state/y": "state folder",
        ".": new, "/": new, "": new, "..": new, "dir/..": new,
        "x" * 300: "over 200 bytes", "é" * 101: "over 200 bytes",
        "a/" * 2100: "cannot write the release", "own.key": "is a file", "own.key/x": "cannot write the release",
    }  # fmt: skip
    before = sorted(path for path in tmp_path.rglob("*") if "ledger" not in path.name)
    for output, words in said.items():
        assert words in release(output, 2), output
    assert spent() == []
    assert sorted(path for path in tmp_path.rglob("*") if "ledger" not in path.name) == before
    assert release("dir", 0) == ""  # an empty folder of one's own is fine
    assert spent() == ["rows.jsonl released"]


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


def test_a_folder_where_every_user_can_exchange_the_work_folder(release: Callable[..., str], tmp_path: Path) -> None:
    """True labels would be written into whatever was put in its place; the sticky bit keeps it there."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "every user can exchange what lies there" in release("open/out", 2)
    assert list((tmp_path / "open").iterdir()) == []
    assert spent() == []
    (tmp_path / "open").chmod(0o1777)
    release("open/out", 0)


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


@pytest.mark.parametrize("workers", ["0", "-1", "65", "100000", "1e9", "two"])
def test_workers_are_bounded(release: Callable[..., str], workers: str) -> None:
    assert "--workers" in release("release", 2, f"--workers={workers}")


def test_a_lock_with_anything_else_in_it(release: Callable[..., str], tmp_path: Path) -> None:
    release("release", 0)
    lock = tmp_path / "own.key.state" / "ledger.lock"
    lock.write_text("garbage")
    assert "ledger.lock: is damaged" in release("again", 2)


def test_messages_are_one_printable_line() -> None:
    assert one_line("a\nb\t c\x1b[31m\u202e\ud800é") == "a b c\\x1b[31m\\u202e\\ud800é"
    assert len(one_line("x" * 10_000)) <= 1000
