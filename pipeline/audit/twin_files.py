"""Comparison of two run directories, which may differ only in declared fields: time and memory of a run.

What may differ is declared by the file and by the path of the field in it, and each such field is one short number or
one moment. All else is a difference, and its first differing line is named: bytes, names, modes, owners, extended
attributes. Times of change are of one whole second per stage (`RunDir.stamp`), shortly before the file's status last
changed, which only the system can set. Values of declared fields are not compared: keep the table short, and
never declare what a label could reach.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from private_rlhf.recipe import ALIGNERS

NUMBER = re.compile(r"(0|[1-9]\d{0,6})(\.\d{1,3})?")
"""Seconds, MiB or tokens per second."""
MOMENT = re.compile(r"20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d\+00:00")
_RELEASES = 8
_COSTS = ("seconds", "peak_rss_mb", "peak_gpu_mb", "report.peak_rss_mb")
_PPO = ("tokens_per_second", "seconds.generate", "seconds.score", "seconds.update")
STAMPED_WITHIN = 60
"""Seconds between the time of change that a file was given and the moment at which it was given."""

Fields = Mapping[str, re.Pattern[str]]
Passages = Callable[[Path], Mapping[str, Sequence[str]]]

_NUMBER = re.compile(r"-?\d[-+\d.eE]*")


@dataclass(frozen=True)
class Comparison:
    """compared: files in both folders. differing: of those, by path, the declared fields in which they differ.
    leaks: one line for each other difference."""

    compared: int
    differing: dict[str, tuple[str, ...]]
    leaks: tuple[str, ...]

    @property
    def fields(self) -> list[str]:
        """The declared fields that differ anywhere, sorted."""
        return sorted({field for some in self.differing.values() for field in some})


def declared_fields(stages: Sequence[str]) -> Mapping[str, Fields]:
    """File -> path of the field in each of its JSON documents -> how the value must be written."""
    return {
        **dict.fromkeys((f"{name}/manifest.json" for name in stages), dict.fromkeys(_COSTS, NUMBER)),
        "privatize/manifest.json": dict.fromkeys(_COSTS, NUMBER)
        | {f"report.ledger.releases.{number}.time": MOMENT for number in range(_RELEASES)},
        "metrics.json": dict.fromkeys(("wall_seconds", "peak_rss_mb", *(f"seconds.{name}" for name in stages)), NUMBER),
        **dict.fromkeys((f"{name}/history.jsonl" for name in ALIGNERS), dict.fromkeys(_PPO, NUMBER)),
        "report/card.json": {f"releases.{number}.time": MOMENT for number in range(_RELEASES)},
    }


def compare_folders(one: Path, two: Path, stages: Sequence[str], passages: Passages = lambda root: {}) -> Comparison:
    """Compare all below two run directories; links are not followed, and are compared by where they lead.

    passages: of a run directory, by file, texts that follow from the declared fields of its other files.
    """
    declared = declared_fields(stages)
    files = [{path.relative_to(root).as_posix(): path for path in (root, *root.rglob("*"))} for root in (one, two)]
    leaks = [f"{name}: is only in one twin" for name in sorted(files[0].keys() ^ files[1].keys())]
    differing: dict[str, tuple[str, ...]] = {}
    compared = 0
    expected = [passages(root) for root in (one, two)]
    described_last = sorted(files[0].keys() & files[1].keys(), key=lambda name: (Path(name).name.startswith("_"), name))
    for name in described_last:  # data before the manifest and the signature that repeat their digests
        kinds = [_metadata(twin[name]) for twin in files]
        if kinds[0] != kinds[1]:
            leaks.append(f"{name}: mode, owner, links or extended attributes differ")
        contents = [_content(twin[name]) for twin in files]
        compared += contents[0] is not None
        if contents[0] == contents[1]:
            continue
        if None in contents:
            leaks.append(f"{name}: is a file in only one twin")
            continue
        texts = [_without(each or b"", some.get(name, ())) for each, some in zip(contents, expected, strict=True)]
        allowed = declared.get(name, {})
        if fields := ("time and memory",) if texts[0] == texts[1] else _differing_fields(name, allowed, *texts):
            differing[name] = fields
        else:
            leaks.append(f"{name}: {_first_difference(name, allowed, *texts)}")
    leaks += dict.fromkeys(line for twin in files for line in _odd_times(twin, stages))  # of both twins, once
    return Comparison(compared, differing, tuple(leaks))


def _metadata(path: Path) -> tuple[Any, ...]:
    """Mode with the kind of file, owner, group, links to a file, and extended attributes."""
    facts = path.lstat()
    attributes: list[tuple[str, bytes]] = []
    with suppress(OSError, AttributeError):  # a file system or a platform that has none
        names = sorted(os.listxattr(path, follow_symlinks=False))
        attributes = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
    links = None if stat.S_ISDIR(facts.st_mode) else facts.st_nlink
    return facts.st_mode, facts.st_uid, facts.st_gid, links, attributes


def _odd_times(files: Mapping[str, Path], stages: Sequence[str]) -> list[str]:
    """A line for each time of change that is not the one which its stage was stamped with."""
    lines: list[str] = []
    stamps: dict[str, int] = {}
    for name, path in sorted(files.items()):
        facts, top = path.lstat(), name.partition("/")[0]
        second, rest = divmod(facts.st_mtime_ns, 10**9)
        early = facts.st_ctime_ns // 10**9 - second
        stamp = stamps.setdefault(top if top in stages else "", second)
        if rest or not -1 <= early <= STAMPED_WITHIN or stamp != second:  # -1: a file system's clock lags by a tick
            lines.append(f"{name}: its time of change is not the one that its stage was given")
    return lines


def _content(path: Path) -> bytes | None:
    """The bytes of a file, or of the path that a link holds; None for a folder."""
    if path.is_symlink():
        return b"link to " + bytes(path.readlink())
    return path.read_bytes() if path.is_file() else None


def _without(content: bytes, passages: Sequence[str]) -> bytes:
    """A content without texts that stand in it once."""
    for passage in passages:
        if content.count(passage.encode()) == 1:
            content = content.replace(passage.encode(), b"")
    return content


def _differing_fields(name: str, fields: Fields, one: bytes, two: bytes) -> tuple[str, ...]:
    """The declared fields in which two contents that are not equal differ; () if they differ in anything that is not
    declared."""
    if not fields:
        return ()
    try:
        if _NUMBER.sub("0", one.decode()) != _NUMBER.sub("0", two.decode()):
            return ()  # white space and order are no field's
        names: set[str] = set()
        for (path, mine), (other, theirs) in zip(_leaves(name, one), _leaves(name, two), strict=True):
            if path != other or (mine != theirs and not _are_declared(mine, theirs, fields.get(path))):
                return ()
            if mine != theirs:
                names.add("seconds" if path.startswith("seconds.") else path.rpartition(".")[2])
        return tuple(sorted(names))
    except (ValueError, RecursionError):  # not what its name says: then only bytes count
        return ()


def _are_declared(one: Any, two: Any, form: re.Pattern[str] | None) -> bool:
    """True if both are written in the declared form: numbers as JSON numbers, moments as texts."""
    kind = _Number if form is NUMBER else str
    return form is not None and all(type(each) is kind and form.fullmatch(each) for each in (one, two))


class _Number(str):
    """A number as it is written."""


def _leaves(name: str, data: bytes) -> Iterator[tuple[str, Any]]:
    """(path, value) of every value in the JSON documents of a file, in their order: `releases.0.time`, a text."""
    texts = data.decode().split("\n") if name.endswith(".jsonl") else [data.decode()]
    how: dict[str, Any] = dict.fromkeys(("parse_float", "parse_int", "parse_constant"), _Number)
    for text in texts:
        yield from _inside(json.loads(text, object_pairs_hook=tuple, **how) if text.strip() else text, "")


def _inside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """objects are tuples of pairs, so that their order and their copies count."""
    if not isinstance(value, tuple | list):
        yield path, value
        return
    for name, inner in value if isinstance(value, tuple) else enumerate(value):
        yield from _inside(inner, f"{path}.{name}".lstrip("."))


def _first_difference(name: str, fields: Fields, one: bytes, two: bytes) -> str:
    """The first line in which two contents differ, shown as far as it is text."""
    try:
        lines = [data.decode().splitlines() for data in (one, two)]
    except UnicodeDecodeError:
        return f"differs ({len(one)} and {len(two)} bytes)"
    forms = {path.rpartition(".")[2]: form for path, form in fields.items()}
    for number, pair in enumerate(zip(*lines, strict=False), 1):
        one, two = (line.encode() for line in pair)
        declared = all(_is_field(line, forms) for line in pair) or _differing_fields(name, fields, one, two)
        if pair[0] != pair[1] and not declared:
            return f"line {number}: {_short(pair[0])} in one twin, {_short(pair[1])} in the other"
    return f"differs ({len(one)} and {len(two)} bytes)"


def _is_field(line: str, forms: Mapping[str, re.Pattern[str]]) -> bool:
    """True for a line of indented JSON that holds a declared field."""
    key, _, value = line.strip().rstrip(",").partition(": ")
    form = forms.get(key.strip('"'))
    return form is not None and form.fullmatch(value.strip('"')) is not None


def _short(line: str) -> str:
    text = line.strip()
    return text if len(text) <= 80 else f"{text[:77]}..."
