"""Bundles on their way to their place: where one may lie, and the rename that publishes it."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from private_rlhf.core.atomic import FULL, sync, sync_folder, write_text
from private_rlhf.core.documents import DocumentError, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.container import settle
from private_rlhf.data.release import MANIFEST, OLD_NAMES, SIGNATURE, ReleaseManifest, file_of

LONGEST_NAME = 200
"""Bytes of a folder's name: file systems take 255, and what is not finished has a longer one."""


@contextmanager
def refusals(target: Path) -> Iterator[None]:
    """UserError for a target that no folder can be given the name of, and in place of an OSError (a full disk apart:
    that one can be fixed)."""
    try:
        check_output(target)
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        elsewhere = error.filename and target.parent.resolve() not in Path(error.filename).resolve().parents
        place = f"{error.strerror}: {error.filename}" if elsewhere else error.strerror
        raise UserError(f"{target}: cannot write the release ({place}): fix that and run again") from None


def check_output(target: Path) -> None:
    """UserError for an output that is a file, a link, a mount point, has no name of its own, or one that is no text."""
    if not str(target).isprintable() and any("\ud800" <= each <= "\udfff" for each in str(target)):
        raise UserError(f"{target}: is no UTF-8 text; choose another name")
    if target.name in ("", ".."):
        raise UserError(f"{target}: names no new folder; give a name for one inside it")
    if len(os.fsencode(target.name)) > LONGEST_NAME:
        raise UserError(f"{target}: is a name of over {LONGEST_NAME} bytes; choose a shorter one")
    if target.is_symlink():
        raise UserError(f"{target}: is a link, which is not followed; give the folder itself")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; choose another output folder")
    if os.path.ismount(target):
        raise UserError(f"{target}: is a mount point, which no folder can replace; choose a folder inside it")


def occupied(target: Path) -> bool:
    """True if the target is a folder with anything in it."""
    return target.is_dir() and any(target.iterdir())


def counted_as(manifest: ReleaseManifest, target: Path) -> ReleaseManifest:
    """The manifest, without a count of unjudged rows that the release in `target`, of an earlier version, lacks."""
    with suppress(OSError, DocumentError, LookupError, TypeError):
        if "unjudged" not in read_json(file_of(target, MANIFEST))["dropped"]:
            return replace(manifest, dropped={each: n for each, n in manifest.dropped.items() if each != "unjudged"})
    return manifest


def same_release(partial: Path, target: Path) -> None:
    """UserError unless the target holds the same files already.

    A release with the older file names gets the present ones and, where it has none, its signature.
    """
    ours = {path.name: path for path in partial.iterdir()}
    theirs = {OLD_NAMES.get(path.name, path.name): path for path in sorted(target.iterdir())}
    renamed = any(path.name != name for name, path in theirs.items())
    stale = renamed or (SIGNATURE in ours and SIGNATURE not in theirs)
    same = ours.keys() - {SIGNATURE} if stale else ours.keys()
    there = theirs.keys() - {SIGNATURE} if stale else theirs.keys()
    equal = (theirs[n].is_file() and filecmp.cmp(ours[n], theirs[n], shallow=False) for n in same)
    if same != there or len(theirs) < len(list(target.iterdir())) or not all(equal):
        raise UserError(f"{target}: holds something else and is not overwritten; choose another output folder")
    if stale:
        os.replace(theirs[MANIFEST], target / MANIFEST)
        if SIGNATURE in theirs:
            theirs[SIGNATURE].unlink()
        if SIGNATURE in ours:
            write_text(target / SIGNATURE, ours[SIGNATURE].read_text())
        settle(target)


def check_publish(work: Path, target: Path) -> None:
    """Does with an empty folder what `publish` will do with the release, and undoes it; OSError where that fails.

    work: lies beside the target. An empty folder at the target is replaced by another one.
    """
    there, probe = target.is_dir(), work / "probe"
    probe.mkdir(exist_ok=True)
    if there:
        shutil.copymode(target, probe)
    os.replace(probe, target)
    if not there:
        target.rmdir()


def publish(partial: Path, target: Path) -> None:
    """Give a finished release its modes, times and name, durably; what is in its files must be on the disk."""
    settle(partial)
    sync_folder(partial)
    os.replace(partial, target)
    sync(target.parent)
