"""The events of a release that is small enough for memory, as its ledger entry needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pipeline.core.errors import UserError
from pipeline.privacy.events import TAG_BYTES, EventStore, StagedGeneration
from pipeline.privacy.keys import PrivacyKey
from pipeline.privacy.ledger import Ledger, ReleasePlan
from pipeline.privacy.mechanism import DOMAIN
from pipeline.privacy.prf import Prf, frame
from pipeline.privacy.records import PreferenceRecord, event_bytes


@dataclass
class EventLog:
    """True labels by event, for the owner's store alone: never written into a run directory.

    by_record: record id -> (the event's name in the store, 16 bytes; its label). The first label of a record stays.
    """

    by_record: dict[str, tuple[bytes, int]] = field(default_factory=dict, repr=False)

    def add(self, prf: Prf, record: PreferenceRecord) -> None:
        """Notes a record's event (without labeller and event id)."""
        if record.record_id not in self.by_record:
            root = prf.block(DOMAIN, event_bytes(record.record_id))
            tag = bytes.fromhex(record.record_id[:2]) + root[32 : 31 + TAG_BYTES]
            self.by_record[record.record_id] = (tag, record.label)

    def only(self, record_ids: Collection[str]) -> list[tuple[bytes, int]]:
        """(tag, label) of the records that are released, in the order of their tags."""
        return sorted(self.by_record[record_id] for record_id in record_ids if record_id in self.by_record)


@contextmanager
def spent(key: PrivacyKey, source: str, epsilon: float, events: list[tuple[bytes, int]]) -> Iterator[Ledger]:
    """The ledger, with the release entered and its budget spent; the entry is finished when the block ends well.

    key: of a key file. events: sorted (tag, label), see `EventLog.only`.

    Raises:
        UserError: labels that contradict what was released before under this key, or a budget that would be exceeded;
            nothing is spent then.
    """
    ledger = Ledger.open(key)
    content = b"".join(tag + (b"+" if label > 0 else b"-") for tag, label in events)
    identity = key.keyed_digest(map(frame, (b"stage", source.encode(), repr(epsilon).encode(), content)))
    with ledger.reserve(ReleasePlan(source, epsilon, len(events), identity)) as reservation:
        if not reservation.already:
            conflicts = enter(ledger.store, epsilon, events, reservation.generation)
            if conflicts:
                raise UserError(
                    f"{source}: {conflicts} events carry another label than the one released before under the key"
                    f" {key.path}, so nothing is released: give these labels a key of their own (privatize.key_file)"
                )
            reservation.written()
        yield ledger
        reservation.commit()


def enter(store: EventStore, epsilon: float, events: list[tuple[bytes, int]], into: StagedGeneration) -> int:
    """Enters sorted events into the store's next generation; returns how many contradict their stored label."""
    tags = np.frombuffer(b"".join(tag for tag, _ in events), np.uint8).reshape(-1, TAG_BYTES)
    labels = np.array([label for _, label in events], np.int8)
    conflicts = 0
    for partition in np.unique(tags[:, 0]):
        mine = tags[:, 0] == partition
        conflicts += store.merge(int(partition), tags[mine], labels[mine], None, epsilon, into=into).conflicts
    return conflicts
