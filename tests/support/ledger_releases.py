"""Releases for tests of the ledger and the event store, without an engine: events are rows given by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.events import ENTRY, MergeResult, StagedGeneration
from private_rlhf.privacy.ledger import Budget, Ledger, ReleasePlan


class Event(NamedTuple):
    """tag, labeler: 16 bytes each, labeler all zero for none. label in {-1, +1}."""

    tag: bytes
    label: int = 1
    labeler: bytes = bytes(16)


def entries(tags: np.ndarray, labels: np.ndarray, labelers: np.ndarray | None = None) -> np.ndarray:
    """(n,) ENTRY of tags (n,) S16, labels (n,) int8 and labellers as tags; each event is its record's only one."""
    rows = np.zeros(len(tags), ENTRY)
    rows["tag"] = rows["record"] = tags
    rows["label"], rows["blind"] = labels, 1
    if labelers is not None:
        rows["labeler"] = labelers
    return rows


def events_of(person: str, count: int, start: int = 0) -> list[Event]:
    """Events of one labeller, spread over the partitions, with coin labels."""
    tags = [hashlib.md5(f"{person}/{number}".encode()).digest() for number in range(start, start + count)]
    labeler = hashlib.md5(person.encode()).digest() if person else bytes(16)
    return [Event(tag, 1 - 2 * (tag[15] & 1), labeler) for tag in tags]


def plan(events: Sequence[Event], epsilon: float, source: str = "s") -> ReleasePlan:
    """A plan whose identity depends on the events as a set, and on epsilon."""
    content = b"".join(event.tag + bytes([event.label + 1]) + event.labeler for event in sorted(events))
    return ReleasePlan(source, epsilon, len(events), hashlib.sha256(content + repr(epsilon).encode()).hexdigest())


def merge(ledger: Ledger, events: Sequence[Event], epsilon: float, into: StagedGeneration) -> list[MergeResult]:
    """Merges partition by partition."""
    results = []
    rows = sorted(events)
    for partition in sorted({event.tag[0] for event in rows}):
        own = [event for event in rows if event.tag[0] == partition]
        tags = np.array([event.tag for event in own], "S16")
        labels = np.array([event.label for event in own], np.int8)
        labelers = np.array([event.labeler for event in own], "S16")
        results.append(ledger.store.merge(partition, entries(tags, labels, labelers), epsilon, into=into))
    return results


def release(
    ledger: Ledger,
    events: Sequence[Event],
    epsilon: float,
    budget: Budget | None = None,
    source: str = "s",
    output: Path | None = None,
    wait: float = 60.0,
) -> bool:
    """A whole release, as the engine makes it; whether it was released before. `output` is written where given."""
    with ledger.reserve(plan(events, epsilon, source), budget, wait) as reservation:
        conflicts = sum(result.conflicts for result in merge(ledger, events, epsilon, reservation.generation))
        if conflicts:
            raise UserError(f"{conflicts} labels differ from those released before")
        reservation.written()
        if output is not None:
            output.write_text("z")
        reservation.commit(output)
    return reservation.already
