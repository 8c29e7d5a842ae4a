"""The pairs of a release that another key of this user released before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.data.engine import ROWS_IN_MEMORY, LoadKey, key_loader
from private_rlhf.data.workers import Workers
from private_rlhf.privacy.batches import record_tags_under
from private_rlhf.privacy.events import Generation, as_tags, largest_total
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.ledger import Ledger, Reservation
from private_rlhf.privacy.records import bucket_bits
from private_rlhf.privacy.sorted_runs import KeptRows, partitions


def compare_keys(
    pool: Workers, source: str, rows: Sequence[KeptRows], ledger: Ledger, reservation: Reservation, remedy: str | None
) -> None:
    """Look for the records of a release under this user's other keys. remedy: of the UserError where there are some;
    None: they are charged the sum."""
    others, charges = ledger.other_keys(), {}
    for other in others:
        if other.key is None:
            if remedy is not None:
                raise UserError(
                    f"{source}: {other.path}, another key of yours, released labels and cannot be read now, so nobody"
                    f" knows whether it released these: put it and its state folder back, or {remedy}"
                )
            charges[other.key_id] = other.epsilon
            continue
        records, total = released_elsewhere(pool, rows, other.key, other.store)
        if records and remedy is not None:
            raise UserError(
                f"{source}: {records} of these pairs were released before under another key of yours, {other.path}, and"
                " this key would draw their labels a second time, at the sum of both costs; nothing is released:"
                f" {remedy}"
            )
        if records:
            charges[other.key_id] = total + other.epsilon
    reservation.add_up(others, charges)


def released_elsewhere(
    pool: Workers, parts: Sequence[KeptRows], key: PrivacyKey, store: Generation
) -> tuple[int, float]:
    """(count of the records of these rows that another key's store has as released, their largest total there)."""
    bits = bucket_bits(sum(run.rows for part in parts for run in part.runs), ROWS_IN_MEMORY)
    tasks = ((parts, bits, group, key_loader(key), store) for group in range(1 << min(bits, 8)))
    counts, totals = zip(*pool.run(released_in_group, tasks), strict=True)
    return sum(counts), max(totals)


def released_in_group(
    parts: Sequence[KeptRows], bits: int, group: int, key: LoadKey, store: Generation
) -> tuple[int, float]:
    """`released_elsewhere` for one group of partitions."""
    prf, records, total = key().prf, 0, 0.0
    for found in zip(*(partitions(part, bits, group) for part in parts), strict=True):
        old = store.read(found[0][0])
        old = old[old["label"] != 0]
        if len(old):
            tags = np.unique(as_tags(record_tags_under(prf, np.concatenate([keys for _, keys, _ in found]))))
            records += int(np.isin(tags, old["record"]).sum())
            total = max(total, largest_total(old[np.isin(old["record"], tags)]))
    return records, total
