"""The privacy ledger: what was released under one key, what it cost, and the budgets it must keep to.

A release takes four steps, each one rename of the ledger's file, under a lock from `reserve` to `commit`:

    reserve   the plan is entered: a second process waits, or is refused
    merge     the engine merges its events into the staged generation; nothing is current yet
    written   the last step before the first output byte: totals after the release are checked against the budgets, and
              events, totals and spending become current together; from here nothing frees them
    commit    the entry is marked as released

A run that dies before `written` leaves a plan, which the next `open` strikes out. One that dies after it leaves the
entry "written", which stays spent and is finished by the same plan. So a later release cannot contradict labels of
which a part may be in the world. A key without its ledger is refused until its holder says what was released under it
(`begin`, `restore`): that ε is charged on top of every event. Labels that another key of the same user released are
drawn anew and add up (`Reservation.add_up`). Not seen: keys of other users, and copies of key and state on another
machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.privacy import events
from private_rlhf.privacy.events import EventStore, StagedGeneration
from private_rlhf.privacy.keys import Lock, PrivacyKey, make_private_folder
from private_rlhf.privacy.labelers import join_tallies
from private_rlhf.privacy.ledger_facts import (
    Budget,
    ReleasePlan,
    added_by,
    check_budgets,
    check_cap,
    labeler_facts,
    new_entry,
    now,
    source_totals,
    stated_budget,
)
from private_rlhf.privacy.ledger_file import Book, LedgerFile, added_epsilon, damage
from private_rlhf.privacy.other_keys import OtherKey, missing_charge, one_at_a_time, other_keys

WAIT_SECONDS = 60.0


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

    @classmethod
    def begin(cls, key: PrivacyKey, stated: float) -> Ledger:
        """The ledger of a key that has none. stated: the sum of what was released under it before, 0 for nothing.

        UserError if there is a ledger, here or where the anchor knows it.
        """
        _check_stated(stated)
        ledger = cls(key)
        ledger._file.begin()
        ledger._state(stated)
        return ledger

    @classmethod
    def restore(cls, key: PrivacyKey, source: Path, stated: float) -> Ledger:
        """A copy of the state folder `source` in place of what is beside the key, which is kept under another name.

        stated: the sum of what was released after the copy was made, 0 for nothing. UserError if the copy is not a
        whole ledger of this key, or a release is under way.
        """
        _check_stated(stated)
        ledger = cls(key)
        lock = Lock(ledger._file.lock_path, create=False)
        try:
            with suppress(FileNotFoundError):  # lost with its folder
                _acquire(lock, 0.0)
            ledger._file.replace(source)
            ledger._state(stated)
        finally:
            lock.release()
        return ledger

    def _state(self, epsilon: float) -> None:
        """Write the book one revision after all that is known, with an entry for what its holder says was released."""
        lock = Lock(self._file.lock_path, create=False)
        _acquire(lock, WAIT_SECONDS)
        try:
            book = self._file.read(newest=False)
            book.revision = max(book.revision, self._file.known())
            if epsilon:
                entry = new_entry(ReleasePlan("stated by the holder", epsilon, 0, "", "stated"))
                book.entries.append(entry | {"status": "released", "released": entry["time"]})
            self._write(book, lock)
        finally:
            lock.release()

    def left_out(self, partitions: Iterable[tuple[int, np.ndarray]], most: int | None) -> tuple[np.ndarray, int | None]:
        """Tags (m,) S16 of the events among these that stay unreleased for good (`events.left_out`), and the cap that
        holds: the least that was stated, `most` now or another one before. UserError for a larger one."""
        book = self._file.read()
        if most is not None and book.max_events is not None and most > book.max_events:
            raise UserError(
                f"--max-events-per-person {most}: this key's ledger states {book.max_events}, which a later release may"
                " lower and not raise"
            )
        cap = book.max_events if most is None else most
        if cap is None:
            return np.empty(0, events.TAG), None
        return events.left_out(partitions, book.events, book.labelers, cap), cap

    def _recover(self) -> None:
        """Strike out dead reservations, unless a live run holds the lock or the folder cannot be written."""
        lock = Lock(self._file.lock_path, create=False)
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
        self._file.sweep()
        self.store.sweep({path for path in (book.events.path, book.labelers.path) if path is not None})
        return book

    def _write(self, book: Book, lock: Lock) -> None:
        self._file.write(book)
        lock.write_number(book.revision)

    def check(self, source: str, epsilon: float, budget: Budget | None = None) -> None:
        """The budget per event would let a release of labels pass; takes no lock and changes nothing, so that another
        release may still come first. UserError where it would not, and as `open`."""
        book = self._file.read()
        check_budgets(book, source, 0.0, budget, max(book.events.epsilon, epsilon), None)

    def reserve(self, plan: ReleasePlan, budget: Budget | None = None, wait: float = WAIT_SECONDS) -> Reservation:
        """Take the lock and enter the plan, durably.

        budget: replaces the ledger's budget of its kind from `written` on, or from `commit` on where the release is not
        the first of its kind, as the plan's cap does; the ledger's other budget holds too. wait: seconds to wait for a
        release of another process. UserError if the release would exceed a budget per event, or another release is
        still under way. A plan that was released before is `already` and costs nothing; one that was written but not
        finished is taken up again; a budget or cap that they exceed is refused all the same.
        """
        make_private_folder(self._file.folder)
        make_private_folder(self.store.folder)
        lock = Lock(self._file.lock_path, create=False)
        _acquire(lock, wait)
        try:
            book = self._clean(self._file.read(), lock)
            entry = next((entry for entry in book.entries if entry["identity"] == plan.identity), None)
            if entry is None:
                entry = new_entry(plan)
                labels = max(book.events.epsilon, plan.epsilon) if plan.kind == "labels" else book.events.epsilon
                check_budgets(book, plan.source, added_by(entry), budget, labels, None)
                book.entries.append(entry)
                book.serial += 1
                self._write(book, lock)
            else:
                if budget is not None:
                    check_budgets(book, plan.source, 0.0, budget, book.events.epsilon, book.labelers)
                check_cap(book, plan.source, plan.max_events)
            return Reservation(self, lock, book, entry, budget, plan.max_events)
        except BaseException:
            lock.release()
            raise

    @property
    def folds_names(self) -> bool:
        """Labellers are told apart by folded names: unless earlier releases told them apart by exact ones."""
        book = self._file.read()
        return book.folded or not book.labelers.labelers

    def other_keys(self) -> list[OtherKey]:
        """The other keys of this user that released labels."""
        return other_keys(self._file.key_id)

    def show(self) -> dict[str, Any]:
        """Everything the ledger states about releases and totals, as JSON types; no tags, no labels."""
        book = self._file.read()
        spent = [entry for entry in book.entries if entry["status"] != "reserved"]
        try:
            people = labeler_facts(book.labelers, added_epsilon(spent))
        except UserError:  # a release that has ended meanwhile swept that file
            if self._file.read().revision == book.revision:
                raise
            return self.show()
        return {
            "key": self._file.key_id,
            "epsilon_total": book.events.epsilon + added_epsilon(spent),
            "delta_total": math.fsum(entry.get("delta", 0.0) for entry in spent),  # of noisy sums, no longer drawn
            "epsilon_of_counts": added_epsilon(spent, ("counts",)),
            "epsilon_stated": added_epsilon(spent, ("stated",)),
            "events": book.events.events,
            "events_left_out": book.events.left_out,
            "events_before_spellings": book.events.unknown_letters,
            "max_events_per_person": book.max_events,
            "names_folded": book.folded,
            "releases": [{name: value for name, value in e.items() if name != "identity"} for e in book.entries],
            "sources": source_totals(spent),
            "labelers": people,
            "budgets": {kind: stated_budget(book, kind, None) for kind in ("event", "person")},
        }

    def card_facts(self) -> dict[str, Any]:
        """Facts of the ledger for the privacy card: `show` without the key's id and the owner's paths."""
        facts = self.show()
        del facts["key"], facts["names_folded"]
        hidden = ("output", "released", "other")
        facts["releases"] = [
            {name: value for name, value in entry.items() if name not in hidden}
            for entry in facts["releases"]
            if entry["status"] != "reserved"
        ]
        return facts

    def verify(self, wait: float = WAIT_SECONDS) -> list[str]:
        """Problems of the ledger, its data files and their modes, one line each; reads everything.

        UserError if a release is still under way after `wait` seconds.
        """
        folder, lock = self._file.folder, Lock(self._file.lock_path, create=False)
        with suppress(OSError):  # a copy that cannot be written has no release under way
            _acquire(lock, wait)
        try:
            lines = damage(self._file.read())
        except UserError as error:
            lines = [str(error)]
        finally:
            lock.release()
        present = (path for path in (folder, *sorted(folder.rglob("*"))) if path.exists())
        reached = [path for path in present if path.stat().st_mode & 0o077]
        return lines + [f"{path}: can be reached by others; run `chmod go-rwx {path}`" for path in reached]


class Reservation:
    """A release in the making; holds the ledger's lock. Use as a context manager: leaving it without `commit` abandons.

    generation: what the engine merges its events into. already: these bits were released before.
    """

    def __init__(
        self,
        ledger: Ledger,
        lock: Lock,
        book: Book,
        entry: dict[str, Any],
        budget: Budget | None,
        max_events: int | None,
    ) -> None:
        self._ledger, self._lock, self._book, self._entry, self._budget = ledger, lock, book, entry, budget
        self._max_events = book.max_events if max_events is None else max_events
        self._others: list[OtherKey] | None = None  # as they were when the records were compared
        self._charges: list[dict[str, Any]] = []
        self.already: bool = entry["status"] == "released"
        self.generation = StagedGeneration(book.events, ledger.store.folder / f"{book.serial:06d}.staged")

    @property
    def resumed(self) -> bool:
        """These bits were written before, so that they cost nothing more."""
        return self._entry["status"] != "reserved"

    def add_up(self, others: list[OtherKey], charges: Mapping[str, float]) -> None:
        """From `written` on the ledger charges also what other keys released of the same records.

        others: the user's other keys as they were compared. charges: by their ids, the largest total of such a record.
        """
        self._others = others
        for key_id, epsilon in charges.items():
            if missing := missing_charge(self._book.entries, key_id, epsilon):
                entry = new_entry(ReleasePlan("another key of this user", missing, 0, "", "stated"))
                self._charges.append(entry | {"status": "released", "released": entry["time"], "other": key_id})

    def written(self) -> None:
        """The first output byte is about to be written: from here the budget stays spent, whatever happens.

        Durable when it returns; a second call does nothing. UserError, with nothing spent, if the totals after the
        release would exceed a budget or labels contradict the store.
        """
        if self._entry["status"] != "reserved":
            return
        if not self._lock.held:
            raise RuntimeError("this reservation has ended")
        with one_at_a_time(WAIT_SECONDS):
            self._write_totals()

    def _write_totals(self) -> None:
        """Check the totals after the release, and make them current."""
        if self._others is not None and [each.state for each in self._others] != [
            each.state for each in self._ledger.other_keys()
        ]:
            raise UserError(f"{self._entry['source']}: another key of yours released labels meanwhile; run again")
        book, store = self._book, self._ledger.store
        joined = store.join(self.generation, book.serial)
        tallies = list(self.generation.pieces("tally").values())
        totals = join_tallies(book.labelers, tallies, store.folder / f"{book.serial:06d}.labelers")
        entry = self._entry
        added = added_by(entry) + sum(charge["epsilon"] for charge in self._charges)
        check_budgets(book, entry["source"], added, self._budget, joined.epsilon, totals)
        cap = self._max_events
        if cap is not None and totals.most > max(cap, book.labelers.most):
            raise UserError(f"{entry['source']}: another release under this key was made meanwhile; run again")
        folded = book.folded or totals.labelers > 0 == book.labelers.labelers
        stated = {"budgets": self._budgets(), "max_events": cap, "folded": folded}
        self._advance({"status": "written"}, events=joined, labelers=totals, **stated)

    def _budgets(self) -> list[dict[str, Any]]:
        """The budgets stated so far, with the one of this release if it is another."""
        book, budget = self._book, self._budget
        if budget is None or stated_budget(book, budget.per, None) == budget.epsilon:
            return book.budgets
        return [*book.budgets, {"per": budget.per, "epsilon": float(budget.epsilon), "time": now()}]

    def _advance(self, news: dict[str, Any], **changes: Any) -> None:
        """Write the book with the entry and other parts changed; nothing changes here if that fails."""
        entry = self._entry | news
        entries = [entry if other is self._entry else other for other in self._book.entries]
        book = replace(self._book, entries=[*entries, *self._charges], **changes)
        self._ledger._write(book, self._lock)
        self._book, self._entry, self._charges = book, entry, []

    def commit(self, output: Path | None = None) -> None:
        """The release is complete in `output`: finish the entry, durably, and let go of the lock."""
        self.written()
        if self._entry["status"] == "written":
            self._advance({"status": "released", "output": None if output is None else str(output), "released": now()})
        stated = {"budgets": self._budgets(), "max_events": self._max_events}
        if any(getattr(self._book, name) != value for name, value in stated.items()):
            self._advance({}, **stated)
        self._end()

    def _end(self) -> None:
        """Let go of the lock; the plan is struck out, at no cost, unless `written` was reached.

        The book in memory is the last one whose writing is known to have succeeded: a failure in the middle of
        `written` is undone by writing it again, one revision later, without the plan.
        """
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
            self._end()


def _check_stated(stated: float) -> None:
    """Before anything is begun: a state without what was released before it would count as a new key's."""
    if not 0.0 <= stated < math.inf:
        raise UserError(f"--i-know must be a finite number of at least 0, got {stated:g}: say 0 for no release")


def _acquire(lock: Lock, seconds: float) -> None:
    if not lock.acquire(seconds):
        raise UserError(f"{lock.path}: another release under this key is under way; run again when it has ended")
