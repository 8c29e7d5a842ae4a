"""Total cost of one person's labels: the exact (ε, δ) of independent randomised responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, check_epsilon
from private_rlhf.privacy.keys import check_rows, create_file, read_rows, row_digest

CELLS = 1 << 17
NEGLIGIBLE = 1e-25  # masses below it are counted as certain disclosure rather than convolved


def person_epsilon(levels: Sequence[tuple[float, int]], delta: float) -> float:
    """The smallest e such that one person's labels, m of them at ε for each (ε, m) in `levels`, are (e, delta)-private.

    Randomised response with independent flips: of m labels at ε, k kept under Binomial(m, α) give the privacy loss
    (2k - m)ε, and losses add. delta(e) = E[max(0, 1 - exp(e - loss))] is convex and falls in e; solved by bisection
    from above. Exact for one ε. For several, losses are rounded up to a grid of 2^-16 Σ mε, which can only overstate e
    (by at most the number of levels times that). 0 < delta < 1, every m >= 1, every ε > 0; UserError otherwise.
    """
    if not levels or any(not events >= 1 or not epsilon > 0.0 for epsilon, events in levels) or not 0.0 < delta < 1.0:
        raise UserError(f"person_epsilon needs events >= 1 and 0 < delta < 1, got {levels} and {delta}; correct them")
    losses, masses, lost = _losses(levels)
    if lost >= delta:
        raise UserError(f"person_epsilon cannot resolve delta {delta}; choose a larger one")

    def spill(total: float) -> float:
        above = np.searchsorted(losses, total, side="right")
        return lost + float(np.sum(masses[above:] * -np.expm1(total - losses[above:])))

    low, high = 0.0, math.fsum(epsilon * events for epsilon, events in levels)
    if spill(low) <= delta:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if spill(middle) <= delta else (middle, high)
    return high


def _losses(levels: Sequence[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray, float]:
    """(rising losses, their masses, mass left out) of the sum over the levels."""
    if len(levels) == 1:
        ((epsilon, events),) = levels
        return (2.0 * np.arange(events + 1) - events) * epsilon, _kept_masses(epsilon, events), 0.0
    most = math.fsum(epsilon * events for epsilon, events in levels)
    cell = 2 * most / CELLS
    first, masses, lost = 0, np.ones(1), 0.0
    for epsilon, events in levels:
        kept = _kept_masses(epsilon, events)
        counts = np.flatnonzero(kept >= NEGLIGIBLE)
        lost += float(kept[kept < NEGLIGIBLE].sum())
        steps = np.ceil((2.0 * counts - events) * epsilon / cell).astype(np.int64)
        total = np.zeros(len(masses) + int(steps[-1] - steps[0]))
        for step, mass in zip(steps - steps[0], kept[counts], strict=True):
            total[step : step + len(masses)] += mass * masses
        first, masses = first + int(steps[0]), total
    return (first + np.arange(len(masses))) * cell, masses, lost


def _kept_masses(epsilon: float, events: int) -> np.ndarray:
    """(events + 1,) Binomial(events, α) masses of the number of labels kept, α = e^ε/(1+e^ε)."""
    log_keep = -math.log1p(math.exp(-epsilon))
    kept = np.arange(events + 1)
    log_factorial = np.array([math.lgamma(count + 1) for count in range(events + 1)])
    choices = log_factorial[-1] - log_factorial - log_factorial[::-1]
    return np.exp(choices + events * log_keep - (events - kept) * epsilon)


def split_budget(total: float, questions: int | None = None) -> tuple[int, float]:
    """(k, ε): how many answers of a person count, k in 1..questions, and what each costs, for the most information.

    total: E, what one person may lose by all their answers together; finite, > 0. questions: the most that anyone
    answers, >= 1; None: no limit. ε is the largest float with k·ε <= E, never above by rounding. Of two k that carry
    the same the smaller one is taken: it asks less. Source: the module's docstring, at margin 0. UserError otherwise.
    """
    total = check_epsilon(total, "the budget of a person")
    if questions is not None and questions < 1:
        raise UserError(f"a person is asked {questions} questions; it must be 1 or more")
    below = max(1, math.floor(total / best_epsilon()))
    candidates = sorted({min(count, questions or count) for count in (below, below + 1)})
    answers = max(candidates, key=lambda count: information(total, count))
    return answers, epsilon_each(total, answers)


def epsilon_each(total: float, answers: int) -> float:
    """The largest float ε with answers·ε <= total, exactly."""
    epsilon = total / answers
    return epsilon if Fraction(epsilon) * answers <= Fraction(total) else math.nextafter(epsilon, 0.0)


def information(total: float, answers: int) -> float:
    """Σ tanh²(ε/2) over the answers, at ε = total/answers each: their Fisher information at margin 0 is a quarter."""
    return answers * LabelNoise.of(total / answers).factor ** 2


def best_epsilon() -> float:
    """ε* = 2.177…, at which an answer carries most for each unit of ε: the root of sinh(ε) = 2ε, by Newton."""
    epsilon = 2.2
    for _ in range(5):
        epsilon -= (math.sinh(epsilon) - 2.0 * epsilon) / (math.cosh(epsilon) - 2.0)
    return epsilon


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
    with create_file(path) as file:
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
