"""The largest total ε of any pair and of any person in a bundle: stated in its manifest, counted from its rows."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.compute as pc
import pyarrow.parquet as pq
from private_rlhf.core.errors import UserError
from private_rlhf.data.release import MANIFEST, Release, ReleasedPair, file_of


def most_per_record(bundle: Release) -> int:
    """The number of rows of the record that has the most; rows of one record are in one shard."""
    most = 0
    for path in sorted(bundle.directory.glob("part-*.parquet")):
        counts = pc.value_counts(pq.read_table(path, columns=["record_id"])["record_id"].combine_chunks())
        most = max(most, pc.max(counts.field("counts")).as_py() or 0)
    return most


def most_at_levels(rows: Iterable[ReleasedPair]) -> float:
    """Σ ε of the rows of the record that has the most, where each row has an ε of its own."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.record_id] = totals.get(row.record_id, 0.0) + (row.epsilon or 0.0)
    return max(totals.values(), default=0.0)


def check_totals(bundle: Release) -> float | None:
    """ε of all rows of any one record together, as counted; None where the bundle has no private labels.

    UserError where the manifest states less than the rows have: for a pair, or for a person, who gave one at least.
    """
    noise, stated = bundle.manifest.largest_noise, bundle.manifest.totals
    if noise.public:
        return None
    total = most_at_levels(bundle) if bundle.manifest.levels else most_per_record(bundle) * noise.epsilon
    if stated is None:
        return total
    events = bundle.manifest.levels["events"] if bundle.manifest.levels else [[noise.epsilon, len(bundle)]]
    largest = max((epsilon for epsilon, count in events if count), default=0.0)
    for name, least in {"record": total, "person": largest}.items():
        value = stated[name]
        if value is not None and value < least:
            raise UserError(
                f"{file_of(bundle.directory, MANIFEST)}: totals.{name} must be at least {least:g}, which its rows have,"
                f" got {value:g}: ask whoever made it for a bundle that states what it costs"
            )
    return total
