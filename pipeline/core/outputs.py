"""The rule for every output that a user names: where a command may write.

An output never takes the place of what the user would miss: an existing file is replaced only if the same command
wrote it, or with `--force`; and never, by no option, a key, a database of draws or answers, an input of the command, a
file of a run or of a release, anything in a key's state folder or a labelling store, or a file that has other names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from private_rlhf.core.documents import MANIFESTS, DocumentError, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.user import user_folder

KEY_MARK = "private-rlhf key "
"""Begins every key file."""
RELEASE = "a folder from where things are released"
_DATABASE = b"SQLite format 3\0"
Test = Callable[[Path], bool]


def json_with(*names: str) -> Test:
    """A test of a file: it is a JSON object that has these keys."""

    def test(path: Path) -> bool:
        try:
            value = read_json(path)
        except (OSError, DocumentError):
            return False
        return isinstance(value, dict) and value.keys() >= set(names)

    return test


def begins_with(pattern: str) -> Test:
    """A test of a file: its first line begins as the regular expression says."""
    return lambda path: re.match(pattern, _head(path, 256).decode(errors="replace")) is not None


def all_lines_in(lines: Iterable[str]) -> Test:
    """A test of a file of text: each of its lines is among `lines`, so that these can replace it without a loss."""
    known = {line.rstrip("\n") for line in lines}

    def test(path: Path) -> bool:
        try:
            with path.open(encoding="utf-8") as file:
                return all(line.rstrip("\n") in known for line in file)
        except (OSError, UnicodeDecodeError):
            return False

    return test


def output_file(
    path: Path,
    option: str,
    *,
    rewrites: Test | None = None,
    inputs: Iterable[str | Path | None] = (),
    force: bool | None = None,
    secret: bool = False,
) -> Path:
    """`path`, `~` expanded, where a command may write a file there.

    option: for messages. rewrites: recognises what this command wrote before. inputs: what the command reads. force:
    other files are replaced too; None where the command has no such option. secret: the file must not lie in a run
    directory, from where things are released. UserError: it may not.
    """
    place = _place(path, option)
    if place.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file in it")
    _check_inputs(place, path, option, inputs)
    run = run_directory(place)
    if secret and run is not None:
        raise UserError(f"{option} {path}: lies in {run}, from where things are released: choose another place")
    if not place.exists():
        return place
    if not place.is_file():
        raise UserError(f"{option} {path} is a device or a pipe: choose another file")
    if kind := _kept(place):
        raise UserError(f"{option} {path} is {kind}, which no command overwrites: choose another file")
    if rewrites is not None and rewrites(place):
        return place
    if run is not None:
        raise UserError(f"{option} {path} is a file of the run in {run}, which is not overwritten: choose another file")
    _check_inputs(place, path, option, inputs, inside=True)
    if force:
        return place
    remedy = "choose another file" if force is None else "choose another file, or add --force"
    writer = "" if rewrites is None else " and was not written by this command"
    raise UserError(f"{option} {path} exists{writer}: {remedy}")


def output_folder(
    path: Path, option: str, *, rewrites: tuple[str, ...] | None = None, inputs: Iterable[str | Path | None] = ()
) -> Path:
    """`path`, `~` expanded, where a command may make a folder, or write into it.

    rewrites: files of which one lies in every folder that this command wrote before and may replace; None: the command
    looks itself at a folder that is there. UserError where it may not.
    """
    place = _place(path, option)
    if os.path.lexists(place) and not place.is_dir():
        raise UserError(f"{option} {path} is a file: choose another folder")
    _check_inputs(place, path, option, inputs)
    filled = rewrites is not None and place.is_dir() and any(place.iterdir())
    if filled and not any((place / name).is_file() for name in rewrites or ()):
        raise UserError(f"{option} {path} holds what this command did not write: choose another folder")
    return place


def _place(path: Path, option: str) -> Path:
    """The path, `~` expanded. UserError: it lacks a name, is a link, or lies in a folder for other files."""
    place = path.expanduser()
    if place.name in ("", ".."):
        raise UserError(f"{option} '{path}' must name a new folder or file: give a name for one inside it")
    try:
        if place.is_symlink():
            raise UserError(f"{option} {path} is a link, which is not followed: name what it leads to")
        home = place.parent.resolve()
        for folder in (place, home, *home.parents):
            if (kind := _guarded(folder)) and not (folder is place and kind == RELEASE):  # which `privatize` compares
                raise UserError(f"{option} {path}: lies in {kind}, {folder}: choose another place")
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{option} {path} must be a path ({error}): choose another place") from None
    except OSError:
        pass  # a path that cannot be looked at cannot be written either, and the writer says so
    return place


def _guarded(folder: Path) -> str | None:
    """The kind of a folder that is kept for other files; None for an ordinary folder."""
    if folder.name.endswith(".state") and any((folder / name).exists() for name in ("ledger.lock", "ledger.json")):
        return "a key's state folder"
    if folder == (user_folder() / "ledgers").resolve():
        return "the memory of this user's ledgers"
    if any((folder / name).is_file() for name in ("answers.db", "labeller.json")):
        return "a labelling store"
    if any((folder / name).is_file() for name in MANIFESTS) and any(folder.glob("part-*.parquet")):
        return RELEASE
    return None


def run_directory(place: Path) -> Path | None:
    """The run directory that the place lies in. A project's own recipe may be called recipe.yaml too."""
    folders = (each for each in place.resolve().parents if (each / "recipe.yaml").is_file())
    marks = "environment.json", "*/manifest.json"  # the first is written with the recipe, and somebody may remove it
    return next((each for each in folders if any(any(each.glob(mark)) for mark in marks)), None)


def _check_inputs(
    place: Path, path: Path, option: str, inputs: Iterable[str | Path | None], inside: bool = False
) -> None:
    """Check that the place is not an input and, with `inside`, that it does not lie in one."""
    for each in inputs:
        if each is None or not str(each):
            continue
        try:
            source = Path(each).expanduser()
            same = place.exists() and source.exists() and place.samefile(source)
            same |= inside and source.is_dir() and source.resolve() in place.resolve().parents
        except (OSError, ValueError, RuntimeError):  # the last: no such user's home
            continue
        if same:
            raise UserError(f"{option} {path} is an input of this command: choose another place")


def _kept(place: Path) -> str | None:
    """The kind of an existing file that no command replaces; None for any other file."""
    head = _head(place, 64)
    if head.startswith(KEY_MARK.encode()):
        return "a key"
    if head.startswith(_DATABASE):
        return "a store of draws or answers"
    if json_with("ledger", "mac")(place):
        return "a ledger"
    if place.stat().st_nlink > 1:
        return "a file with other names (hard links)"
    return None


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""
