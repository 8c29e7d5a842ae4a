"""Privatise pairs in Spark: Parquet files with `prompt`, `chosen`, `rejected` and a `position` that numbers the rows.

    spark-submit privatize_spark.py SOURCE TARGET KEY EPSILON PARTITIONS

Every partition of TARGET holds the rows of a release in its order, and the partitions follow each other. No ledger
counts this: write it down. The true labels pass through the shuffle, so all that Spark writes or sends is encrypted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa
from pyspark.sql import SparkSession

CANONICAL = (
    "record_id string, prompt string, response_a string, response_b string, labeler string, event string,"
    " label tinyint, position bigint"
)
RELEASED = "prompt string, chosen string, rejected string, record_id string"
SECRET = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",  # what is sent
    "spark.io.encryption.enabled": "true",  # what is spilled to local disks
    "spark.eventLog.enabled": "false",
}


def canonical(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Needs no key."""
    from private_rlhf import canonicalize

    for batch in batches:
        yield from canonicalize(batch).to_batches()


def released(batches: Iterable[pa.RecordBatch], key: str, epsilon: float) -> Iterator[pa.RecordBatch]:
    """A partition has all rows of its record ids, and fits into memory."""
    from private_rlhf import release

    if rows := list(batches):
        yield from release(pa.Table.from_batches(rows), key, epsilon).to_batches()


def main(source: str, target: str, key: str, epsilon: str, partitions: str) -> None:
    """key: a path that every worker reads, such as a mounted secret (mode 0600 or 0400)."""
    builder = SparkSession.builder.appName("privatize")
    for name, value in SECRET.items():
        builder = builder.config(name, value)
    rows = builder.getOrCreate().read.parquet(source).mapInArrow(canonical, CANONICAL)
    sorted_rows = rows.repartitionByRange(int(partitions), "record_id").sortWithinPartitions("record_id")
    draws = sorted_rows.mapInArrow(partial(released, key=key, epsilon=float(epsilon)), RELEASED)
    draws.write.mode("error").parquet(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
