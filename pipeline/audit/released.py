"""Attacks on the released labels themselves: their columns, several releases of one event, and copies of one pair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from private_rlhf.audit.coordinates import fitted, frames, relative
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import cell_guesses, crossed
from private_rlhf.audit.view import Table, View
from private_rlhf.core.noise import is_public

MOST_TABLES = 6  # joint outcomes are 2^tables


def private_label(view: View) -> Iterator[Guesses]:
    """Believe z. Right with probability alpha, if the mechanism keeps labels as often as it says and no more often.

    Then for each z alone, in every frame: a mechanism that looks at the label keeps one of the two more often.
    """
    for table in view.tables:
        stated = table.z != 0
        yield Guesses("private label", table.name, table.event[stated], table.z[stated])
        yield from fitted(view, table, "private label", "each z", np.where(stated, 0, -1))


def column_order(view: View) -> Iterator[Guesses]:
    """The left-hand response is the preferred one. Leak 1: the chosen answer always comes first."""
    for table in view.tables:
        yield from relative(view, Guesses("column order", table.name, table.event, table.side), table)


def public_signs(view: View) -> Iterator[Guesses]:
    """A public sign of a row (a bit of its id, the parity of its place) is the label, or says that z is."""
    for table in view.tables:
        for name, sign in frames(view, table).items():
            for what, guess in (("", sign), (" times z", sign * table.z)):
                kept = guess != 0
                for way, direction in (("", 1), (" turned", -1)):
                    variant = f"{table.name}: {name}{what}{way}"
                    labels = (direction * guess[kept]).astype(np.int8)
                    yield Guesses("public signs", variant, table.event[kept], labels)


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
    kept = np.abs(score) > 1e-12
    yield Guesses("several releases", "weighted majority", some[kept], np.sign(score[kept]).astype(np.int8))
    votes = z[:, some].astype(np.int64).sum(axis=0)
    yield Guesses("several releases", "majority", some[votes != 0], np.sign(votes[votes != 0]).astype(np.int8))
    agree = np.abs(votes) == (z[:, some] != 0).sum(axis=0)
    yield Guesses("several releases", "all agree", some[agree], np.sign(votes[agree]).astype(np.int8))
    top = z[int(np.argmax(weight)), some]
    split = ~agree & (top != 0)
    yield Guesses("several releases", "largest epsilon where they disagree", some[split], top[split])
    signs = [view.own_z(table) for table in tables[:MOST_TABLES]]
    cells = crossed(np.zeros(view.size, dtype=np.int64), *signs)
    yield Guesses("several releases", "joint outcome", *cell_guesses(cells, view.known, view.alpha), learned=True)


def private_tables(view: View) -> list[Table]:
    """Tables with private labels; two with the same labels everywhere are one release that was copied."""
    kept: list[Table] = []
    seen: set[bytes] = set()
    for table in view.tables:
        if is_public(table.epsilon):
            continue  # released as they are
        name = view.own_z(table).tobytes()
        if name not in seen and bool((table.z != 0).any()):
            seen.add(name)
            kept.append(table)
    return kept


def copies(view: View) -> Iterator[Guesses]:
    """Two events of one pair: given one label, guess the other from whether the two released ones agree. Leak 6."""
    if len(view.copies):
        product = (view.copies[:, 0] * view.copies[:, 1]).astype(np.int8)
        yield Guesses("copies", "one flip for two", np.arange(len(product)), product, target="product")
