"""The one learner of the suite: a table of cells, fitted on events whose labels are known, used on the others.

Nothing finer is needed: what leaks a label is a value, an order or a number, and within a cell the guess is the label
that the known half shows more often. Cells where that half gives no more than alpha are left alone, so that a leak in a
few of them is not drowned by the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

BINS = 32
PER_BIN = 64
LEAST = 8  # known events that a cell needs before it is trusted
CATEGORIES = 256


def cell_guesses(cells: np.ndarray, known: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions (m,) with known == 0 in cells that promise more than alpha, and the guesses (m,) for them.

    cells: (n,) int64; negative for "no value", about which nothing is said. known: (n,) int8, the label or 0.
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


def bins(values: np.ndarray) -> np.ndarray:
    """(n,) int64 cell of each number among up to 32 quantile bins (of 64 values or more, so that a cell has enough
    known events); -1 for NaN. Few distinct values are cells each.
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = max(2, min(BINS, numbers.size // PER_BIN))
    found = np.full(numbers.shape, -1, dtype=np.int64)
    real = ~np.isnan(numbers)
    distinct = np.unique(numbers[real])
    if distinct.size > count:
        edges = np.unique(np.quantile(numbers[real], np.arange(1, count) / count))
        found[real] = np.searchsorted(edges, numbers[real], side="right")
    else:
        found[real] = np.searchsorted(distinct, numbers[real])
    return found


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
