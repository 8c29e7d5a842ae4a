"""Whole or nothing: a failure at any point leaves the old content and no debris."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from private_rlhf.core import atomic


class Killed(BaseException):
    """Stands for anything that ends a block, KeyboardInterrupt included."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_written_with_its_mode_and_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "secret"
    atomic.write_text(path, "é\n", mode=0o600)
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["secret"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_text(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")

    def fail(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(Killed):
        atomic.write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_json_refuses_nan_before_it_touches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    atomic.write_json(path, {"ε": 1})
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError):
            atomic.write_json(path, {"x": bad})
    assert json.loads(path.read_text()) == {"ε": 1}
    assert "ε" in path.read_text()
    assert names(tmp_path) == ["value.json"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with atomic.new_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert names(target.parent) == ["target"]


def test_a_replaced_folder_keeps_nothing_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with atomic.new_folder(target) as temporary:
        (temporary / "old").write_text("old")
    with atomic.new_folder(target) as temporary:
        (temporary / "new").write_text("new")
        assert (target / "old").read_text() == "old"  # until the block ends
    assert names(target) == ["new"]
    assert names(tmp_path) == ["target"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"), atomic.new_folder(tmp_path / "target") as temporary:
        (temporary / "mine").write_text("whole")
    assert names(tmp_path) == []


@pytest.mark.parametrize("first", [True, False])
def test_a_failed_block_leaves_what_was_there(first: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if not first:
        with atomic.new_folder(target) as temporary:
            (temporary / "old").write_text("old")

    def fail() -> None:
        with atomic.new_folder(target) as temporary:
            (temporary / "new").write_text("half")
            raise Killed

    with pytest.raises(Killed):
        fail()
    assert names(tmp_path) == ([] if first else ["target"])
    assert first or names(target) == ["old"]


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    replace = os.replace

    def fail_on_new(source: Path, destination: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise Killed
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_on_new)
    with pytest.raises(Killed), atomic.new_folder(target) as temporary:
        (temporary / "new").write_text("new")
    assert names(tmp_path) == ["target"]
    assert names(target) == ["old"]


def test_a_killed_process_leaves_the_old_content_and_swept_debris(tmp_path: Path) -> None:
    """SIGKILL runs no handler: the old folder must stand, and the debris must go at the next start."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    script = (
        "import os, signal, sys; from pathlib import Path; from private_rlhf.core import atomic\n"
        "with atomic.new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'new').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(atomic.__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(target)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(target) == ["old"]
    assert len(names(tmp_path)) == 2
    (tmp_path / ".hidden").write_text("the user's own")
    (tmp_path / "visible.tmp").write_text("the user's own")
    atomic.sweep_temporaries(tmp_path)
    assert names(tmp_path) == [".hidden", "target", "visible.tmp"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / ".target.0123abcd.old", tmp_path / ".target.4567cdef.tmp"
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.suffix)
    atomic.sweep_temporaries(tmp_path)
    assert names(tmp_path) == ["target"]
    assert (tmp_path / "target" / "file").read_text() == ".old"


def test_sweeping_an_absent_folder_does_nothing(tmp_path: Path) -> None:
    atomic.sweep_temporaries(tmp_path / "none")
    assert names(tmp_path) == []


def test_a_file_written_beside_its_folder_leaves_nothing_else_in_it(tmp_path: Path) -> None:
    """Shards of a bundle: whatever a kill leaves must not be taken for one. The mode holds while it is written, too."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with pytest.raises(Killed), atomic.new_file(bundle / "shard", beside=bundle):
        raise Killed
    assert names(tmp_path) == ["bundle"]
    with atomic.new_file(bundle / "shard", 0o600, beside=bundle) as temporary:
        assert names(bundle) == []
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("whole")
    assert names(bundle) == ["shard"]
    assert stat.S_IMODE((bundle / "shard").stat().st_mode) == 0o600


def test_whole_rows_survive_every_cut(tmp_path: Path) -> None:
    """At every byte at which a kill may fall, also within a letter; the row after it starts a line of its own."""
    path, rows = tmp_path / "rows.jsonl", [{"n": 1}, {"text": "ε"}, {"n": 3}]
    with atomic.appending(path) as append:
        for row in rows:
            append(row)
    content = path.read_bytes()
    assert atomic.read_rows(path) == rows
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        before = atomic.read_rows(path)
        assert before == rows[: len(before)]
        with atomic.appending(path) as append:
            append({"n": 4})
        assert atomic.read_rows(path) == [*before, {"n": 4}]
    assert atomic.read_rows(tmp_path / "none") == []


def test_an_appender_that_adds_nothing_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n')
    with atomic.appending(path):
        pass
    assert path.read_text() == '{"n": 1}\n'


def test_half_a_surrogate_pair_is_appended_as_an_escape(tmp_path: Path) -> None:
    """A tokenizer may give one: the file stays UTF-8, other characters stay readable, and the row comes back."""
    path, row = tmp_path / "rows.jsonl", {"text": "ε \ud83d"}
    with atomic.appending(path) as append:
        append(row)
    assert "ε" in path.read_text(encoding="utf-8")
    assert atomic.read_rows(path) == [row]
