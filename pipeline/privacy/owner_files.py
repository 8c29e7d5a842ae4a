"""Owner-only files in the key's state folder: written whole and forced to the disk; and the lock on that folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from private_rlhf.core.atomic import new_file
from private_rlhf.core.errors import UserError

POLL_SECONDS = 0.02


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """A 0600 file under its final name, durable when the block ends well and removed when it fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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


class Lock:
    """An exclusive lock between processes on a small file, which also keeps a number.

    flock belongs to the open file, which forked workers inherit and could hold on to after the death of the process
    that locked it; so they close it at birth. The system releases the lock of a process that dies.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor: int | None = None

    def acquire(self, seconds: float) -> bool:
        """True if the lock was free within `seconds`. OSError if its file cannot be opened for writing, or
        is missing and not to be created."""
        descriptor = os.open(self.path, self._flags, 0o600)
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(POLL_SECONDS)
            except BaseException:
                os.close(descriptor)
                raise
            else:
                break
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))
        return True

    def release(self) -> None:
        """Lets go; in a forked child it closes the child's copy and the parent keeps the lock. Harmless if not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """True while this object holds the lock."""
        return self._descriptor is not None

    def write_number(self, number: int) -> None:
        """Keep a number >= 0 in the file. The lock must be held."""
        assert self._descriptor is not None
        os.pwrite(self._descriptor, b"%020d\n" % number, 0)


def _release(lock: weakref.ref[Lock]) -> None:
    held = lock()
    if held is not None:
        held.release()


def read_number(path: Path) -> int:
    """The number in a lock file. FileNotFoundError if there is none, UserError if it holds something else."""
    with path.open("rb") as file:
        digits = file.read(21).strip()
    if digits and not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{path}: is damaged; restore the key's state folder from a backup")
    return int(digits or 0)
