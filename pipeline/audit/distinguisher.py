"""A learned distinguisher, the catch-all: boosted trees on everything public about a row, in every frame.

scikit-learn is in the extra `audit`; without it nothing is guessed and `untried` says so. The trees are fitted on the
known half alone and judged on the other one, as every fitted attack.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
from private_rlhf.audit.coordinates import CRITERION, frames
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.view import Table, View, plain_text
from private_rlhf.core.environment import remedy

MOST_ROWS = 50_000  # that the trees are fitted on
LEAST_ROWS = 400  # known ones, below which trees learn nothing
SPLITS = 40


def untried() -> str | None:
    """One line where scikit-learn is missing."""
    if find_spec("sklearn") is None:
        return f"not tried: the learned distinguisher (scikit-learn is not installed: {remedy('audit')})"
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
    found: list[Any] = [*frames(view, table).values(), table.row, table.part, table.row % 4096]
    lengths = np.array(
        [[len(plain_text(text[event])) for text in (view.prompts, view.first, view.second)] for event in table.event]
    )
    found += [*lengths.T, lengths[:, 1] - lengths[:, 2]]
    for values in table.columns.values():
        if all(value is None or isinstance(value, int | float) for value in values):
            found.append([np.nan if value is None else float(value) for value in values])
    return np.column_stack([np.asarray(column, dtype=np.float64) for column in found])
