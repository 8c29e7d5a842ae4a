"""SIGKILL before any durable step of some work, in a child forked from this process: who is killed, what is left.

A step is a call of `os` that changes a file system or forces it to the disk, a file opened for writing, or a statement
of SQLite. What Parquet's and SQLite's own code writes between two steps is one step here.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from private_rlhf.core.errors import RunStopped, UserError

CALLS = (
    *("fsync", "fdatasync", "replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir", "chmod", "fchmod"),
    *("pwrite", "write", "truncate", "ftruncate"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Ended(NamedTuple):
    """How a child ended: killed; or the steps that it took, and the one line of a refusal, if it was refused."""

    killed: bool
    steps: int
    refusal: str | None


class Steps:
    """Counts the durable steps of this process below a folder, and dies before the one of the given number."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.taken = str(folder), fatal, 0

    def step(self) -> None:
        """One more."""
        if self.taken == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += 1

    def watch(self) -> None:
        """From here to the end of the process."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        original = sqlite3.connect

        def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            base = original(*arguments, **options)
            base.set_trace_callback(lambda _: self.step())
            return base

        sqlite3.connect = connect  # type: ignore[assignment]
        sys.dont_write_bytecode = True
        sys.addaudithook(self._opened)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.step()
            return original(*arguments, **options)

        return call

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        below = event == "open" and str(arguments[0]).startswith(self.folder)
        if below and isinstance(arguments[2], int) and arguments[2] & WRITES:
            self.step()


def run_child(work: Callable[[], object], folder: Path, fatal: int | None = None, seed: str = "first") -> Ended:
    """Forks a child that does the work, and dies before its step number `fatal`.

    seed: of its secrets; children with different ones draw different coins.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        write, refusal = os.write, None
        steps = Steps(folder, fatal)
        code = 1
        try:
            steps.watch()
            _draw_from(random.Random(seed))
            try:
                work()
            except (UserError, RunStopped) as error:
                refusal = str(error)
            write(writing, json.dumps([steps.taken, refusal]).encode())
            code = 0
        except BaseException as error:
            write(2, f"{error!r}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        sent = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    if code:
        return Ended(True, 0, None)
    taken, refusal = json.loads(sent)
    return Ended(False, taken, refusal)


def _draw_from(coins: random.Random) -> None:
    """Secrets of this process come from these coins. Forked children would share the parent's."""
    secrets.token_bytes = lambda size=32: coins.randbytes(size)
    secrets.randbits = coins.getrandbits
    secrets.SystemRandom = lambda: coins  # type: ignore[assignment,misc,return-value]


def restore(saved: Path, folder: Path) -> None:
    """Puts a folder back as it was saved."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder, symlinks=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    """Every name below a folder, hidden ones too; a generation of the events' store may have any number."""
    return {re.sub(r"\b\d{6}\.", "N.", path.relative_to(folder).as_posix()) for path in folder.rglob("*")}


class Work(NamedTuple):
    """Something that may be killed. All three take the folder in which it takes place.

    act: does it; again, it goes on. look: raises AssertionError if what a kill left is wrong. result: what must be the
    same after a kill and another run as without a kill.
    """

    act: Callable[[Path], object]
    look: Callable[[Path], object]
    result: Callable[[Path], object]


class Tried(NamedTuple):
    """steps: that the work has without a kill. kills: how many steps were tried. faults: one line each."""

    steps: int
    kills: int
    faults: list[str]


def kill_everywhere(work: Work, folder: Path, stride: int = 1, start: int = 0) -> Tried:
    """Kills the work before the steps number start, start + stride, …, each time from the folder as it is now, runs it
    again, and compares with a run that was not killed."""
    saved = folder.with_name(f"{folder.name}.saved")
    shutil.copytree(folder, saved, symlinks=True)
    plain = run_child(lambda: work.act(folder), folder)
    wanted, left = work.result(folder), names(folder)
    faults, kills = [], 0
    for step in range(start, plain.steps, stride):
        restore(saved, folder)
        try:
            assert run_child(lambda: work.act(folder), folder, step).killed, "was not killed"
            kills += 1
            work.look(folder)
            again = run_child(lambda: work.act(folder), folder, seed="second")
            assert again.refusal == plain.refusal, f"said {again.refusal!r}"
            assert work.result(folder) == wanted, "other bytes"
            assert names(folder) == left, f"left {sorted(names(folder) ^ left)}"
        except AssertionError as error:
            faults.append(f"step {step}: {str(error).splitlines()[0] if str(error) else 'wrong'}")
    return Tried(plain.steps, kills, faults)
