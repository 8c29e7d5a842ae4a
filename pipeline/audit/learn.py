"""Fitted attacks: tables of cells in every coordinate system of the responses, and boosted trees as the catch-all.

A table of cells is fitted on events whose labels are known and used on the others: within a cell the guess is the label
that the known half shows more often. Cells that promise no more than alpha are skipped, so that they do not drown a
leak in a few others.

The suite names an event's responses by their text (lower, higher). A program may name them otherwise (the one shown in
even rows, say), and a label relative to its names is a fair coin in the suite's. A *frame* is a public sign per row, +1
where its first response is the suite's; every fitted attack guesses in all frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.view import Table, View
from private_rlhf.core.environment import remedy

BINS = 32
PER_BIN = 64
LEAST = 8  # known events that a cell needs before it is trusted
CATEGORIES = 256


def cell_guesses(cells: np.ndarray, known: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions (m,) with known == 0 in cells that promise more than alpha, and the guesses (m,) for them.

    cells: (n,) int64; negative for "no value", which get no guess. known: (n,) int8, the label or 0.
    """
    _, cell = np.unique(cells, return_inverse=True)
    size = int(cell.max()) + 1 if cell.size else 0
    plus = np.bincount(cell[known > 0], minlength=size)
    minus = np.bincount(cell[known < 0], minlength=size)
    most, total = np.maximum(plus, minus), plus + minus
    promising = (total >= LEAST) & (most > alpha * total)
    guess = np.where(plus >= minus, 1, -1).astype(np.int8)
    picked = np.flatnonzero(promising[cell] & (known == 0) & (cells >= 0)) if size else np.zeros(0, dtype=np.int64)
    return picked, guess[cell[picked]]


def by_cells(view: View, attack: str, variant: str, cells: np.ndarray) -> Guesses:
    """`cell_guesses` of cells (n,) of the view's events, fitted on the known half."""
    return Guesses(attack, variant, *cell_guesses(cells, view.known, view.alpha), learned=True)


def by_sign(attack: str, variant: str, events: np.ndarray, guess: np.ndarray) -> Guesses:
    """The guess that a label is the sign of a number (m,), where that is not 0."""
    some = guess != 0
    return Guesses(attack, variant, events[some], np.sign(guess[some]).astype(np.int8))


def bins(values: np.ndarray) -> np.ndarray:
    """(n,) int64 cell of each number among up to 32 quantile bins (of 64 values or more, so that a cell has enough
    known events); -1 for NaN. Few distinct values are cells each.
    """
    values = np.asarray(values, dtype=np.float64)
    count = max(2, min(BINS, values.size // PER_BIN))
    cells = np.full(values.shape, -1, dtype=np.int64)
    real = ~np.isnan(values)
    edges = np.unique(values[real])
    side: Literal["left", "right"] = "left"
    if edges.size > count:
        edges, side = np.unique(np.quantile(values[real], np.arange(1, count) / count)), "right"
    cells[real] = np.searchsorted(edges, values[real], side)
    return cells


def categories(values: Iterable[Any]) -> np.ndarray:
    """(n,) int64 cell of each value (by its `str`): the commonest have a cell each, the rest one; -1 for None."""
    texts = np.array(["" if value is None else "=" + str(value)[:200] for value in values])
    if not texts.size:
        return np.zeros(0, dtype=np.int64)
    names, inverse, counts = np.unique(texts, return_inverse=True, return_counts=True)
    rank = np.empty(len(names), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(names))
    cell = np.minimum(rank, CATEGORIES)[inverse]
    cell[texts == ""] = -1
    return cell


def crossed(cells: np.ndarray, *signs: np.ndarray) -> np.ndarray:
    """Cells split further by numbers in {-1, 0, +1}; "no value" stays so."""
    result = cells.astype(np.int64)
    for sign in signs:
        result = np.where(result < 0, -1, 3 * result + sign.astype(np.int64) + 1)
    return result


HEX = re.compile(r"[0-9a-fA-F-]{8,128}")
ID_BITS = 4  # at either end of an id
CRITERION = "lower text"


def frames(view: View, table: Table) -> dict[str, np.ndarray]:
    """Signs (m,) int8 in {-1, +1} of the table's rows, by name: of the texts' order, bits of hexadecimal columns at
    both ends, length, position and file. Those of one sign throughout are left out but for the first.
    """
    if id(table) in view.signs:
        return view.signs[id(table)]
    signs = {CRITERION: np.ones(len(table.event), dtype=np.int8)}
    for name, values in table.columns.items():
        if not all(isinstance(value, str) and HEX.fullmatch(value) for value in values):
            continue
        digits = [value.replace("-", "") or "0" for value in values]
        ends = np.array([[int(text[-1], 16), int(text[0], 16)] for text in digits], dtype=np.int64)
        for end, label in enumerate(("last", "first")):
            for bit in range(ID_BITS):
                signs[f"bit {bit} of the {label} digit of {name}"] = _sign(ends[:, end] >> bit & 1)
    _, one, two = view.lengths[table.event].T
    signs["longer text"] = _sign((one < two).astype(np.int64))
    signs["parity of the place"] = _sign(table.row & 1)
    signs["parity of the file"] = _sign(table.part & 1)
    differing = {name: sign for name, sign in signs.items() if name == CRITERION or len(np.unique(sign)) > 1}
    return view.signs.setdefault(id(table), differing)


def _sign(bits: np.ndarray) -> np.ndarray:
    return (1 - 2 * bits).astype(np.int8)


def fitted(view: View, table: Table, attack: str, variant: str, cells: np.ndarray) -> Iterator[Guesses]:
    """Cells (m,) of a table's rows in every frame, crossed with side and z there, fitted on the known half."""
    for name, sign in frames(view, table).items():
        full = view.spread(table, crossed(cells, table.side * sign, table.z * sign), elsewhere=-1)
        spread = view.spread(table, sign)
        events, labels = cell_guesses(full, view.known * spread, view.alpha)
        where = f"{table.name}: {variant}" + (f", relative to {name}" if name != CRITERION else "")
        yield Guesses(attack, where, events, labels * spread[events], learned=True)


def relative(view: View, guess: Guesses, table: Table) -> Iterator[Guesses]:
    """A guess of all of the table's rows, and the same in every other frame."""
    for name, sign in frames(view, table).items():
        tail = f", relative to {name}" if name != CRITERION else ""
        yield replace(guess, variant=guess.variant + tail, labels=guess.labels * sign)


MOST_ROWS = 50_000  # that the trees are fitted on
LEAST_ROWS = 400  # known ones, below which trees learn nothing
SPLITS = 40


def untried() -> str | None:
    """The distinguisher where scikit-learn is missing."""
    if find_spec("sklearn") is None:
        return f"the learned distinguisher (scikit-learn is not installed: {remedy('audit')})"
    return None


def distinguisher(view: View) -> Iterator[Guesses]:
    """The label relative to the lower text, to z and to an id's low bit, from every public number of the row.

    Guessed are the events for which the trees promise more than alpha.
    """
    if untried() is not None:
        return
    from sklearn.ensemble import HistGradientBoostingClassifier

    for table in view.tables:
        public = features(view, table)
        for name, sign in _targets(view, table).items():
            known = view.known[table.event] * sign
            seen = np.flatnonzero(known)[:MOST_ROWS]
            if len(seen) < LEAST_ROWS or len(np.unique(known[seen])) < 2:
                continue
            inputs = np.column_stack([public, table.side * sign, table.z * sign])
            trees = HistGradientBoostingClassifier(
                max_iter=SPLITS, max_leaf_nodes=8, min_samples_leaf=50, random_state=0, early_stopping=False
            )
            trees.fit(inputs[seen], known[seen])
            hidden = np.flatnonzero(view.known[table.event] == 0)
            if not len(hidden):
                continue
            plus = trees.predict_proba(inputs[hidden])[:, 1]
            sure = np.maximum(plus, 1 - plus) > view.alpha
            guess = (np.where(plus[sure] >= 0.5, 1, -1) * sign[hidden][sure]).astype(np.int8)
            variant = f"{table.name}: boosted trees, relative to {name}"
            yield Guesses("distinguisher", variant, table.event[hidden][sure], guess, learned=True)


def _targets(view: View, table: Table) -> dict[str, np.ndarray]:
    signs = frames(view, table)
    chosen = {name: sign for name, sign in signs.items() if name == CRITERION or name.startswith("bit 0 of the last")}
    if (table.z != 0).all():
        chosen["z"] = table.z
    return chosen


def features(view: View, table: Table) -> np.ndarray:
    """(m, features) float64: the frames' signs, lengths, place in table and file, and numeric columns."""
    lengths = view.lengths[table.event].T
    places = (table.row, table.part, table.row % 4096, *lengths, lengths[1] - lengths[2])
    columns = [each for values in table.columns.values() if (each := numbers(values)) is not None]
    return np.column_stack([*frames(view, table).values(), *places, *columns]).astype(np.float64)


def numbers(values: Sequence[Any]) -> np.ndarray | None:
    """(m,) float64, NaN where one is missing, if every value of a column is a number, a truth value, or missing."""
    if not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)
