"""Rows that are measured over hours: one JSON object a line, appended as they come, read again after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError

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


def rows_of(path: Path, bed: Callable[[Row], str]) -> list[Row]:
    """The rows of a file whose `bed` is what they were measured on. UserError where one is of another bed than the
    present one, which `bed` names for a row."""
    rows = read_rows(path)
    if any(row.get("bed") != bed(row) for row in rows):
        raise UserError(f"{path} holds rows measured on other data or settings: choose another folder, or move it away")
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
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

        yield append
