"""The plain way to a release, row by row in memory: what the engine is compared with, and bundles for other tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from private_rlhf.core.atomic import write_json
from private_rlhf.data.container import ROWS_PER_GROUP, write_shard
from private_rlhf.data.release import MANIFEST, SIGNATURE, ReleaseManifest, release_schema, shard_name
from private_rlhf.privacy.guarantee import DropCounts, guarantee, nothing_left
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.mechanism import Mechanism, PublicLabels
from private_rlhf.privacy.records import RawPair, Text, canonical_record, event_bytes, is_blank
from private_rlhf.privacy.signatures import file_digest, sign


class PrivateRecord(NamedTuple):
    """A pair in canonical order with the released label z: +1 if it prefers response_a."""

    record_id: str
    prompt: Text
    response_a: Text
    response_b: Text
    private_label: int


def privatize_records(
    pairs: Iterable[RawPair], mechanism: Mechanism, key: PrivacyKey | None, source: str = "the input"
) -> tuple[list[PrivateRecord], DropCounts]:
    """Canonicalise, drop, keep the first of each unordered pair, randomise; records come back in `record_id` order."""
    counts, kept = DropCounts(), {}
    for prompt, chosen, rejected, _ in pairs:
        record = canonical_record(prompt, chosen, rejected)
        if record is None:
            counts.identical += 1
        elif is_blank(prompt) or is_blank(chosen) or is_blank(rejected):
            counts.empty += 1
        elif record.record_id in kept:
            counts.duplicates += 1
        else:
            z = record.label
            if not isinstance(mechanism, PublicLabels):
                assert key is not None
                z = mechanism.release(key.prf, event_bytes(record.record_id), record.label)
            kept[record.record_id] = PrivateRecord(*record[:4], z)
    if not kept:
        raise nothing_left(source, counts)
    return [kept[record_id] for record_id in sorted(kept)], counts


def manifest_of(
    records: Sequence[PrivateRecord],
    counts: DropCounts,
    mechanism: Mechanism,
    key: PrivacyKey | None,
    source: str = "declared",
    rows_per_shard: int = 65_536,
) -> ReleaseManifest:
    """The manifest that goes with the records."""
    form = "standard" if isinstance(records[0].prompt, str) else "conversational"
    facts = guarantee(mechanism, key)
    return ReleaseManifest(form, len(records), source, facts, counts.as_dict(), rows_per_shard)


def write_release(
    records: Sequence[PrivateRecord], folder: Path, manifest: ReleaseManifest, key: PrivacyKey | None = None
) -> Path:
    """A new folder with the bundle of records in `record_id` order; signed where there is a key that can."""
    folder.mkdir(parents=True)
    schema, bits = release_schema(manifest.format), manifest.shard_bits
    for shard in range(1 << bits):
        mine = [record for record in records if int(record.record_id[:8], 16) >> 32 - bits == shard]
        groups = (mine[start : start + ROWS_PER_GROUP] for start in range(0, len(mine), ROWS_PER_GROUP))
        write_shard(folder / shard_name(shard), schema, (_table(group, schema) for group in groups))
    (folder / MANIFEST).write_text(json.dumps(manifest.as_dict(), indent=2, ensure_ascii=False) + "\n", "utf-8")
    if key is not None and manifest.guarantee["key_mode"] == "keyed":
        write_json(folder / SIGNATURE, sign(key, {path.name: file_digest(path) for path in sorted(folder.iterdir())}))
    return folder


def _table(group: Sequence[PrivateRecord], schema: pa.Schema) -> pa.Table:
    rows = []
    for record_id, prompt, response_a, response_b, z in group:
        rows.append((prompt, *(response_a, response_b)[::z], record_id))
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a bundle, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def release_pairs(
    pairs: Iterable[RawPair], folder: Path, mechanism: Mechanism, key: PrivacyKey | None, source: str = "declared"
) -> list[PrivateRecord]:
    """All of it: the records that were written to `folder`. UserError: no row is left."""
    records, counts = privatize_records(pairs, mechanism, key, source)
    write_release(records, folder, manifest_of(records, counts, mechanism, key, source), key)
    return records
