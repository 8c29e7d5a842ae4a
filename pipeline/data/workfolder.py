"""The owner-only folder that a release is made in, 0700: `.NAME.work` beside the output of the command; in the key's
state folder for the stage, whose run directory is for others to see.

It holds sorted runs with true labels, finished shards, and the plan that they belong to. A run that is killed leaves
it; the same command finds the same plan and goes on. Anything else there (another source, another ε, other code, a
machine that was restarted, since runs are not forced to the disk) is thrown away. It is removed when the release
stands, and after every error that running again would not fix.

Several tasks may fill it together (`parts`): each holds a shared lock, forces its files to the disk, and keeps to the
plan that the first one noted. Only the last step removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from private_rlhf.core.atomic import FULL, write_json
from private_rlhf.core.code import all_files, digest_of
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.data.publish import occupied
from private_rlhf.data.sources import Part
from private_rlhf.privacy.keys import Lock, PrivacyKey
from private_rlhf.privacy.prf import frame

PLAN = "plan.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def code_version() -> str:
    """Changes with the program that makes runs and shards, and with the libraries that write them."""
    return f"{digest_of(all_files())} pyarrow {pa.__version__} numpy {np.__version__}"


def source_identity(parts: Sequence[Part], key: PrivacyKey) -> str:
    """Keyed digest of names, sizes and times of the source's files; of nothing twice for a source without files."""
    facts = []
    for part in parts:
        for path in part.files:
            info = path.stat()
            facts.append(f"{path.resolve()} {info.st_size} {info.st_mtime_ns} {info.st_ino}")
        if not part.files:
            facts.append(uuid.uuid4().hex)
    return key.keyed_digest(frame(fact.encode()) for fact in facts)


def boot_id() -> str:
    """Of the running system; where it has none, nothing is ever resumed."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex


class PartMissing(UserError):
    """A refusal of the last step that running other tasks fixes: what they left stays."""


@contextmanager
def work_folder(folder: Path, plan: dict[str, Any], target: Path) -> Iterator[Path]:
    """The folder for a release to `target`, locked, with what an interrupted run of the same plan left in it.

    UserError if another run is at work there.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    with _locked(folder, target):
        if (_noted(folder) or plan)["boot"] is None:
            raise UserError(f"{target}: is being made in parts; end it with --step finish, or remove {folder}")
        with _removal(folder, missing):
            _adopt(folder, plan)
            yield folder


@contextmanager
def shared_folder(folder: Path, plan: dict[str, Any], target: Path, last: bool) -> Iterator[Path]:
    """The folder for one of the tasks that make a release to `target` together, or for their last step.

    UserError, and all stays as it is: parts of another plan, a target that is taken, a last step while a task runs.
    """
    with _locked(folder, target, shared=not last):
        taken = occupied(target)
        noted = _noted(folder) if last or taken else _note(folder, plan)
        if noted is None:
            _remove(folder)
        if noted is None or (taken and not last):
            why = "holds something already, and takes no" if taken else "run the map steps first: it has no"
            raise UserError(f"{target}: {why} parts")
        if others := [name for name in plan if plan[name] != noted.get(name)]:
            what = " and ".join(others)
            raise UserError(f"{folder}: holds parts whose {what} differ: give what they were made with, or remove it")
        with _removal(folder, []) if last else nullcontext():
            yield folder


@contextmanager
def _locked(folder: Path, target: Path, shared: bool = False) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _claim(folder)
    lock = Lock(folder / "lock")
    if not lock.acquire(0.0, shared):
        raise UserError(f"{target}: another run is writing it; wait for it, or choose another output folder")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _removal(folder: Path, missing: Sequence[Path]) -> Iterator[None]:
    """Remove the folder at the end, and with it the parents that were missing, unless running again goes on there."""
    try:
        yield
    except BaseException as error:
        refusal = isinstance(error, UserError) and not isinstance(error, PartMissing)
        if refusal or (isinstance(error, OSError) and error.errno not in FULL):  # the place cannot be written
            _remove(folder)
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()
        raise
    _remove(folder)


def _claim(folder: Path) -> None:
    """The folder is this user's own, 0700: whatever lies there is neither followed, emptied nor written to else. Nor
    can any other user put a folder of their own in its place meanwhile."""
    around = folder.parent.stat().st_mode
    if around & stat.S_IWOTH and not around & stat.S_ISVTX:
        raise UserError(
            f"{folder.parent}: every user can exchange what lies there, and true labels would on their way; run"
            f" `chmod o-w {folder.parent}`, or choose another output folder"
        )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise UserError(
            f"{folder}: is a link, a file or another user's, where this program keeps what is not finished; look"
            " what it is and move it away"
        )
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """RunStopped if it is still there then: it holds true labels."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        raise RunStopped(f"{folder}: holds true labels and could not be removed; remove it")


def _noted(folder: Path) -> dict[str, Any] | None:
    """The plan that what lies in the folder belongs to; None where there is none, or no whole one."""
    with suppress(OSError, ValueError, TypeError):
        return {"boot": "", **json.loads((folder / PLAN).read_text(encoding="utf-8"))}
    return None


def _note(folder: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that the first of several tasks noted, which is this one if there was none."""
    draft = folder / f"{uuid.uuid4().hex}.plan"
    write_json(draft, plan, mode=0o600)
    with suppress(FileExistsError):
        os.link(draft, folder / PLAN)
    draft.unlink()
    return _noted(folder)


def _adopt(folder: Path, plan: dict[str, Any]) -> None:
    """Keep what belongs to the plan, else empty the folder and note the plan."""
    if _noted(folder) == plan:
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
    write_json(folder / PLAN, plan, mode=0o600)
