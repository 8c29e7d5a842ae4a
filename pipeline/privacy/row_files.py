"""Owner-only files of fixed-width rows in a key's state folder, with bounds and a digest that the ledger states."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.core.atomic import new_file
from private_rlhf.core.errors import UserError


def replace_file(path: Path, rows: np.ndarray) -> None:
    """Writes a contiguous array's bytes to `path` (0600) by rename; not forced to the disk."""
    with new_file(path, 0o600, durable=False) as temporary, temporary.open("wb") as file:
        file.write(rows.data)


def read_rows(path: Path, dtype: np.dtype[Any], start: int = 0, end: int | None = None) -> np.ndarray:
    """Rows start to end (default: all) of a file of fixed-width rows. UserError if it is missing or too short."""
    count = -1 if end is None else end - start
    try:
        rows = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing; restore the key's state folder from a backup") from error
    if end is not None and len(rows) != count:
        raise UserError(f"{path}: is cut short; restore the key's state folder from a backup")
    return rows


def check_rows(path: Path, dtype: np.dtype[Any], bounds: Sequence[int], digest: str) -> list[str]:
    """Problems of a file of rows that should have these bounds and this digest; reads it slice by slice."""
    actual, size = row_digest(), bounds[-1] * dtype.itemsize
    try:
        if path.stat().st_size != size:
            return [f"{path}: holds {path.stat().st_size} bytes where the ledger states {size}"]
        for start, end in pairwise(bounds):
            actual.update(read_rows(path, dtype, start, end).data)
    except OSError as error:
        return [f"{path}: cannot be read ({error.strerror})"]
    return [] if actual.hexdigest() == digest else [f"{path}: was changed or damaged: the ledger states another digest"]


def row_digest() -> Any:
    """A hash object for files of rows. Not keyed: the ledger that states the digest is, and so are the tags inside."""
    return hashlib.blake2b(digest_size=32)
