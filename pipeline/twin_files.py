"""Whether two folders hold the same, but for what is declared here: fields that say how long a run took and how much
memory it used.

A file that is neither equal byte for byte nor equal once these are taken out is a difference, and its first differing
line is named. What is declared is compared by nobody: keep it short, and never declare what a label could reach.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = frozenset(
    {
        "seconds",
        "wall_seconds",
        "generate_seconds",
        "score_seconds",
        "update_seconds",
        "tokens_per_second",
        "peak_rss_mb",
        "peak_gpu_mb",
        "time",
    }
)
"""Keys of JSON objects, at any depth, in every .json and .jsonl file."""
PASSAGES = {
    "report.html": re.compile(r"<figure>\s*<figcaption><b>Where the time went</b>.*?</figure>", re.DOTALL),
    "report.md": re.compile(r"^\d[^\n]* in all; [^\n]*peak memory[^\n]*$", re.MULTILINE),
}
"""By the name of a file, what it says about time and memory, in one place."""

_NUMBER = re.compile(r"-?\d[-+\d.eE]*")


@dataclass(frozen=True)
class Comparison:
    """compared: files in both folders. differing: of those, by path, the declared fields in which alone they differ.
    leaks: one line for each other difference."""

    compared: int
    differing: dict[str, tuple[str, ...]]
    leaks: tuple[str, ...]

    @property
    def fields(self) -> list[str]:
        """The declared fields that differ anywhere, sorted."""
        return sorted({field for some in self.differing.values() for field in some})


def compare_folders(one: Path, two: Path) -> Comparison:
    """Compares all files below two folders; links are not followed, and are compared by where they lead."""
    files = [{path.relative_to(root).as_posix(): path for path in root.rglob("*")} for root in (one, two)]
    leaks = [f"{name}: is there in one twin alone" for name in sorted(files[0].keys() ^ files[1].keys())]
    differing: dict[str, tuple[str, ...]] = {}
    compared = 0
    for name in sorted(files[0].keys() & files[1].keys()):
        contents = [_content(found[name]) for found in files]
        compared += contents[0] is not None
        if contents[0] == contents[1]:
            continue
        if None not in contents and (fields := _declared(Path(name), *map(bytes, contents))):  # type: ignore[arg-type]
            differing[name] = fields
        else:
            leaks.append(f"{name}: {_first_difference(Path(name), *(each or b'' for each in contents))}")
    return Comparison(compared, differing, tuple(leaks))


def _content(path: Path) -> bytes | None:
    """The bytes of a file, or of the path that a link holds; None for a folder."""
    if path.is_symlink():
        return b"link to " + bytes(path.readlink())
    return path.read_bytes() if path.is_file() else None


def _declared(path: Path, one: bytes, two: bytes) -> tuple[str, ...]:
    """The declared fields in which two contents that are not equal differ; none if they differ in anything else."""
    try:
        if path.suffix in (".json", ".jsonl"):
            if _NUMBER.sub("0", one.decode()) != _NUMBER.sub("0", two.decode()):
                return ()  # white space and order are no field's
            return _differing_fields(_values(path, one), _values(path, two))
        passage = PASSAGES.get(path.name)
        if passage is not None and passage.sub("", one.decode(), 1) == passage.sub("", two.decode(), 1):
            return ("time and memory",)
    except (ValueError, RecursionError):  # not what its name says: then only bytes count
        pass
    return ()


def _values(path: Path, data: bytes) -> list[Any]:
    """The JSON documents of a file, objects as lists of pairs so that their order and their copies count."""
    texts = data.decode().split("\n") if path.suffix == ".jsonl" else [data.decode()]
    return [json.loads(text, object_pairs_hook=_Pairs) if text.strip() else text for text in texts]


class _Pairs(list[tuple[str, Any]]):
    """A JSON object."""


def _differing_fields(one: Any, two: Any) -> tuple[str, ...]:
    found: set[str] = set()
    return tuple(sorted(found)) if _alike(one, two, found) else ()


def _alike(one: Any, two: Any, found: set[str]) -> bool:
    """Whether two values differ in declared fields alone, whose names go into `found`; numbers by how they are written
    out."""
    if isinstance(one, list) and type(one) is type(two) and len(one) == len(two):
        return all(_alike(*pair, found) for pair in zip(one, two, strict=True))
    if isinstance(one, tuple) and isinstance(two, tuple) and one[0] == two[0]:
        if one[0] in FIELDS:
            found.update({one[0]} if one[1] != two[1] else ())
            return True
        return _alike(one[1], two[1], found)
    return repr(one) == repr(two)


def _first_difference(path: Path, one: bytes, two: bytes) -> str:
    """Where two contents differ first, shown as far as it is text."""
    passage = PASSAGES.get(path.name)
    try:
        texts = [data.decode() for data in (one, two)]
    except UnicodeDecodeError:
        return f"differs ({len(one)} and {len(two)} bytes)"
    lines = [(passage.sub("", text, 1) if passage else text).splitlines() for text in texts]
    for number, pair in enumerate(zip(*lines, strict=False), 1):
        if pair[0] != pair[1] and not _declared(path.with_suffix(".json"), *(_as_object(line) for line in pair)):
            return f"line {number}: {_short(pair[0])} in one twin, {_short(pair[1])} in the other"
    return f"differs ({len(one)} and {len(two)} bytes)"


def _as_object(line: str) -> bytes:
    """A line of JSON, or of indented JSON, as a document."""
    text = line.strip().rstrip(",")
    return (f"{{{text}}}" if text.startswith('"') else text).encode()


def _short(line: str) -> str:
    text = line.strip()
    return text if len(text) <= 80 else f"{text[:77]}..."
