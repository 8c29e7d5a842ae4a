"""Rows of a bench, which belong to the bed that they were measured on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from private_rlhf.core.atomic import Row, read_rows
from private_rlhf.core.errors import UserError


def rows_of(path: Path, bed: Callable[[Row], str]) -> list[Row]:
    """The rows of a file whose `bed` is what they were measured on. UserError where one is of another bed than the
    present one, which `bed` names for a row."""
    rows = read_rows(path)
    if any(row.get("bed") != bed(row) for row in rows):
        raise UserError(f"{path} holds rows measured on other data or settings: choose another folder, or move it away")
    return rows
