"""The privacy ledger: what was released under one key, what it cost, and the budgets it must keep to.

A release takes four steps, each one rename of the ledger's file:

    reserve   the lock is taken, the plan is entered: a second process waits, or is refused
    merge     the engine merges its events into the staged generation; nothing is current yet
    written   the last step before the first output byte: totals after the release are checked against the budgets, and
              events, totals and spending become current together; from here nothing frees them
    commit    the entry is marked as released

A run that dies before `written` leaves nothing but a plan, which the next `open` strikes out. One that dies after it
leaves the entry "written", which stays spent; the same plan run again finishes that entry. The events of an unfinished
release are in the store, so that a later release cannot contradict labels of which a part may be in the world.

The lock is held from `reserve` to `commit`: two releases of one key never overlap, so no total is ever checked against
a past state.

What it cannot see: releases under other keys (a new key for old data starts from zero: independent flips on the same
labels add up), and what a copied key released from a copy of this folder. In the second case the released bits are
the same function of event, label and ε, so an event still costs the largest ε of all copies, but each ledger knows of
its own releases alone. Events are told apart as the engine names them: one person under two labeller names is two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pipeline.core.atomic import sweep_temporaries, write_json
from pipeline.core.errors import UserError
from pipeline.core.noise import check_epsilon
from pipeline.privacy import events, labelers
from pipeline.privacy.events import EventStore, StagedGeneration
from pipeline.privacy.keys import PrivacyKey, make_private_folder
from pipeline.privacy.labelers import LabelerTotals, join_tallies
from pipeline.privacy.ledger_file import Book, LedgerFile
from pipeline.privacy.owner_files import Lock
from pipeline.privacy.person import person_epsilon

WAIT_SECONDS = 60.0
DELTA = 1e-6
Per = Literal["event", "person"]
Kind = Literal["labels", "counts"]


@dataclass(frozen=True)
class ReleasePlan:
    """What is to be released. identity: keyed digest of (key, canonical content with labels in any order, ε, columns):
    equal for a re-run that gives the same bits. kind: `labels` go through the chain of `mechanism`, and an event's cost
    is the largest ε; `counts` (`privacy.counts`) come on top, for every event of the key (an upper bound: which events
    a count looked at is not kept). UserError unless epsilon is finite and > 0 and events >= 0."""

    source: str
    epsilon: float
    events: int
    identity: str
    kind: Kind = "labels"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if self.events < 0:
            raise UserError(f"a release has {self.events} events; it must have 0 or more")


@dataclass(frozen=True)
class Budget:
    """The most that any one event, or any one person (sum over their events), may lose to all releases of this key."""

    epsilon: float
    per: Per

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon, "--budget")
        if self.per not in ("event", "person"):
            raise UserError(f"--budget-per {self.per}: must be event or person")


class Ledger:
    """The ledger of one key; `open` makes one."""

    def __init__(self, key: PrivacyKey) -> None:
        self._file = LedgerFile(key)
        self.store = EventStore(self._file.folder)

    @classmethod
    def open(cls, key: PrivacyKey) -> Ledger:
        """The ledger beside the key; what a dead run reserved and did not write is freed.

        UserError if the ledger is missing, damaged, older than what was recorded, or belongs to another key, and for a
        key without a file.
        """
        ledger = cls(key)
        ledger._file.read()
        ledger._recover()
        return ledger

    def _recover(self) -> None:
        """Strike out dead reservations, unless a live run holds the lock or the folder cannot be written."""
        lock = Lock(self._file.lock_path)
        try:
            if self._file.path.exists() and lock.acquire(0.0):
                self._clean(self._file.read(), lock)
        except OSError:
            return  # a folder that can be read but not written, or a full disk: the next `open` recovers
        finally:
            lock.release()

    def _clean(self, book: Book, lock: Lock) -> Book:
        """Under the lock: strikes out plans that were not written and removes files that the book does not name."""
        if any(entry["status"] == "reserved" for entry in book.entries):
            book = replace(book, entries=[entry for entry in book.entries if entry["status"] != "reserved"])
            self._write(book, lock)
        sweep_temporaries(self._file.folder)
        self.store.sweep({path for path in (book.events.path, book.labelers.path) if path is not None})
        return book

    def _write(self, book: Book, lock: Lock) -> None:
        self._file.write(book)
        lock.write_number(book.revision)

    def reserve(self, plan: ReleasePlan, budget: Budget | None = None, wait: float = WAIT_SECONDS) -> Reservation:
        """Take the lock and enter the plan, durably.

        budget: replaces the ledger's budget of its kind from `written` on; the ledger's other budget holds too. wait:
        seconds to wait for a release of another process. UserError if the release would exceed a budget per event, or
        another release is still under way. A plan that was released before is `already` and costs nothing; one that
        was written but not finished is taken up again.
        """
        make_private_folder(self._file.folder)
        make_private_folder(self.store.folder)
        lock = Lock(self._file.lock_path)
        if not lock.acquire(wait):
            raise _busy(lock)
        try:
            book = self._clean(self._file.read(), lock)
            entry = next((entry for entry in book.entries if entry["identity"] == plan.identity), None)
            if entry is None:
                labels = max(book.events.epsilon, plan.epsilon) if plan.kind == "labels" else book.events.epsilon
                _check_budgets(book, plan, budget, labels, None)
                entry = _new_entry(plan)
                book.entries.append(entry)
                book.serial += 1
                self._write(book, lock)
            return Reservation(self, lock, book, entry, budget)
        except BaseException:
            lock.release()
            raise

    def show(self) -> dict[str, Any]:
        """Everything the ledger states about releases and totals, as JSON types; no tags, no labels."""
        book = self._file.read()
        spent = [entry for entry in book.entries if entry["status"] != "reserved"]
        return {
            "key": self._file.key_id,
            "epsilon_total": book.events.epsilon + _counts_epsilon(spent),
            "epsilon_of_counts": _counts_epsilon(spent),
            "events": book.events.rows,
            "releases": [{name: value for name, value in e.items() if name != "identity"} for e in book.entries],
            "sources": _source_totals(spent),
            "labelers": _labeler_facts(book.labelers, _counts_epsilon(spent)),
            "budgets": {kind: _stated(book, kind, None) for kind in ("event", "person")},
        }

    def card_facts(self) -> dict[str, Any]:
        """What the privacy card states of the ledger: `show` without the key's id and the owner's paths."""
        facts = self.show()
        del facts["key"]
        hidden = ("output", "released")
        facts["releases"] = [
            {name: value for name, value in entry.items() if name not in hidden}
            for entry in facts["releases"]
            if entry["status"] != "reserved"
        ]
        return facts

    def verify(self, wait: float = WAIT_SECONDS) -> list[str]:
        """What is wrong with the ledger, its data files and their modes, one line each; reads everything.

        UserError if a release is still under way after `wait` seconds.
        """
        folder, lock = self._file.folder, Lock(self._file.lock_path)
        if not folder.exists():
            return []
        try:
            if not lock.acquire(wait):
                raise _busy(lock)
        except OSError:
            pass  # a copy that cannot be written has no release under way
        try:
            book = self._file.read()
            found = [*events.problems(book.events), *labelers.problems(book.labelers, book.events.rows)]
        except UserError as error:
            found = [str(error)]
        finally:
            lock.release()
        reached = [path for path in (folder, *sorted(folder.rglob("*"))) if path.stat().st_mode & 0o077]
        return found + [f"{path}: can be reached by others; run `chmod go-rwx {path}`" for path in reached]

    def export(self, path: Path) -> None:
        """Write `show` to an owner-only JSON file."""
        write_json(path, self.show(), mode=0o600)


class Reservation:
    """A release in the making; holds the ledger's lock. Use as a context manager: leaving it without `commit` abandons.

    generation: what the engine merges its events into. already: these bits were released before.
    """

    def __init__(self, ledger: Ledger, lock: Lock, book: Book, entry: dict[str, Any], budget: Budget | None) -> None:
        self._ledger, self._lock, self._book, self._entry, self._budget = ledger, lock, book, entry, budget
        self.already: bool = entry["status"] == "released"
        self.generation = StagedGeneration(book.events, ledger.store.folder / f"{book.serial:06d}.staged")

    def written(self) -> None:
        """The first output byte is about to be written: from here the budget stays spent, whatever happens.

        Durable when it returns; a second call does nothing. UserError, with nothing spent, if the totals after the
        release would exceed a budget or labels contradict the store.
        """
        if self._entry["status"] != "reserved":
            return
        if not self._lock.held:
            raise RuntimeError("this reservation has ended")
        book, store = self._book, self._ledger.store
        joined = store.join(self.generation, book.serial)
        tallies = list(self.generation.pieces("tally").values())
        totals = join_tallies(book.labelers, tallies, store.folder / f"{book.serial:06d}.labelers")
        entry = self._entry
        plan = ReleasePlan(entry["source"], entry["epsilon"], entry["events"], entry["identity"], _kind_of(entry))
        _check_budgets(book, plan, self._budget, joined.epsilon, totals)
        budgets = list(book.budgets)
        if self._budget is not None and _stated(book, self._budget.per, None) != self._budget.epsilon:
            budgets.append({"per": self._budget.per, "epsilon": float(self._budget.epsilon), "time": _now()})
        self._advance({"status": "written"}, events=joined, labelers=totals, budgets=budgets)

    def _advance(self, news: dict[str, Any], **changes: Any) -> None:
        """Write the book with the entry and other parts changed; nothing changes here if that fails."""
        entry = self._entry | news
        entries = [entry if other is self._entry else other for other in self._book.entries]
        book = replace(self._book, entries=entries, **changes)
        self._ledger._write(book, self._lock)
        self._book, self._entry = book, entry

    def commit(self, output: Path | None = None) -> None:
        """The release is complete in `output`: finish the entry, durably, and let go of the lock."""
        self.written()
        if self._entry["status"] == "written":
            self._advance({"status": "released", "output": None if output is None else str(output), "released": _now()})
        self._end()

    def abandon(self) -> None:
        """Let go of the lock; the plan is struck out, at no cost, unless `written` was reached."""
        self._end()

    def _end(self) -> None:
        """The book in memory is the last one whose writing is known to have succeeded: a failure in the middle of
        `written` is undone by writing it again, one revision later, without the plan."""
        try:
            book = replace(self._book, revision=self._book.revision + 1)
            self._ledger._clean(book, self._lock)
        except OSError:
            pass  # a full disk or the like: the next `open` cleans up
        finally:
            self._lock.release()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock.held:
            self.abandon()


def _check_budgets(
    book: Book, plan: ReleasePlan, budget: Budget | None, event_total: float, totals: LabelerTotals | None
) -> None:
    """UserError if totals after the release exceed a budget, given now or stated before. event_total: of labels.
    totals: None = not known."""
    before = _counts_epsilon([entry for entry in book.entries if entry["status"] != "reserved"])
    added = before + (plan.epsilon if plan.kind == "counts" else 0.0)
    limit = _stated(book, "event", budget)
    if limit is not None and event_total + added > limit:
        raise _over(plan, "event", "record", book.events.epsilon + before, event_total + added, limit)
    limit = _stated(book, "person", budget)
    if limit is None or totals is None:
        return
    if totals.unattributed:
        raise UserError(
            f"{plan.source}: a budget per person needs the labeller of every event, and {totals.unattributed} events"
            " under this key would have none; name the column with --labeler-column, or use another key for this source"
        )
    if totals.with_counts(added) > limit:
        raise _over(plan, "person", "labeller", book.labelers.with_counts(before), totals.with_counts(added), limit)


def _over(plan: ReleasePlan, per: str, whose: str, before: float, after: float, limit: float) -> UserError:
    remedy = "lower --epsilon" if before <= limit else "use another key for data that this key never released"
    return UserError(
        f"{plan.source}: refused, over the budget of {limit:g} per {per}: the largest total of any one {whose} under"
        f" this key is {before:g} and this release would make it {after:g}; {remedy}, or state a larger --budget if"
        " those who gave the labels agree"
    )


def _stated(book: Book, per: str, budget: Budget | None) -> float | None:
    """The budget of a kind that holds: the one given now, else the last one stated."""
    if budget is not None and budget.per == per:
        return budget.epsilon
    return next((float(entry["epsilon"]) for entry in reversed(book.budgets) if entry["per"] == per), None)


def _busy(lock: Lock) -> UserError:
    return UserError(f"{lock.path}: another release under this key is under way; run again when it has ended")


def _new_entry(plan: ReleasePlan) -> dict[str, Any]:
    return {
        "source": plan.source,
        "events": plan.events,
        "epsilon": float(plan.epsilon),
        "status": "reserved",
        "time": _now(),
        "output": None,
        "identity": plan.identity,
        **({"kind": plan.kind} if plan.kind != "labels" else {}),
    }


def _kind_of(entry: dict[str, Any]) -> Kind:
    return "counts" if entry.get("kind") == "counts" else "labels"


def _counts_epsilon(entries: list[dict[str, Any]]) -> float:
    """What all counts together cost any event that they looked at."""
    return math.fsum(entry["epsilon"] for entry in entries if _kind_of(entry) == "counts")


def _source_totals(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Per source: its releases, and the largest total that its releases alone gave any record of it."""
    totals: dict[str, Any] = {}
    for entry in entries:
        total = totals.setdefault(entry["source"], {"releases": 0, "epsilon_total": 0.0})
        total["releases"] += 1
        if _kind_of(entry) == "labels" and entry["events"]:
            total["epsilon_total"] = max(total["epsilon_total"], entry["epsilon"])
    for source, total in totals.items():
        total["epsilon_total"] += _counts_epsilon([entry for entry in entries if entry["source"] == source])
    return totals


def _labeler_facts(totals: LabelerTotals, counts: float) -> dict[str, Any]:
    """About the labellers; those of the busiest (the one with the largest total) are null without labellers. counts: ε
    of all noisy counts, which each of a person's m events may have entered: m times that at every δ (the count of a
    rule moves by m), on top of what the labels cost."""
    known = totals.labelers > 0
    return {
        "count": totals.labelers,
        "unattributed_events": totals.unattributed,
        "busiest": [{"epsilon": epsilon, "events": count} for epsilon, count in totals.busiest],
        "max_epsilon": totals.with_counts(counts) if known else None,
        "max_epsilon_at_delta": person_epsilon(totals.busiest, DELTA) + counts * totals.most if known else None,
        "epsilon_of_counts": counts * totals.most if known else None,
        "delta": DELTA,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
