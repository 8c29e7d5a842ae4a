"""Writing whole files and folders or nothing: a temporary name in the same place, fsync, rename."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import printable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full, for everybody or for one user: running again goes on, once there is room."""


@contextmanager
def new_file(path: Path, mode: int = 0o644, *, beside: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """An empty temporary file that takes the name `path` when the block ends well, and vanishes when it fails.

    mode: less the umask; of the temporary file too.
    beside: the temporary file lies next to this path, where `path` is in a folder that must hold nothing else.
    durable: its content is on the disk before it takes the name.
    """
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (beside or path).with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    except OSError as error:  # FileNotFoundError in a file system that takes no new files, such as /proc
        kind = errno.EROFS if error.errno == errno.ENOENT else error.errno
        raise OSError(kind, os.strerror(kind or 0), str(path)) from None
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` (UTF-8) to `path` atomically; half a surrogate pair becomes its escape, which JSON reads back."""
    with new_file(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_page(path: Path, text: str) -> None:
    """Write a page for people, atomically: what a terminal or a browser would obey stands as an escape."""
    write_text(path, printable(text))


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Writes `value` as indented JSON to `path` atomically; NaN and infinity are refused."""
    write_text(path, json_text(value), mode)


def json_text(value: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(value, indent=2, sort_keys=False, allow_nan=False, ensure_ascii=False) + "\n"


def spell_nonfinite(value: Any) -> Any:
    """`value` with each number that JSON has not as a word: "nan", "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {key: spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_nonfinite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `target` when the block ends well, and vanishes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        if target.exists():  # the old folder goes only once the new one stands
            old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
            os.replace(target, old)
            try:
                os.replace(temporary, target)
            except BaseException:
                os.replace(old, target)
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Forces every file below `folder` to the disk, so that a rename never uncovers an empty file."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk: a rename or a new file in the folder then lasts."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path, name: str | None = None) -> None:
    """Removes what an interrupted `new_file` or `new_folder` left directly below `folder`.

    name: of the one file or folder whose writer the caller is, where others may be written there at this time.

    An old folder whose successor never took its place (a kill between the two renames) gets its name back.
    """
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name.startswith("." if name is None else f".{name}.") and path.suffix in {".tmp", ".old"}:
            target = folder / path.name[1:].rsplit(".", 2)[0]
            if path.suffix == ".old" and not target.exists():
                os.replace(path, target)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where it is not there; a line that a kill cut short is left out, wherever it stands."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Row], None]]:
    """A function that appends one row and has it on the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")  # after a line that a kill cut short

        def append(row: Row) -> None:
            line = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(line.encode(errors="backslashreplace"))  # half a surrogate pair is an escape of JSON again
            file.flush()
            os.fsync(file.fileno())

        yield append
