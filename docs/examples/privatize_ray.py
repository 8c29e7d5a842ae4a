"""Privatise pairs in Ray: Parquet files with `prompt`, `chosen`, `rejected` and a `position` that numbers the rows.

    python privatize_ray.py SOURCE TARGET KEY EPSILON PARTITIONS

The files of TARGET hold the rows of a release in its order, and follow each other. No ledger counts this: write it
down. The true labels pass through Ray's object store: use RAY_USE_TLS=1, and encrypted disks for what it spills.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import ray

DIGITS = 8
"""Of a record id in hexadecimal, which divide the rows; ids are digests, so that the parts are about equal."""


def canonical(batch: pa.Table, partitions: int) -> pa.Table:
    """Canonical rows with the number of their part; needs no key."""
    from private_rlhf import canonicalize

    rows = canonicalize(batch)
    parts = [int(name[:DIGITS], 16) * partitions >> 4 * DIGITS for name in rows["record_id"].to_pylist()]
    return rows.append_column("part", pa.array(parts, pa.int64()))


def released(group: pa.Table, target: str, key: str, epsilon: float) -> pa.Table:
    """A part has all rows of its record ids, and fits into memory; its file appears whole or not at all."""
    from private_rlhf import release

    number, rows = group["part"][0].as_py(), release(group.drop_columns("part"), key, epsilon)
    path = Path(target) / f"part-{number:05d}.parquet"
    temporary = path.with_suffix(f".{uuid4().hex}.tmp")  # of a task that Ray runs again while the first goes on
    pq.write_table(rows, temporary)
    temporary.replace(path)
    return pa.table({"rows": [len(rows)]})


def main(source: str, target: str, key: str, epsilon: str, partitions: str) -> None:
    """key: a path that every worker reads, such as a mounted secret (mode 0600 or 0400). target: a shared folder."""
    Path(target).mkdir()
    rows = ray.data.read_parquet(source).map_batches(
        partial(canonical, partitions=int(partitions)), batch_format="pyarrow"
    )
    draw = partial(released, target=str(Path(target).resolve()), key=str(Path(key).resolve()), epsilon=float(epsilon))
    print(rows.groupby("part", int(partitions)).map_groups(draw, batch_format="pyarrow").sum("rows"), "labels released")


if __name__ == "__main__":
    main(*sys.argv[1:])
