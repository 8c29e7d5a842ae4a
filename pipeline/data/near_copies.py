"""Near copies of responses, by shingles: what the overlap guard sees of answers that were edited, cut or put together.

A shingle is a run of 24 bytes of a turn's letters and digits; one in 16 is kept, by its hash (Broder 1997). Of a pair
those count that the other response, the prompt and other pairs do not have. A pair is one-sided

- where a third of one response's shingles, and 4 of them, are in the file, and of the other's less than a quarter of
  what that share would give, which is at least 4;
- where rows hold both responses, and not equally often the one before the other: the first may be the preferred one.

Both are symmetric in the responses. Memory: 16 bytes per kept shingle of the demonstrations or prompts (30 per hundred
words), 24 for each of the pairs' that is found there, and 16 per pair.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable

import numpy as np

SHINGLE = 24
KEPT_BITS = 4
LEAST_FOUND = 4
LEAST_SHARE = 1 / 3
MUCH_LESS = 1 / 4
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Shingler:
    """Hashes under a multiplier that is drawn here: a polynomial in it over the bytes, mixed."""

    def __init__(self) -> None:
        self._base = secrets.randbits(64) | 1
        self._powers = self._inverses = np.ones(1, dtype=np.uint64)

    def of(self, contents: Iterable[str]) -> np.ndarray:
        """(k,) uint64: the kept shingles of the turns, in their order."""
        return np.concatenate([np.empty(0, dtype=np.uint64), *map(self._of, contents)])

    def _of(self, text: str) -> np.ndarray:
        values = np.frombuffer(text.encode(), dtype=np.uint8)
        if len(values) < SHINGLE:
            return np.empty(0, dtype=np.uint64)
        if len(values) > len(self._powers):
            self._powers = _powers(self._base, 2 * len(values))
            self._inverses = _powers(pow(self._base, -1, 1 << 64), 2 * len(values))
        sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum((values + np.uint64(1)) * self._powers[: len(values)], out=sums[1:])
        starts = len(values) - SHINGLE + 1
        hashes = (sums[SHINGLE:] - sums[:starts]) * self._inverses[:starts]
        hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
        hashes ^= hashes >> np.uint64(29)
        return hashes[hashes >> np.uint64(64 - KEPT_BITS) == 0]


def _per_side(pair: np.ndarray, side: np.ndarray, pairs: int) -> np.ndarray:
    return np.bincount(2 * pair + side, minlength=2 * pairs).reshape(-1, 2)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def places(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The place where each wanted digest stands in the sorted `known`; -1 for those that do not. int64, as `wanted`."""
    if not len(known):
        return np.full(wanted.shape, -1)
    found = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    return np.where(known[found] == wanted, found, -1)


def prompts_of(places: np.ndarray, prompts: np.ndarray, size: int) -> np.ndarray:
    """(size,) int64: the number of different prompts (n,) uint64 that stand at each place (n,) int64."""
    order = np.lexsort((prompts, places))
    places, prompts = places[order], prompts[order]
    first = np.ones(len(places), bool)
    first[1:] = (places[1:] != places[:-1]) | (prompts[1:] != prompts[:-1])
    return np.bincount(places[first], minlength=size)


class ShingledRows:
    """The shingles of demonstrations or prompts."""

    def __init__(self) -> None:
        self._hashes, self._rows = array("Q"), array("q")

    def add(self, row: int, shingles: np.ndarray, prompt: bool) -> None:
        """prompt: whether they are of the row's prompt, else of its response."""
        self._hashes.frombytes(shingles.tobytes())
        self._rows.frombytes(np.full(len(shingles), ~row if prompt else row, dtype=np.int64).tobytes())

    def counted(self, public: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(m,) uint64 shingles but for public prompts', in order, and (m,) int64 their rows. public: (rows,) bool."""
        hashes, rows = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._rows, np.int64)
        owner = np.where(rows < 0, ~rows, rows)
        kept = (rows >= 0) | ~public[owner]
        return hashes[kept], owner[kept]

    @property
    def known(self) -> np.ndarray:
        """Its distinct shingles, sorted."""
        return np.unique(np.frombuffer(self._hashes, np.uint64))


class NearCopies:
    """Keeps of the pairs' shingles those that a file may have."""

    def __init__(self, rows: ShingledRows) -> None:
        self._rows, self._known = rows, rows.known
        self._found: list[np.ndarray] = [np.empty((3, 0), dtype=np.int64)]  # place in `known`, pair, side
        self._sizes: list[np.ndarray] = [np.empty((0, 2), dtype=np.int64)]
        self._prompts: list[np.ndarray] = [np.empty(0, dtype=np.uint64)]
        self._pairs = 0

    def look(self, sides: list[tuple[np.ndarray, np.ndarray]], prompts: np.ndarray) -> None:
        """sides: of each pair the shingles that its one and its other response alone have. prompts: uint64 digests."""
        sizes = np.array([[len(one), len(other)] for one, other in sides], dtype=np.int64)
        hashes = np.concatenate([side for pair in sides for side in pair])
        owner = np.repeat(np.arange(2 * len(sides)), sizes.ravel())
        place = places(self._known, hashes)
        hit = place >= 0
        self._found.append(np.stack([place[hit], owner[hit] // 2 + self._pairs, owner[hit] % 2]))
        self._sizes.append(sizes)
        self._prompts.append(prompts)
        self._pairs += len(sides)

    def one_sided(self, public: np.ndarray) -> np.ndarray:
        """(pairs,) bool. public: (rows,) bool, rows whose prompt is a pair's own."""
        place, pair, side = np.concatenate(self._found, axis=1)
        sizes = np.concatenate(self._sizes)
        hashes, rows = self._rows.counted(public)
        at = np.searchsorted(self._known, hashes)
        shown = np.bincount(at, minlength=len(self._known)) > 0
        alone = (prompts_of(place, np.concatenate(self._prompts)[pair], len(self._known)) == 1)[place]
        sizes = sizes - _per_side(pair[~alone], side[~alone], len(sizes))
        mine = shown[place] & alone
        place, pair, side = place[mine], pair[mine], side[mine]
        counts = _per_side(pair, side, len(sizes))
        shares = counts / np.maximum(sizes, 1)
        much = (counts >= LEAST_FOUND) & (shares >= LEAST_SHARE)
        expected = np.minimum(sizes * shares[:, ::-1], counts[:, ::-1])
        less = (counts < MUCH_LESS * expected) & (expected >= LEAST_FOUND)
        found = (much[:, ::-1] & less).any(axis=1)
        return found | self._in_one_order(place, pair, side, much.all(axis=1), at, rows)

    def _in_one_order(
        self, place: np.ndarray, pair: np.ndarray, side: np.ndarray, both: np.ndarray, at: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """(pairs,) bool: rows hold both responses, the one before the other more often than after it. at, rows: of the
        file's shingles in their order."""
        holder = np.full(len(self._known), -1)
        kept = both[pair]
        holder[place[kept]] = 2 * pair[kept] + side[kept]
        seen = np.flatnonzero(holder[at] >= 0)
        owner = rows[seen] * 2 * len(both) + holder[at[seen]]  # a number for each row, pair and side, in this order
        owner, first, counts = np.unique(owner, return_index=True, return_counts=True)
        owner, first = owner[counts >= LEAST_FOUND], first[counts >= LEAST_FOUND]
        together = np.flatnonzero(owner[1:] // 2 == owner[:-1] // 2)
        before = np.where(first[together] < first[together + 1], 1, -1)
        return np.bincount(owner[together] // 2 % len(both), weights=before, minlength=len(both)) != 0
