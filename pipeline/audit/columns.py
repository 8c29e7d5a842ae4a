"""Attacks on everything else in a table: other columns, the order of the rows, the file a row stands in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from private_rlhf.audit.coordinates import HEX, fitted
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import bins, categories
from private_rlhf.audit.view import Table, View, plain_text

MOST_NUMBERS = 8


def extra_columns(view: View) -> Iterator[Guesses]:
    """Every column beside the pair: its value, differences of two, texts that equal one response. Leak 7."""
    for table in view.tables:
        numbers: dict[str, np.ndarray] = {}
        for name, values in table.columns.items():
            numeric = _numbers(values)
            if numeric is not None:
                numbers[name] = numeric
                yield from fitted(view, table, "extra columns", name, bins(numeric))
            else:
                yield from fitted(view, table, "extra columns", name, categories(values))
                yield from _text_column(view, table, name, values)
        for one, two in combinations(list(numbers)[:MOST_NUMBERS], 2):
            difference = numbers[one] - numbers[two]
            yield from fitted(view, table, "extra columns", f"{one} - {two}", bins(difference))
            signs = np.where(np.isnan(difference), -1, np.sign(difference) + 1).astype(np.int64)
            yield from fitted(view, table, "extra columns", f"sign of {one} - {two}", signs)


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """(m,) float64 if every value is a number, a truth value, or missing."""
    if not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)


def _text_column(view: View, table: Table, name: str, values: Sequence[Any]) -> Iterator[Guesses]:
    """Columns of text: do they hold one of the responses, how long are they, what are an id's first bits?"""
    holds = np.full(len(values), -1, dtype=np.int64)
    sizes = np.full(len(values), np.nan)
    bits = np.full(len(values), -1, dtype=np.int64)
    for place, (event, value) in enumerate(zip(table.event, values, strict=True)):
        text = value if isinstance(value, str) else None if value is None else str(value)
        if text is None:
            continue
        sizes[place] = len(text)
        one, two = plain_text(view.first[event]), plain_text(view.second[event])
        holds[place] = 2 * (one in text) + (two in text)
        if HEX.fullmatch(text):
            bits[place] = int(text.replace("-", "")[:2] or "0", 16)
    if len(np.unique(holds)) > 1:
        yield from fitted(view, table, "extra columns", f"{name} holds a response", holds)
    if len(np.unique(sizes)) > 1:
        yield from fitted(view, table, "extra columns", f"length of {name}", bins(sizes))
    if (bits >= 0).any():
        yield from fitted(view, table, "ids", f"first bits of {name}", bits)


def file_of_row(view: View) -> Iterator[Guesses]:
    """The file (and so its name, size and time) that a row stands in. Leak 7: one file per label, say."""
    for table in view.tables:
        if len(np.unique(table.part)) > 1:
            yield from fitted(view, table, "files and sizes", "file of the row", table.part)


def row_order(view: View) -> Iterator[Guesses]:
    """Does a row's place, in the table or in its file, tell its label? Labels in blocks, or alternating. Leak 7."""
    for table in view.tables:
        yield from fitted(view, table, "row order", "place", bins(table.row.astype(np.float64)))
        for period in (2, 4, 8):
            yield from fitted(view, table, "row order", f"place modulo {period}", table.row % period)
        if len(np.unique(table.part)) > 1:
            starts = np.array([table.row[table.part == part].min() for part in range(table.part.max() + 1)
                               if (table.part == part).any()])  # fmt: skip
            inside = table.row - starts[np.unique(table.part, return_inverse=True)[1]]
            yield from fitted(view, table, "row order", "place in the file", bins(inside.astype(np.float64)))


def sorted_rows(view: View) -> Iterator[Guesses]:
    """The same for rows sorted by the chosen answer: texts, lengths or digests of it in rising or falling order."""
    for table in view.tables:
        yield from _sorted_by_answer(view, table)


_KEYS: dict[str, Callable[[str], Any]] = {
    "text": lambda text: text,
    "lower-case text": str.lower,
    "length": len,
    "words": lambda text: len(text.split()),
    "md5": lambda text: hashlib.md5(text.encode(), usedforsecurity=False).digest(),
    "sha1": lambda text: hashlib.sha1(text.encode(), usedforsecurity=False).digest(),
    "sha256": lambda text: hashlib.sha256(text.encode()).digest(),
}


def _sorted_by_answer(view: View, table: Table) -> Iterator[Guesses]:
    """If the file was sorted by the chosen answer, the choice that leaves it sorted is the label."""
    order = np.argsort(table.row, kind="stable")
    events = table.event[order]
    for name, key in _KEYS.items():
        one = [key(plain_text(view.first[event])) for event in events]
        two = [key(plain_text(view.second[event])) for event in events]
        ranks = {value: rank for rank, value in enumerate(sorted({*one, *two}))}
        pair = np.array([[ranks[value] for value in one], [ranks[value] for value in two]], dtype=np.int64)
        for direction, keys in (("rising", pair), ("falling", -pair)):
            label = sorted_choice(keys)
            kept = label != 0
            yield Guesses("row order", f"{table.name}: {direction} {name} of the answer", events[kept], label[kept])


def sorted_choice(keys: np.ndarray) -> np.ndarray:
    """(m,) int8 in {-1, 0, +1}: which of two candidates per place keeps the sequence sorted (0: either would do).

    keys: (2, m) int64. The best assignment by dynamic programming over places: the choice with the most rising steps
    through it, forwards and backwards together.
    """
    count = keys.shape[1]
    forward, backward = np.zeros((count, 2), dtype=np.int64), np.zeros((count, 2), dtype=np.int64)
    rows = keys.T.tolist()
    best = [0, 0]
    for place in range(1, count):
        (a, b), (c, d) = rows[place - 1], rows[place]
        best = [max(best[0] + (a <= c), best[1] + (b <= c)), max(best[0] + (a <= d), best[1] + (b <= d))]
        forward[place] = best
    best = [0, 0]
    for place in range(count - 2, -1, -1):
        (a, b), (c, d) = rows[place], rows[place + 1]
        best = [max(best[0] + (a <= c), best[1] + (a <= d)), max(best[0] + (b <= c), best[1] + (b <= d))]
        backward[place] = best
    total = forward + backward
    return np.sign(total[:, 0] - total[:, 1]).astype(np.int8)
