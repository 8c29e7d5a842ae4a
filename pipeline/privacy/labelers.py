"""The labellers' totals: how many events of each labeller cost which ε, by keyed tag, in one owner-only file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
from private_rlhf.core.atomic import new_file
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.row_files import check_rows, read_rows, row_digest

SLICE_BYTES = 64_000_000
TALLY = np.dtype([("labeler", "S16"), ("epsilon", "<f8"), ("events", "<i8")])
NO_LABELER = bytes(16)


def tally(labelers: np.ndarray, levels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Counts (n,) int64 summed over equal (labeller (n,) S16, ε (n,) float64): (m,) TALLY, sorted, without zeros."""
    order = _order(labelers, levels)
    labelers, levels, counts = labelers[order], levels[order], counts[order]
    first = np.ones(len(order), bool)
    first[1:] = (labelers[1:] != labelers[:-1]) | (levels[1:] != levels[:-1])
    starts = np.flatnonzero(first)
    rows = np.zeros(len(starts), TALLY)
    rows["labeler"], rows["epsilon"] = labelers[starts], levels[starts]
    rows["events"] = np.add.reduceat(counts, starts) if len(starts) else 0
    return rows[rows["events"] != 0]


def _order(labelers: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The positions in rising (labeller, ε). With one ε, which is the usual case, the first 8 bytes of the tags are
    sorted as integers (some ten times faster than strings), if no two different tags share them."""
    if len(levels) and np.all(levels == levels[0]):
        heads = np.ascontiguousarray(labelers).view(">u8")[::2].astype(np.uint64)
        order = np.argsort(heads)
        heads, tags = heads[order], labelers[order]
        if not np.any((heads[1:] == heads[:-1]) & (tags[1:] != tags[:-1])):
            return order
    return np.lexsort((levels, labelers))


@dataclass(frozen=True)
class LabelerTotals:
    """One state of the totals. `path`: its file, None while it is empty. `bounds`: 257 row numbers, by the first byte
    of the labeller's tag. `labelers`: how many. `unattributed`: events that name no labeller. `busiest`: (ε, events)
    of the labeller with the largest total, in rising ε. `digest`: of the file. `most`: events of the labeller who has
    most of them."""

    path: Path | None = None
    bounds: tuple[int, ...] = (0,) * 257
    labelers: int = 0
    unattributed: int = 0
    busiest: tuple[tuple[float, int], ...] = ()
    most: int = 0
    digest: str = ""

    @property
    def epsilon(self) -> float:
        """The largest total of any one labeller; 0 without labellers."""
        return total_epsilon(self.busiest)

    def everyone(self) -> Iterator[list[tuple[float, int]]]:
        """(ε, events) of each labeller, in rising ε."""
        if self.path is None:
            return
        for start, end in pairwise(self.bounds):
            rows = read_rows(self.path, TALLY, start, end).tolist()
            for labeler, events in groupby(rows, key=itemgetter(0)):
                if labeler != NO_LABELER.rstrip(b"\0"):
                    yield [(epsilon, count) for _, epsilon, count in events]

    def with_counts(self, epsilon: float) -> float:
        """A bound on any one labeller's total where noisy counts cost `epsilon` more for each event."""
        return self.epsilon + epsilon * self.most


def total_epsilon(levels: Sequence[tuple[float, int]]) -> float:
    """Σ ε·events, correctly rounded but for the products."""
    return math.fsum(epsilon * events for epsilon, events in levels)


def join_tallies(
    base: LabelerTotals, changes: Sequence[Path], path: Path, slice_bytes: int = SLICE_BYTES
) -> LabelerTotals:
    """Write the next state to `path`, durably: `base` plus the files of changes (TALLY rows as `tally` sorts them).

    Memory: about `slice_bytes` at a time, unless the labellers with one first byte need more. `base` itself if there
    are no changes. UserError if a file is damaged so that counts turn negative.
    """
    if not changes:
        return base
    size = sum(change.stat().st_size for change in changes) + base.bounds[-1] * TALLY.itemsize
    step = max(1, 256 // max(1, math.ceil(size / slice_bytes)))
    bounds, digest, labelers, unattributed, most = [0], row_digest(), 0, 0, 0
    busiest: tuple[tuple[float, int], ...] = ()
    with new_file(path, 0o600) as temporary, temporary.open("wb") as file:
        for low in range(0, 256, step):
            high = min(low + step, 256)
            parts = [_between(read_rows(change, TALLY), low, high) for change in changes]
            if base.path is not None:
                parts.append(read_rows(base.path, TALLY, base.bounds[low], base.bounds[high]))
            rows = np.concatenate(parts)
            rows = tally(rows["labeler"], rows["epsilon"], rows["events"])
            if np.any(rows["events"] < 0):
                raise UserError(f"{base.path or path}: labeller totals are damaged; restore the key's state folder")
            file.write(rows.data)
            digest.update(rows.data)
            bounds += [bounds[-1] + _below(rows, byte + 1) for byte in range(low, high)]
            named = rows[rows["labeler"] != NO_LABELER]
            unattributed += int(rows["events"].sum() - named["events"].sum())
            count, levels, events = _busiest(named)
            labelers, most = labelers + count, max(most, events)
            busiest = max(busiest, levels, key=total_epsilon)
    return LabelerTotals(path, tuple(bounds), labelers, unattributed, busiest, most, digest.hexdigest())


def _below(rows: np.ndarray, byte: int) -> int:
    """Number of rows (sorted) whose labeller tag has a smaller first byte; 0 <= byte <= 256."""
    return len(rows) if byte > 255 else int(np.searchsorted(rows["labeler"], np.array(bytes([byte]), "S16")))


def _between(rows: np.ndarray, low: int, high: int) -> np.ndarray:
    return rows[_below(rows, low) : _below(rows, high)].copy()  # a view would keep all rows in memory


def _busiest(rows: np.ndarray) -> tuple[int, tuple[tuple[float, int], ...], int]:
    """Number of labellers in rows that `tally` sorted; (ε, events) of the one with the largest total; the most events
    of any one."""
    if len(rows) == 0:
        return 0, (), 0
    starts = np.flatnonzero(np.append(True, rows["labeler"][1:] != rows["labeler"][:-1]))
    best = int(np.argmax(np.add.reduceat(rows["epsilon"] * rows["events"], starts)))
    levels = rows[starts[best] : np.append(starts, len(rows))[best + 1]]
    most = int(np.add.reduceat(rows["events"], starts).max())
    return len(starts), tuple(zip(levels["epsilon"].tolist(), levels["events"].tolist(), strict=True)), most


def problems(totals: LabelerTotals, events: int) -> list[str]:
    """Problems of the file of the totals, one line each. events: how many the event store holds."""
    if totals.path is None:
        return [f"the ledger states {events} events and no labeller totals"] if events else []
    lines, counted = check_rows(totals.path, TALLY, totals.bounds, totals.digest), 0
    if not lines:
        for start, end in pairwise(totals.bounds):
            counted += int(read_rows(totals.path, TALLY, start, end)["events"].sum())
        if counted != events:
            lines.append(f"{totals.path}: counts {counted} events where the event store holds {events}")
    return lines
