"""A bundle of answers that were private when they arrived: questions and z in the layout that every stage reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice, repeat
from pathlib import Path

import pyarrow as pa
from private_rlhf.core.atomic import sync_folder, write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.container import ROWS_PER_GROUP, settle, write_shard
from private_rlhf.data.release import (
    MANIFEST,
    PAGE,
    TERMINAL,
    ReleasedPair,
    ReleaseManifest,
    release_schema,
    shard_name,
    text_array,
)
from private_rlhf.data.totals import most_at_levels
from private_rlhf.privacy.guarantee import DropCounts, RandomisedBy, stated
from private_rlhf.privacy.mechanism import LevelledResponse, RandomizedResponse
from private_rlhf.privacy.records import Text, record_id

ID_BITS = 256


def write_answers(
    folder: Path,
    answers: Iterable[tuple[Text, Text, Text, int]],
    mechanism: RandomizedResponse | LevelledResponse,
    source: str,
    randomised_by: RandomisedBy | None,
    person_total: float | None,
    epsilons: Sequence[float] | None = None,
) -> ReleaseManifest:
    """Writes rows (prompt, response, other response, z), z = +1 where it prefers the first, as a bundle into a new
    folder; returns its manifest. randomised_by: None for answers of a seed. person_total: the largest ε of all answers
    of one person; None where persons are not known. epsilons: one for each row, at a mechanism of levels.

    Rows stand in the order of their record ids and, of one pair, of z: nothing tells when each was given. UserError if
    there is no row, ValueError for two equal responses or another number of ε than of rows.
    """
    pairs = []
    of_rows = repeat(None) if epsilons is None else epsilons
    for (prompt, response, other, z), epsilon in zip(answers, of_rows, strict=epsilons is not None):
        chosen, rejected = (response, other)[::z]
        pairs.append(ReleasedPair(prompt, chosen, rejected, record_id(prompt, (response, other)), epsilon))
    if not pairs:
        raise UserError(f"{source}: holds no answer; at least one is needed")
    pairs.sort(key=lambda row: (row.record_id, repr(row.chosen), row.epsilon))
    form = "standard" if isinstance(pairs[0].prompt, str) else "conversational"
    facts = stated(mechanism, "local" if randomised_by else "insecure_seed", randomised_by)
    total, levels = max(Counter(row.record_id for row in pairs).values()) * mechanism.epsilon, None
    if isinstance(mechanism, LevelledResponse):
        counts = Counter(row.epsilon for row in pairs)
        events = [[level.epsilon, counts[level.epsilon]] for level in mechanism.levels]
        chosen = TERMINAL if randomised_by == "terminal" else PAGE
        total, levels = most_at_levels(pairs), {"chosen": chosen, "events": events}
    totals = {"record": total, "person": person_total}
    manifest = ReleaseManifest(form, len(pairs), source, facts, DropCounts().as_dict(), totals=totals, levels=levels)
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
