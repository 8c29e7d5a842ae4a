"""Attacks on released tables: their labels, other columns, order of rows, files of a row, and rows left out.

A release may choose its rows by prompts and responses, never by a label. So among the canaries that are missing the
labels are fair coins, in every frame that the texts give (`absence`, leak 7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit.canaries import FRAMES, Truth
from private_rlhf.audit.judge import Guesses, Verdict, upper_tail
from private_rlhf.audit.learn import (
    HEX,
    bins,
    by_cells,
    by_sign,
    categories,
    crossed,
    fitted,
    frames,
    numbers,
    relative,
)
from private_rlhf.audit.view import Table, View, plain_text
from private_rlhf.core.noise import is_public

MOST_NUMBERS = 8


def extra_columns(view: View) -> Iterator[Guesses]:
    """Every column beside the pair: its value, differences of two, texts that equal one response. Leak 7."""
    for table in view.tables:
        numeric_columns: dict[str, np.ndarray] = {}
        for name, values in table.columns.items():
            if (numeric := numbers(values)) is not None:
                numeric_columns[name] = numeric
                yield from fitted(view, table, "extra columns", name, bins(numeric))
            else:
                yield from fitted(view, table, "extra columns", name, categories(values))
                yield from _text_column(view, table, name, values)
        for one, two in combinations(list(numeric_columns)[:MOST_NUMBERS], 2):
            difference = numeric_columns[one] - numeric_columns[two]
            yield from fitted(view, table, "extra columns", f"{one} - {two}", bins(difference))
            signs = np.where(np.isnan(difference), -1, np.sign(difference) + 1).astype(np.int64)
            yield from fitted(view, table, "extra columns", f"sign of {one} - {two}", signs)


def _text_column(view: View, table: Table, name: str, values: Sequence[Any]) -> Iterator[Guesses]:
    """Columns of text: do they hold one of the responses, how long are they, what are an id's first bits?"""
    holds = np.full(len(values), -1, dtype=np.int64)
    sizes = np.full(len(values), np.nan)
    bits = np.full(len(values), -1, dtype=np.int64)
    for place, (event, value) in enumerate(zip(table.event, values, strict=True)):
        if value is None:
            continue
        text = str(value)
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
    """The file (and so its name, size and time) that a row stands in. Leak 7, such as one file per label."""
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
            _, start, file = np.unique(table.part, return_index=True, return_inverse=True)
            inside = table.row - table.row[start[file]]
            yield from fitted(view, table, "row order", "place in the file", bins(inside.astype(np.float64)))


_KEYS: dict[str, Callable[[str], Any]] = {
    "text": lambda text: text,
    "lower-case text": str.lower,
    "length": len,
    "words": lambda text: len(text.split()),
    "md5": lambda text: hashlib.md5(text.encode(), usedforsecurity=False).digest(),
    "sha1": lambda text: hashlib.sha1(text.encode(), usedforsecurity=False).digest(),
    "sha256": lambda text: hashlib.sha256(text.encode()).digest(),
}


def sorted_rows(view: View) -> Iterator[Guesses]:
    """The choice that leaves a file sorted by the chosen answer: its text, length or digest, rising or falling."""
    for table, (name, key) in product(view.tables, _KEYS.items()):
        events = table.event[np.argsort(table.row, kind="stable")]
        one = [key(plain_text(view.first[event])) for event in events]
        two = [key(plain_text(view.second[event])) for event in events]
        ranks = {value: rank for rank, value in enumerate(sorted({*one, *two}))}
        pair = np.array([[ranks[value] for value in one], [ranks[value] for value in two]], dtype=np.int64)
        for direction, keys in (("rising", pair), ("falling", -pair)):
            variant = f"{table.name}: {direction} {name} of the answer"
            yield by_sign("row order", variant, events, sorted_choice(keys))


def sorted_choice(keys: np.ndarray) -> np.ndarray:
    """(m,) int8 in {-1, 0, +1}: which of two candidates per place keeps the sequence sorted (0: either would do).

    keys: (2, m) int64. The best assignment by dynamic programming over places: the choice with the most rising steps
    through it, forwards and backwards together.
    """

    def rising(rows: list[list[int]]) -> np.ndarray:
        most, best = np.zeros((len(rows), 2), dtype=np.int64), [0, 0]
        for place, ((a, b), (c, d)) in enumerate(pairwise(rows), 1):
            best = [max(best[0] + (a <= c), best[1] + (b <= c)), max(best[0] + (a <= d), best[1] + (b <= d))]
            most[place] = best
        return most

    total = rising(keys.T.tolist()) + rising((-keys.T[::-1]).tolist())[::-1]
    return np.sign(total[:, 0] - total[:, 1]).astype(np.int8)


MOST_TABLES = 6  # joint outcomes are 2^tables


def private_label(view: View) -> Iterator[Guesses]:
    """Believe z: right with probability alpha if the mechanism keeps labels as often as it says.

    Then for each z by itself, in every frame: a mechanism that looks at the label keeps one of the two more often.
    """
    for table in view.tables:
        yield by_sign("private label", table.name, table.event, table.z)
        yield from fitted(view, table, "private label", "each z", np.where(table.z != 0, 0, -1))


def column_order(view: View) -> Iterator[Guesses]:
    """The left-hand response is the preferred one. Leak 1: the chosen answer always comes first."""
    for table in view.tables:
        yield from relative(view, Guesses("column order", table.name, table.event, table.side), table)


def public_signs(view: View) -> Iterator[Guesses]:
    """A public sign of a row (a bit of its id, the parity of its place) is the label, or says that z is."""
    for table in view.tables:
        for name, sign in frames(view, table).items():
            for what, guess in (("", sign), (" times z", sign * table.z)):
                variant = f"{table.name}: {name}{what}"
                yield by_sign("public signs", variant, table.event, guess)
                yield by_sign("public signs", f"{variant} turned", table.event, -guess)


def several_releases(view: View) -> Iterator[Guesses]:
    """Majority, unanimity and disagreement of several releases. Leak 4, and averaging over redrawn flips.

    The weighted majority is the best guess against independent flips. Where all agree, independent flips add their
    epsilons up. Where they disagree, flips that share one uniform between several thresholds give the label away: the
    release with the largest epsilon is then right for certain. The table of joint outcomes finds what has no name.
    """
    tables = private_tables(view)
    if len(tables) < 2:
        return
    z = np.stack([view.own_z(table) for table in tables])
    weight = np.array([table.epsilon or 1.0 for table in tables])
    some = np.flatnonzero((z != 0).sum(axis=0) >= 2)
    score = (weight[:, None] * z[:, some]).sum(axis=0)
    votes = z[:, some].astype(np.int64).sum(axis=0)
    agree = np.abs(votes) == (z[:, some] != 0).sum(axis=0)
    for variant, guess in (
        ("weighted majority", np.where(np.abs(score) > 1e-12, score, 0.0)),
        ("majority", votes),
        ("all agree", votes * agree),
        ("largest epsilon where they disagree", z[int(np.argmax(weight)), some] * ~agree),
    ):
        yield by_sign("several releases", variant, some, guess)
    cells = crossed(np.zeros(view.size, dtype=np.int64), *z[:MOST_TABLES])
    yield by_cells(view, "several releases", "joint outcome", cells)


def private_tables(view: View) -> list[Table]:
    """Tables with private labels; two with the same labels everywhere are one release that was copied."""
    private = (table for table in view.tables if table.z.any() and not is_public(table.epsilon))
    different: dict[bytes, Table] = {}
    for table in private:
        different.setdefault(view.own_z(table).tobytes(), table)
    return list(different.values())


def copies(view: View) -> Iterator[Guesses]:
    """Two events of one pair: given one label, guess the other from whether the two released ones agree. Leak 6."""
    if len(view.copies):
        guess = view.copies.prod(axis=1, dtype=np.int8)
        yield Guesses("copies", "one flip for two", np.arange(len(guess)), guess, target="product")


FAIR = 0.5


def absence(view: View, truth: Truth) -> Iterator[Verdict]:
    """One verdict per root and frame, on the planted pairs with one event that no table of the root holds."""
    for root, present in view.present.items():
        missing = [key for key, labels in truth.labels.items() if len(labels) == 1 and key not in present]
        if missing:
            yield from _verdicts(root, missing, truth)


def _verdicts(root: Path, missing: list[bytes], truth: Truth) -> Iterator[Verdict]:
    labels = np.array([truth.labels[key][0] for key in missing])
    frames = np.array([truth.frames.get(key, (0,) * len(FRAMES)) for key in missing])
    for name, signs in zip(("the lower response", *FRAMES), (np.ones(len(missing)), *frames.T), strict=True):
        known = signs != 0
        n, preferred = int(known.sum()), int((labels * signs > 0).sum())
        if n:
            larger = max(preferred, n - preferred)
            variant = f"{root.name}: missing pairs, {name} {'' if larger == preferred else 'not '}preferred"
            p_value = min(1.0, 2 * upper_tail(larger, n, FAIR))
            yield Verdict.of("absence", variant, n, larger, FAIR, p_value)
