"""Facts that a ledger states: totals, sources, labellers and budgets, computed from its book."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import check_epsilon
from private_rlhf.privacy.labelers import LabelerTotals
from private_rlhf.privacy.ledger_file import Book, Kind, added_epsilon
from private_rlhf.privacy.person import DELTA, largest_person_epsilon

Per = Literal["event", "person"]
ROUNDING = 1 + 1e-12
"""Three labels at 0.1 cost 0.3, whatever the product of floats says."""


@dataclass(frozen=True)
class Budget:
    """The most that any one event, or any one person (sum over their events), may lose to all releases of this key."""

    epsilon: float
    per: Per

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon, "--budget")
        if self.per not in ("event", "person"):
            raise UserError(f"--budget-per {self.per}: must be event or person")


@dataclass(frozen=True)
class ReleasePlan:
    """A release before it is made.

    identity: keyed digest of (key, canonical content with labels in any order, ε, columns): equal for a re-run that
    gives the same bits. kind: `labels` go through the chain of `mechanism`, and an event's cost is the largest ε;
    `counts` (`privacy.counts`) come on top, for every event of the key (an upper bound: which events they looked at is
    not kept), and so does what the holder `stated`. max_events: of one person, the cap that was kept to. levels: (ε,
    number of events) where each event has an ε of its own, of which epsilon is the largest. UserError unless epsilon is
    finite and > 0 and events >= 0.
    """

    source: str
    epsilon: float
    events: int
    identity: str
    kind: Kind = "labels"
    max_events: int | None = None
    levels: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if self.events < 0:
            raise UserError(f"a release has {self.events} events; it must have 0 or more")


def added_by(entry: dict[str, Any]) -> float:
    """The ε that the entry of a count adds to the labels' total."""
    return float(entry["epsilon"]) if entry.get("kind") == "counts" else 0.0


def new_entry(plan: ReleasePlan) -> dict[str, Any]:
    """The plan as an entry of the book, reserved."""
    return {
        "source": plan.source,
        "events": plan.events,
        "epsilon": float(plan.epsilon),
        "status": "reserved",
        "time": now(),
        "output": None,
        "identity": plan.identity,
        **({"kind": plan.kind} if plan.kind != "labels" else {}),
        **({"levels": [list(level) for level in plan.levels]} if plan.levels else {}),
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stated_budget(book: Book, per: str, budget: Budget | None) -> float | None:
    """The budget of a kind that holds: the one given now, or the last one stated."""
    if budget is not None and budget.per == per:
        return budget.epsilon
    return next((float(entry["epsilon"]) for entry in reversed(book.budgets) if entry["per"] == per), None)


def source_totals(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Per source: its releases, and the largest ε of them with that of noisy counts. Of a record that was corrected the
    draws add up, here or in another source: the ledger's total counts that."""
    totals: dict[str, Any] = {}
    for entry in entries:
        total = totals.setdefault(entry["source"], {"releases": 0, "largest_epsilon": 0.0})
        total["releases"] += 1
        if entry.get("kind", "labels") == "labels" and entry["events"]:
            total["largest_epsilon"] = max(total["largest_epsilon"], entry["epsilon"])
    for source, total in totals.items():
        total["largest_epsilon"] += added_epsilon([entry for entry in entries if entry["source"] == source])
    return totals


def labeler_facts(totals: LabelerTotals, counts: float) -> dict[str, Any]:
    """About the labellers, null without them; `busiest` is the one with the largest total, whom another may exceed at
    `delta` and in events. counts: ε of all noisy counts, which each of a person's m events may have entered: m times
    that at every δ (the count of a rule moves by m), on top of what the labels cost."""
    known, largest = totals.labelers > 0, largest_person_epsilon(totals.everyone(), DELTA)
    return {
        "count": totals.labelers,
        "unattributed_events": totals.unattributed,
        "busiest": [{"epsilon": epsilon, "events": count} for epsilon, count in totals.busiest],
        "max_epsilon": totals.with_counts(counts) if known else None,
        "max_epsilon_at_delta": largest + counts * totals.most if known else None,
        "most_events": totals.most if known else None,
        "epsilon_of_counts": counts * totals.most if known else None,
        "delta": DELTA,
    }


def check_budgets(
    book: Book,
    source: str,
    epsilon_of_counts: float,
    budget: Budget | None,
    event_total: float,
    totals: LabelerTotals | None,
) -> None:
    """UserError if totals after the release exceed a budget, given now or stated before. event_total: of labels.
    epsilon_of_counts: that the release adds. totals: None = not known."""
    before = added_epsilon(book.entries)
    added = before + epsilon_of_counts
    limit = stated_budget(book, "event", budget)
    if limit is not None and event_total + added > limit * ROUNDING:
        raise _over(source, "event", "record", book.events.epsilon + before, event_total + added, limit)
    limit = stated_budget(book, "person", budget)
    if limit is None or totals is None:
        return
    if totals.unattributed:
        raise UserError(
            f"{source}: a budget per person needs the labeller of every event, and {totals.unattributed} events"
            " under this key would have none; name the column with --labeler-column, or use another key for this source"
        )
    if totals.with_counts(added) > limit * ROUNDING:
        raise _over(source, "person", "labeller", book.labelers.with_counts(before), totals.with_counts(added), limit)


def check_cap(book: Book, source: str, cap: int | None) -> None:
    """UserError for a cap on a person's events, stated with a release that was made before, that does not hold."""
    if cap is None or cap == book.max_events:
        return
    if book.labelers.unattributed:
        raise UserError(
            f"{source}: a cap on the events of a person needs the labeller of every event, and"
            f" {book.labelers.unattributed} events under this key have none; leave --max-events-per-person out"
        )
    if book.labelers.most > cap:
        raise UserError(
            f"{source}: --max-events-per-person must be {book.labelers.most} or more, got {cap}: so many events of one"
            " person were released under this key"
        )


def _over(source: str, per: str, whose: str, before: float, after: float, limit: float) -> UserError:
    kept = before <= limit * ROUNDING
    remedy = "lower --epsilon" if kept else "use another key for data that this key never released"
    return UserError(
        f"{source}: refused, over the budget of {limit:g} per {per}: the largest total of any one {whose} under"
        f" this key is {before:g} and this release would make it {after:g}; {remedy}, or state a larger --budget if"
        " those who gave the labels agree"
    )
