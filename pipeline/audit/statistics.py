"""Attacks on statements about the data: counts, rates, digests, sizes and times. Leaks 5, 7 and 8.

One exact statistic of the true labels gives the last label to whoever knows the others. A number that equals the
statistic that its name states (`flips.count`, `agreement`, `raw_win_rate`) is a finding; under any other name it may be
chance. A plain digest of the raw file, or of a row with the preferred response first, is a finding wherever it stands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
from private_rlhf.audit.seeds import digests, recipes
from private_rlhf.audit.view import Answers, Table, View, plain_text
from private_rlhf.core.documents import DocumentError, parse_json, parse_yaml
from private_rlhf.core.noise import LabelNoise

# "kept 200 of 400 rows" is of a filter, and no statistic of labels.
KEPT = (
    r"\bkept(?![\W_]+(of|rows|\d+)\b)|kept.*label|label.*kept|label.*accuracy|accuracy.*label|unchanged|agree"
    r"|(true|raw).?label"
)
STATED = {  # names of numbers, by a word of the statistics that they state
    "flipped": re.compile(r"flip(?!.?prob)", re.IGNORECASE),
    "kept": re.compile(KEPT, re.IGNORECASE),
    "preferred": re.compile(r"true.?label|label_(sum|count|balance)|n_pos", re.IGNORECASE),
}
BARE = r"(?!.*[\s_]([kmg]i?b|m?s|sec\w*)$)"  # not of a size or a time
SHARES = re.compile(rf"(?i)(\b|_)raw{BARE}|non_?private|chosen_(first|is)|longer|length_base|label_mean|agree.*length")
RATE = re.compile(r"(?i)(?<![a-z])(rate|share|win(?!d))")  # these may be rounded
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt"})
PLAIN_KEYS = frozenset({"value", "count", "rate", "mean", "share", "total", "win_rate", "accuracy"})  # of their parent
RAW_TIME = re.compile(r"mtime|modified|(raw|source|input).*time", re.IGNORECASE)
HEX = re.compile(r"\b[0-9a-fA-F]{16,128}\b")
NUMBER = re.compile(r"(?<![\w.])((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?!\w|\.\d)(?=([ \w]{0,16}))")
LEAST_EVENTS = 100
MOST_PARTS = 4
LEAST_SIZE = 10_000


@dataclass(frozen=True)
class Finding:
    """Evidence that is not a matter of chance. attack, where (file and name in it), what: the match."""

    attack: str
    where: str
    what: str


def statistics(view: View, answers: Answers) -> list[Finding]:
    """Numbers that equal the statistic of true labels that their names state, but not that of the released labels."""
    findings = []
    alphas = {view.alpha, *(LabelNoise.of(table.epsilon).keep_prob for table in view.tables if table.epsilon)}
    rates = [rate for alpha in alphas for rate in (alpha, 1 - alpha)]  # what the mechanism states of itself
    # Where all rows have known true labels, the adversary of the last label has them.
    complete = [t for t in view.tables if len(t.event) == t.total and (answers.labels[t.event] != 0).all()]
    known = [(table, true_statistics(view, table, answers)) for table in unions(complete)]
    if not known:
        most, total = max(((np.count_nonzero(answers.labels[t.event]), t.total) for t in view.tables), default=(0, 0))
        rule = f"they need the labels of all rows, of {LEAST_EVENTS} or more; {most} of {total} are known"
        view.untried.append(f"exact statistics ({rule})")
    stated = (
        (path.name, name, value, unit)
        for path, text in view.documents()
        if path.name not in VOCABULARIES
        for name, value, unit in numbers(path.suffix.lower(), text)
    )
    for (file, name, value, unit), (table, (exact, released)) in product(stated, known):
        n = len(table.event)
        kinds = [kind for kind, pattern in STATED.items() if pattern.search(_says(name))]
        kinds += ["preferred"] * bool(value % 1 and SHARES.search(_says(name)))
        stating = {label: count for label, count in exact.items() if any(kind in label for kind in kinds)}
        rounded = unit if RATE.search(_says(name)) else 0.0
        hits = [label for label, count in stating.items() if equals(value, count, n, rounded)]
        expected = any(abs(value - per * rate) <= 0.501 * unit for rate, per in product(rates, (1, 100, n)))
        if hits and not (expected or any(equals(value, count, n, rounded) for count in released.values())):
            findings.append(Finding("statistics", f"{file}: {name}", f"{value:g} is the {hits[0]}"))
    return findings


def unions(tables: Sequence[Table]) -> list[Table]:
    """The tables, and the unions of those that share no event (train with evaluation, the whole raw file)."""
    every = list(tables)
    for size in range(2, min(len(tables), MOST_PARTS) + 1):
        for parts in combinations(tables[:MOST_PARTS], size):
            event = np.concatenate([part.event for part in parts])
            if len(np.unique(event)) == len(event):
                side, z = (np.concatenate([getattr(part, name) for part in parts]) for name in ("side", "z"))
                name, total = " with ".join(part.name for part in parts), sum(part.total for part in parts)
                every.append(replace(parts[0], name=name, total=total, event=event, side=side, z=z))
    return [table for table in every if len(table.event) >= LEAST_EVENTS]


def _says(name: str) -> str:
    """The part of a dotted name that says what the number is: the last key, with its parent where it is a plain one."""
    keys = name.split(".")
    return ".".join(keys[-2:]) if keys[-1] in PLAIN_KEYS else keys[-1]


def true_statistics(view: View, table: Table, answers: Answers) -> tuple[dict[str, float], dict[str, float]]:
    """(statistics of the true labels, the same statistics of the released ones): counts of the table's rows."""
    truth, n = answers.labels[table.event], len(table.event)
    _, one, two = view.lengths[table.event].T
    characters = np.sign(one - two)
    one, two = (np.array([len(plain_text(texts[event]).split()) for event in table.event])
                for texts in (view.first, view.second))  # fmt: skip
    words = np.sign(one - two)

    def counts(labels: np.ndarray) -> dict[str, float]:
        longer = float((labels * characters > 0).sum())
        left = float((labels == table.side).sum())
        return {
            "number of pairs whose longer response was preferred": longer,
            "number of preferred longer responses, ties counted half": longer + 0.5 * float((characters == 0).sum()),
            "number of pairs whose wordier response was preferred": float((labels * words > 0).sum()),
            "number of pairs whose left-hand response was preferred": left,
            "number of pairs whose right-hand response was preferred": n - left,
        }

    exact = counts(truth)
    flips = float((truth != table.z).sum())
    if (table.z != 0).all():
        exact |= {"number of flipped labels": flips, "number of kept labels": n - flips}
    return exact, counts(table.z)


def equals(value: float, count: float, n: int, unit: float) -> bool:
    """The number is the count, or the share count/n (or in percent), exactly or rounded to a unit that tells it from
    the shares of other counts. A share that is also one of a few (0.5, k/24) is not taken for one of n.
    """
    if value == int(value) and value > 1:
        return value == count
    few = (Fraction(count) / n).denominator < min(50, n // 4)
    return not few and any(
        abs(value / per - count / n) <= max(min(1e-6, 0.1 / n), 0.501 * unit / per * (unit / per < 1 / n))
        for per in (1, 100)
    )


def numbers(suffix: str, text: str) -> Iterator[tuple[str, float, float]]:
    """(name, number, unit of its last digit) in a document: keys of JSON and YAML, the words around it elsewhere."""
    parse: Callable[[str], Any] = {".yaml": parse_yaml, ".yml": parse_yaml}.get(
        suffix, partial(parse_json, finite=False)
    )
    if suffix in ("", ".json", ".yaml", ".yml"):
        with suppress(DocumentError):  # then its numbers are read line by line
            yield from _flat(parse(text), "")
            return
    if suffix == ".csv":
        text = re.sub(r'"([^"\n]*)"|,', lambda cell: cell[1] or "\t", text)
    for line in text.split("\n"):  # JSON may hold other line breaks
        if suffix == ".jsonl":
            with suppress(DocumentError):
                yield from _flat(parse(line), "")
                continue
        for match in NUMBER.finditer(line):
            words = f"{line[max(0, match.start() - 28) : match.start()]} {match[2]}".replace(".", " ")
            for digits in dict.fromkeys((match[1].replace(",", ""), *match[1].split(","))):  # 1,093 or 1 and 93
                yield " ".join(words.split()), float(digits), _unit(digits)


def _unit(digits: str) -> float:
    return 10.0 ** -len(digits.partition(".")[2])


def _flat(value: Any, name: str) -> Iterator[tuple[str, float, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        yield name, float(value), _unit(repr(value))


def digests_and_sizes(view: View) -> list[Finding]:
    """Plain digests, the size and the time of the raw file, in any document or file name of the roots."""
    kinds = {digest: name for facts in view.facts for name, digest in facts.digests.items()}
    sizes = {facts.size for facts in view.facts if facts.size is not None and facts.size >= LEAST_SIZE}
    times = {facts.time for facts in view.facts if facts.time is not None}
    texts = [(path, path.name) for path in view.files]
    findings = []
    for path, text in view.documents():
        texts.append((path, text))
        for name, value, _ in numbers(path.suffix.lower(), text):
            stated = ["size"] * (value in sizes) + ["time"] * bool(int(value) in times and RAW_TIME.search(name))
            where = f"{path.name}: {name}"
            findings += [Finding("files and sizes", where, f"the {fact} of the raw file") for fact in stated]
    for path, text in texts:
        for digits in {match.lower() for match in HEX.findall(text)}:
            kind = next((kind for digest, kind in kinds.items() if digest.startswith(digits)), None)
            findings += [Finding("digests", path.name, f"a plain {kind} digest of the raw file")] * (kind is not None)
    return findings


def row_digests(view: View, answers: Answers, most: int = 50) -> list[Finding]:
    """Plain digests of single rows, preferred response first, anywhere in the documents (such as lists of hashes)."""
    files = {match.lower(): path.name for path, text in view.documents() for match in HEX.findall(text)}
    judged = np.flatnonzero(answers.labels)[: most if files else 0].tolist()
    for event, (name, recipe) in product(judged, recipes().items()):
        one, two = (view.first[event], view.second[event])[:: answers.labels[event]]
        forward = set(digests(recipe(view.prompts[event], one, two)))
        backward = set(digests(recipe(view.prompts[event], two, one)))
        for digest in (forward - backward) & files.keys():
            return [Finding("digests", files[digest], f"a plain digest of a row ({name}), preferred first")]
    return []
