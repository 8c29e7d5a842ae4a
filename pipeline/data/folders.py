"""Folders of data files: which files are the split that is asked for.

The files of a split are `SPLIT.*`, its numbered shards as the hub names them, or whatever lies in a folder `SPLIT`; in
the folder itself or in its folder `data`. A folder of nothing but numbered parts (Spark, Dask, DuckDB) is one split,
`train`. Where a folder holds no data file itself, the one folder in it that has the split is taken (a configuration).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.data.release import is_release
from private_rlhf.recipe import SUFFIXES

EVAL_NAMES = ("eval", "validation", "valid", "dev", "test")
_SHARD = r"(?:-(?P<number>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]{16})?)?"
_PART = re.compile(r"(?:part|data)[-._]?\d+.*")


def split_names(split: str) -> tuple[str, ...]:
    """The names that a split may have."""
    return EVAL_NAMES if split == "eval" else (split,)


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split, in order of their names. UserError: none, not all of its shards, or a choice to make."""
    if files := _files_in(folder, split):
        return files
    there = _data_files(folder) + _data_files(folder / "data")
    if not there:
        inside = [one for one in sorted(folder.iterdir()) if one.is_dir() and not re.match(r"[._]|data$", one.name)]
        below = {path.name: files for path in inside if (files := _files_in(path, split))}
        if len(below) == 1:
            return next(iter(below.values()))
        if below:
            names = ", ".join(below)
            raise UserError(f"{folder}: has the split {split!r} in several folders ({names}); give one of them")
        there = [file for path in inside for file in _data_files(path)]
    raise no_split(folder, split, [path.relative_to(folder).as_posix() for path in there])


def is_undivided(folder: Path) -> bool:
    """True for a folder of nothing but numbered parts, which have no splits."""
    return folder.is_dir() and not is_release(folder) and bool(_parts(folder))


def no_split(where: Path | str, split: str, names: Sequence[str]) -> UserError:
    """The error of a split that is not there. names: of what is there."""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "nothing readable"
    wanted = " or ".join(f"{name}.*" for name in split_names(split))
    return UserError(
        f"{where}: has no split {split!r} (looked for {wanted}; found {shown}); name a file or another split (--split,"
        " or data.split in a recipe, which holds out a tenth of it)"
    )


def _files_in(folder: Path, split: str) -> list[Path]:
    if is_release(folder):
        return []
    for name in split_names(split):
        for home in (folder, folder / "data"):
            files = [path for path in _data_files(home) if re.fullmatch(_pattern(name, path), _stem(path))]
            if files:
                _check_shards(folder, name, files)
                return files
            if files := _data_files(home / name):
                return _of_one_kind(folder, name, files)
    return _of_one_kind(folder, split, _parts(folder)) if split == "train" else []


def _pattern(name: str, path: Path) -> str:
    """Of a file's stem; `datasets` writes its own name before that of the split in its cache."""
    before = r"(?:[\w-]+-)?" if path.suffix == ".arrow" else ""
    return before + re.escape(name) + _SHARD


def _check_shards(folder: Path, name: str, files: Sequence[Path]) -> None:
    """UserError for several files that are not the shards of one split, and for shards that are missing."""
    found = [re.fullmatch(_pattern(name, path), _stem(path)) for path in files]
    numbers = [(each["number"], each["count"]) for each in found if each]
    counts = {count for _, count in numbers}
    kinds = {path.name.lower().partition(".")[2] for path in files}
    if len(kinds) > 1 or len(dict(numbers)) < len(files) or len(counts) > 1:
        raise _several(folder, name)
    if (count := numbers[0][1]) and int(count) != len(files):
        there = f"{len(files)} of the {int(count)} shards"
        raise UserError(f"{folder}: has {there} of the split {name!r}; copy all of them")


def _of_one_kind(folder: Path, name: str, files: list[Path]) -> list[Path]:
    if len({path.suffix for path in files}) > 1:
        raise _several(folder, name)
    return files


def _several(folder: Path, name: str) -> UserError:
    return UserError(f"{folder}: has several files for the split {name!r}; give the file itself")


def _parts(folder: Path) -> list[Path]:
    files = _data_files(folder)
    return files if all(_PART.fullmatch(path.name) for path in files) else []


def _data_files(folder: Path) -> list[Path]:
    """Readable files in a folder, without hidden ones; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    return [path for path in paths if path.is_file() and path.name.lower().endswith(SUFFIXES)]


def _stem(path: Path) -> str:
    return path.name.lower().split(".", 1)[0]
