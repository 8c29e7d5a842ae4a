"""Short answers inside longer texts, with an opening, a close or a wrapper, for the overlap guard.

A row is searched for both responses of a pair where it has the pair's prompt: its last user turn begins with that of
the pair. Only the response and what follows the prompt count. A pair is one-sided here

- where rows hold a response of 16 letters or more, and none holds the other;
- where rows hold both, and not equally often the one before the other.

Pairs of which one response is a part of the other or of the prompt say nothing. Not searched: further rows of which the
last user turns begin alike (the first 24 letters), after 64; texts around a prompt of fewer than 24 letters.

Memory: the letters and digits of all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

HEAD = 24
MOST_ROWS = 64
LEAST_LETTERS = 16


class SearchedRows:
    """The last user turns and the responses of demonstrations or prompts, by how the turn begins."""

    def __init__(self) -> None:
        self._by_head: dict[str, list[tuple[int, str, str]]] = defaultdict(list)

    def add(self, row: int, question: str, response: str) -> None:
        """Letters and digits of both; the response is empty for a prompt."""
        if len(alike := self._by_head[question[:HEAD]]) < MOST_ROWS:
            alike.append((row, question, response))

    def with_prompt(self, question: str) -> Iterable[tuple[int, str, str]]:
        """(row, what follows the pair's question in the row's last user turn, response) of the rows that have it."""
        for row, turn, response in self._by_head.get(question[:HEAD], ()):
            if turn.startswith(question):
                yield row, turn[len(question) :], response


class ContainedAnswers:
    """Keeps of the pairs which rows hold their responses."""

    def __init__(self, rows: SearchedRows) -> None:
        self._rows = rows
        self._hits: list[tuple[int, int, bool, bool, int]] = []  # pair, row or -1, holds the one, the other, order
        self._telling: list[list[bool]] = []  # of each pair, which responses are long enough to tell

    def look(self, texts: Sequence[tuple[str, str, str]]) -> None:
        """texts: of each pair the last user turn and the two responses, as letters and digits."""
        for question, one, other in texts:
            pair, telling = len(self._telling), [len(text) >= LEAST_LETTERS for text in (one, other)]
            self._telling.append(telling)
            if not question or not any(telling) or one in other or other in one or one in question or other in question:
                continue
            for row, rest, response in self._rows.with_prompt(question):
                text = f"{rest} {response}"  # no answer runs over the space
                places = text.find(one), text.find(other)
                if max(places) >= 0:
                    order = int(np.sign(places[1] - places[0])) if min(places) >= 0 and all(telling) else 0
                    prompt = any(0 <= place < len(rest) for place in places)
                    self._hits.append((pair, row if prompt else -1, places[0] >= 0, places[1] >= 0, order))

    def one_sided(self, public: np.ndarray) -> np.ndarray:
        """(pairs,) bool. public: (rows,) bool, rows whose prompt is a pair's own, so that its text is not a sign."""
        pairs = len(self._telling)
        held, order = np.zeros((pairs, 2), dtype=bool), np.zeros(pairs, dtype=np.int64)
        for pair, row, one, other, before in self._hits:
            if row < 0 or not public[row]:
                held[pair] |= (one, other)
                order[pair] += before
        telling = np.array(self._telling, dtype=bool).reshape(-1, 2)
        return (held & telling & ~held[:, ::-1]).any(axis=1) | (order != 0)
