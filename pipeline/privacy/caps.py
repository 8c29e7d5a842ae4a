"""The most events of one person that are ever released under a key: which new events are left out, for good.

Which of a person's new events are taken is a keyed function of their names: no label enters, nobody without the key can
tell or steer it, and a later export cannot revise it, because what was left out is in the store as such.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.events import NOBODY, TAG, Generation, places
from private_rlhf.privacy.labelers import TALLY, LabelerTotals
from private_rlhf.privacy.owner_files import read_rows


def left_out(
    partitions: Iterable[tuple[int, np.ndarray]], store: Generation, totals: LabelerTotals, most: int
) -> np.ndarray:
    """The tags (m,) S16, sorted, of the events that are not to be released.

    partitions: number and rows (ENTRY) of each that a release touches. most: events of a person over the ledger's life.
    Memory: 32 bytes for each new event. UserError if a new event names no labeller.
    """
    gone, tags, labelers = [np.empty(0, TAG)], [np.empty(0, TAG)], [np.empty(0, TAG)]
    for partition, rows in partitions:
        old = store.read(partition)
        place, known = places(old, rows["tag"])
        gone.append(rows["tag"][known][old["label"][place[known]] == 0])
        tags.append(rows["tag"][~known])
        labelers.append(rows["labeler"][~known])
    new, people = np.concatenate(tags), np.concatenate(labelers)
    if nameless := int(np.count_nonzero(people == NOBODY)):
        raise UserError(
            f"{nameless} new events name no labeller, and this key releases at most {most} events of a person: name the"
            " column of labellers, and a labeller in every row"
        )
    keyed = np.ascontiguousarray(new).view(np.uint8).reshape(-1, TAG.itemsize)[:, 1:]  # the first byte is public
    order = np.lexsort((*keyed.T[::-1], people)) if len(new) else np.zeros(0, np.int64)
    person, start = np.unique(people[order], return_index=True)
    rank = np.arange(len(new)) - np.repeat(start, np.diff(np.append(start, len(new))))
    room = most - np.repeat(_events_of(person, totals), np.diff(np.append(start, len(new))))
    return np.sort(np.concatenate([*gone, new[order][rank >= room]]))


def _events_of(people: np.ndarray, totals: LabelerTotals) -> np.ndarray:
    """Number of events of each of these labellers (sorted) in the store."""
    counts = np.zeros(len(people), np.int64)
    if totals.path is None:
        return counts
    for byte in range(256):
        rows = read_rows(totals.path, TALLY, totals.bounds[byte], totals.bounds[byte + 1])
        place = np.searchsorted(people, rows["labeler"])
        inside = np.flatnonzero(place < len(people))
        inside = inside[people[place[inside]] == rows["labeler"][inside]]
        np.add.at(counts, place[inside], rows["events"][inside])
    return counts
