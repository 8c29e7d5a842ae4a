"""Coordinate systems in which a label can be guessed: which of the two responses counts as the first one.

The suite names an event's responses by their text (lower, higher). A program may name them otherwise (response_a by the
parity of a digest, the longer one, the one shown in even rows), and whatever depends on its own label is a fair coin in
the suite's. A *frame* is a public sign per row, +1 where its first response is the suite's; every fitted attack guesses
in all of them, and the signs themselves are guesses too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import cell_guesses, crossed
from private_rlhf.audit.view import Table, View, plain_text

HEX = re.compile(r"[0-9a-fA-F-]{8,128}")
ID_BITS = 4  # at either end of an id
CRITERION = "lower text"


def frames(view: View, table: Table) -> dict[str, np.ndarray]:
    """Signs (m,) int8 in {-1, +1} of the table's rows, by name: of the texts' order, bits of hexadecimal columns at
    both ends, length, position and file. Those of one sign throughout are left out but for the first.
    """
    if id(table) not in view.signs:
        view.signs[id(table)] = _frames(view, table)
    return view.signs[id(table)]


def _frames(view: View, table: Table) -> dict[str, np.ndarray]:
    found = {CRITERION: np.ones(len(table.event), dtype=np.int8)}
    for name, values in table.columns.items():
        if not all(isinstance(value, str) and HEX.fullmatch(value) for value in values):
            continue
        digits = [value.replace("-", "") or "0" for value in values]
        ends = np.array([[int(text[-1], 16), int(text[0], 16)] for text in digits], dtype=np.int64)
        for end, label in enumerate(("last", "first")):
            for bit in range(ID_BITS):
                found[f"bit {bit} of the {label} digit of {name}"] = _sign(ends[:, end] >> bit & 1)
    sizes = [(len(plain_text(view.first[event])), len(plain_text(view.second[event]))) for event in table.event]
    found["longer text"] = _sign(np.array([one < two for one, two in sizes], dtype=np.int64))
    found["parity of the place"] = _sign(table.row & 1)
    found["parity of the file"] = _sign(table.part & 1)
    return {name: sign for name, sign in found.items() if name == CRITERION or len(np.unique(sign)) > 1}


def _sign(bits: np.ndarray) -> np.ndarray:
    return (1 - 2 * bits).astype(np.int8)


def fitted(view: View, table: Table, attack: str, variant: str, cells: np.ndarray) -> Iterator[Guesses]:
    """Cells (m,) of a table's rows in every frame, crossed with side and z there, fitted on the known half."""
    for name, sign in frames(view, table).items():
        full = np.full(view.size, -1, dtype=np.int64)
        full[table.event] = crossed(cells, table.side * sign, table.z * sign)
        spread = np.zeros(view.size, dtype=np.int8)
        spread[table.event] = sign
        events, labels = cell_guesses(full, view.known * spread, view.alpha)
        where = f"{table.name}: {variant}" + (f", relative to {name}" if name != CRITERION else "")
        yield Guesses(attack, where, events, labels * spread[events], learned=True)


def relative(view: View, guess: Guesses, table: Table) -> Iterator[Guesses]:
    """A guess of all of the table's rows, and the same in every other frame."""
    for name, sign in frames(view, table).items():
        tail = f", relative to {name}" if name != CRITERION else ""
        yield replace(guess, variant=guess.variant + tail, labels=guess.labels * sign)
