"""Attacks on statements about the data: counts, rates, digests, sizes and times. Leaks 5, 7 and 8.

One exact statistic of the true labels gives the last label to whoever knows the others. A number is *matched* if it
equals such a statistic. Under a name that says so (`flips.count`, `agreement`, `raw_win_rate`) a match is a finding;
under any other name it may be chance, and is judged by how likely that is. A plain digest of the raw file, or of a row
with the preferred response first, is a finding wherever it stands.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit.seeds import digests, recipes
from private_rlhf.audit.view import Answers, Table, View, plain_text
from private_rlhf.core.documents import DocumentError, parse_json, parse_yaml

NAMED = re.compile(
    r"flip(?!.?prob)|\bkept|unchanged|agree|\braw|_raw|true_?label|non_?private|accuracy|chosen_(first|is)|win_?rate"
    r"|longer|length_base|label_(mean|sum|count|balance)|n_pos",
    re.IGNORECASE,
)
NAMED_COUNT = re.compile(
    r"flip(?!.?prob)|\bkept|unchanged|agree|true.?label|label_(sum|count|balance)|n_pos", re.IGNORECASE
)
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt"})
PLAIN_KEYS = frozenset({"value", "count", "rate", "mean", "share", "total"})  # these say what their parent is
RAW_TIME = re.compile(r"mtime|modified|(raw|source|input).*time", re.IGNORECASE)
DOCUMENTS = ("", ".json", ".yaml", ".yml", ".jsonl", ".txt", ".log", ".md", ".csv", ".html", ".tsv")
LARGEST = 1 << 24
HEX = re.compile(r"\b[0-9a-fA-F]{16,128}\b")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")
LEAST_EVENTS = 100
MOST_PARTS = 4
LEAST_SIZE = 10_000


@dataclass(frozen=True)
class Finding:
    """Evidence that is not a matter of chance. attack, where (file and name in it), what: the match."""

    attack: str
    where: str
    what: str


@dataclass(frozen=True)
class Matches:
    """Comparisons of numbers with statistics: `matched` of `tried`, each by chance with probability <= `chance`."""

    tried: int
    matched: int
    chance: float
    where: tuple[str, ...]


def statistics(view: View, answers: Answers) -> tuple[list[Finding], Matches]:
    """Findings, and the matches under neutral names."""
    findings, tried, matched, chance, where = [], 0, 0, 0.0, []
    seen: set[tuple[float, str]] = set()  # a repeated number is not new evidence
    complete = [table for table in view.tables if _complete(table, answers)]
    known = [(table, true_statistics(view, table, answers)) for table in unions(complete)]
    for path in view.files:
        if path.name in VOCABULARIES or not _is_document(path, view):
            continue
        for name, value in numbers(path):
            for table, (exact, released) in known:
                n = len(table.event)
                hits = [label for label, count in exact.items() if equals(value, count, n)]
                innocent = any(equals(value, count, n) for count in released.values())
                named = bool((NAMED_COUNT if value > 1 else NAMED).search(_says(name)))
                if not named and _shaped(value, n) and (value, table.name) not in seen:
                    seen.add((value, table.name))
                    tried, chance = tried + len(exact), max(chance, _chance(n))
                    matched += bool(hits) and not innocent
                    where += [f"{path.name}: {name}"] * (bool(hits) and not innocent)
                elif named and hits and not innocent:
                    findings.append(Finding("statistics", f"{path.name}: {name}", f"{value:g} is the {hits[0]}"))
    return findings, Matches(tried, matched, chance, tuple(where))


def unions(tables: Sequence[Table]) -> list[Table]:
    """The tables, and the unions of those that share no event (train with evaluation, the whole raw file)."""
    found = list(tables)
    for size in range(2, min(len(tables), MOST_PARTS) + 1):
        for parts in combinations(tables[:MOST_PARTS], size):
            event = np.concatenate([part.event for part in parts])
            if len(np.unique(event)) == len(event):
                side, z = (np.concatenate([getattr(part, name) for part in parts]) for name in ("side", "z"))
                name, total = " with ".join(part.name for part in parts), sum(part.total for part in parts)
                found.append(replace(parts[0], name=name, total=total, event=event, side=side, z=z))
    return [table for table in found if len(table.event) >= LEAST_EVENTS]


def _is_document(path: Path, view: View) -> bool:
    """True for a readable text file that is not a table."""
    return path.suffix.lower() in DOCUMENTS and path.stat().st_size <= LARGEST and path not in view.table_files


def _says(name: str) -> str:
    """The part of a dotted name that says what the number is: the last key, with its parent where it is a plain one."""
    keys = name.split(".")
    return ".".join(keys[-2:]) if keys[-1] in PLAIN_KEYS else keys[-1]


def _complete(table: Table, answers: Answers) -> bool:
    """All rows of the table have known true labels: what the adversary of the last label has."""
    n = len(table.event)
    return n == table.total and bool((answers.labels[table.event] != 0).all())


def _shaped(value: float, n: int) -> bool:
    """A whole number up to n, or a share in (0, 1) that is a multiple of 1/(2n)."""
    if value == int(value):
        return 1 < value <= n
    return 0 < value < 1 and abs(value * 2 * n - round(value * 2 * n)) < 1e-6


def _chance(n: int) -> float:
    """The largest probability of a single count under Binomial(n, p) for shares p between 0.05 and 0.95."""
    return min(1.0, 1.0 / math.sqrt(2 * math.pi * n * 0.05 * 0.95))


def true_statistics(view: View, table: Table, answers: Answers) -> tuple[dict[str, float], dict[str, float]]:
    """(statistics of the true labels, the same statistics of the released ones): counts of the table's rows."""
    truth, n = answers.labels[table.event], len(table.event)
    lengths = [_lengths(view, event) for event in table.event]
    characters = np.array([np.sign(one[0] - one[1]) for one in lengths])
    words = np.array([np.sign(one[2] - one[3]) for one in lengths])

    def counts(labels: np.ndarray) -> dict[str, float]:
        longer = float((labels * characters > 0).sum())
        more_words = float((labels * words > 0).sum())
        left = float((labels == table.side).sum())
        return {
            "number of pairs whose longer response was preferred": longer,
            "the same, ties counted half": longer + 0.5 * float((characters == 0).sum()),
            "number of pairs whose wordier response was preferred": more_words,
            "number of pairs whose left-hand response was preferred": left,
            "number of pairs whose right-hand response was preferred": n - left,
        }

    exact = counts(truth)
    flips = float((truth != table.z).sum())
    if (table.z != 0).all():
        exact |= {"number of flipped labels": flips, "number of kept labels": n - flips}
    return exact, counts(table.z)


def _lengths(view: View, event: int) -> tuple[int, int, int, int]:
    one, two = plain_text(view.first[event]), plain_text(view.second[event])
    return len(one), len(two), len(one.split()), len(two.split())


def equals(value: float, count: float, n: int) -> bool:
    """The number is the count, or the share count/n (or in percent) to more digits than would hide one label.

    A share that is also one of a few (0.5, k/24) is not taken for one of n.
    """
    if value == int(value) and value > 1:
        return value == count
    for share in (value, value / 100):
        close = abs(share - count / n) <= min(1e-6, 0.1 / n)
        if close and Fraction(share).limit_denominator(n).denominator >= min(50, n // 4):
            return True
    return False


def numbers(path: Path) -> Iterator[tuple[str, float]]:
    """(name, number) pairs of a document: keys of JSON and YAML, the words before a number elsewhere."""
    text = path.read_text(encoding="utf-8", errors="replace")
    suffix = path.suffix.lower()
    try:
        if suffix in ("", ".json"):
            yield from _flat(parse_json(text, finite=False), "")
            return
        if suffix in (".yaml", ".yml"):
            yield from _flat(parse_yaml(text), "")
            return
    except DocumentError:
        pass  # its numbers are found line by line
    for line in text.splitlines():
        if suffix == ".jsonl":
            try:
                yield from _flat(parse_json(line, finite=False), "")
                continue
            except DocumentError:
                pass
        for match in NUMBER.finditer(line):
            before = line[max(0, match.start() - 28) : match.start()]
            yield from _flat(float(match.group()), " ".join(before.replace(".", " ").split()))


def _flat(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        yield name, float(value)


def digests_and_sizes(view: View) -> list[Finding]:
    """Plain digests, the size and the time of the raw file, in any document or file name of the roots."""
    wanted = {digest: name for facts in view.facts for name, digest in facts.digests.items()}
    sizes = {facts.size for facts in view.facts if facts.size is not None and facts.size >= LEAST_SIZE}
    times = {facts.time for facts in view.facts if facts.time is not None}
    findings = []
    for path in view.files:
        texts = [path.name]
        if _is_document(path, view):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            for name, value in numbers(path):
                if value in sizes:
                    findings.append(Finding("files and sizes", f"{path.name}: {name}", "the size of the raw file"))
                if int(value) in times and RAW_TIME.search(name):
                    findings.append(Finding("files and sizes", f"{path.name}: {name}", "the time of the raw file"))
        for found in {match.lower() for text in texts for match in HEX.findall(text)}:
            kinds = [kind for digest, kind in wanted.items() if digest.startswith(found)]
            findings += [Finding("digests", path.name, f"a plain {kind} digest of the raw file") for kind in kinds[:1]]
    return findings


def row_digests(view: View, answers: Answers, most: int = 50) -> list[Finding]:
    """Plain digests of single rows, preferred response first, anywhere in the documents (such as lists of hashes)."""
    found: dict[str, str] = {}
    for path in view.files:
        if _is_document(path, view):
            text = path.read_text(encoding="utf-8", errors="replace")
            found |= {match.lower(): path.name for match in HEX.findall(text)}
    if not found:
        return []
    findings, available = [], recipes()
    for event in np.flatnonzero(answers.labels)[:most].tolist():
        one, two = view.first[event], view.second[event]
        if answers.labels[event] < 0:
            one, two = two, one
        for name, recipe in available.items():
            forward = set(digests(recipe(view.prompts[event], one, two)))
            backward = set(digests(recipe(view.prompts[event], two, one)))
            hit = next((digest for digest in forward - backward if digest in found), None)
            if hit is not None:
                findings.append(Finding("digests", found[hit], f"a plain digest of a row ({name}), preferred first"))
                return findings
    return findings
