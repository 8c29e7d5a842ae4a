"""A bundle of answers that were private when they arrived: questions and z in the layout that every stage reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa
from private_rlhf.core.atomic import sync_folder, write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.container import ROWS_PER_GROUP, settle, write_shard
from private_rlhf.data.release import (
    MANIFEST,
    ReleasedPair,
    ReleaseManifest,
    release_schema,
    shard_name,
    text_array,
)
from private_rlhf.privacy.guarantee import DropCounts, RandomisedBy, stated
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import Text, record_id

ID_BITS = 256


def write_answers(
    folder: Path,
    answers: Iterable[tuple[Text, Text, Text, int]],
    epsilon: float,
    source: str,
    randomised_by: RandomisedBy | None,
    most_of_person: int | None,
) -> ReleaseManifest:
    """Writes rows (prompt, response, other response, z), z = +1 where it prefers the first, as a bundle into a new
    folder; returns its manifest. randomised_by: None for answers of a seed. most_of_person: the most answers that one
    person gave; None where persons are not known.

    Rows stand in the order of their record ids and, of one pair, of z: nothing tells when each was given. UserError if
    there is no row, ValueError for two equal responses.
    """
    pairs = []
    for prompt, response, other, z in answers:
        chosen, rejected = (response, other)[::z]
        pairs.append(ReleasedPair(prompt, chosen, rejected, record_id(prompt, (response, other))))
    if not pairs:
        raise UserError(f"{source}: holds no answer; at least one is needed")
    pairs.sort(key=lambda row: (row.record_id, repr(row.chosen)))
    form = "standard" if isinstance(pairs[0].prompt, str) else "conversational"
    facts = stated(RandomizedResponse(epsilon), "local" if randomised_by else "insecure_seed", randomised_by)
    most = max(Counter(row.record_id for row in pairs).values())
    totals = {"record": most * epsilon, "person": None if most_of_person is None else most_of_person * epsilon}
    manifest = ReleaseManifest(form, len(pairs), source, facts, DropCounts().as_dict(), totals=totals)
    write_pairs(folder, manifest, pairs)
    sync_folder(folder)
    return manifest


def write_pairs(
    folder: Path, manifest: ReleaseManifest, pairs: Iterable[ReleasedPair], keys: Collection[str] = ()
) -> None:
    """A new folder with the bundle of `manifest.rows` pairs in the order of their record ids; no further columns.
    keys: of messages, as in `release_schema`."""
    folder.mkdir()
    schema, bits = release_schema(manifest.format, (), keys, manifest.levels is not None), manifest.shard_bits
    for shard, inside in groupby(pairs, key=lambda row: int(row.record_id, 16) >> ID_BITS - bits):
        write_shard(folder / shard_name(shard), schema, _tables(inside, schema))
    for shard in range(1 << bits):
        if not (folder / shard_name(shard)).exists():
            write_shard(folder / shard_name(shard), schema, ())
    write_json(folder / MANIFEST, manifest.as_dict())
    settle(folder)


def _tables(pairs: Iterator[ReleasedPair], schema: pa.Schema) -> Iterator[pa.Table]:
    while group := list(islice(pairs, ROWS_PER_GROUP)):
        columns = list(zip(*group, strict=True))[: len(schema)]
        arrays = [text_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.table(arrays, schema=schema)
