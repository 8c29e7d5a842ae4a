"""The steps of a release in external memory: sorted runs from chunks, events from runs, shards from buckets.

Each step works on one piece at a time, in any process, and leaves a whole file or none, so memory does not grow with
the rows and an interrupted release goes on where it stopped. `curate` puts the steps together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.recfunctions import repack_fields
from private_rlhf.core.atomic import new_file, write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.chunks import Chunk, read_chunk
from private_rlhf.data.container import ROWS_PER_GROUP, write_shard
from private_rlhf.data.layout import Layout, spelling_digests
from private_rlhf.data.release import release_schema, shard_name, text_array
from private_rlhf.data.spellings import letter_tags
from private_rlhf.data.workers import Workers
from private_rlhf.privacy.batches import (
    Bools,
    Keys,
    Signs,
    a_is_lower,
    arrow_places,
    blinds,
    canonicalize,
    event_tags,
    record_tags,
    release_labels,
)
from private_rlhf.privacy.events import ENTRY, EventStore, MergeResult, StagedGeneration, as_tags
from private_rlhf.privacy.keys import PrivacyKey, load_key, make_private_folder
from private_rlhf.privacy.mechanism import MOST_LEVELS, LevelledResponse, Mechanism, PublicLabels, RandomizedResponse
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import MESSAGES, bucket_bits, decode_messages
from private_rlhf.privacy.sorted_runs import Bucket, KeptRows, Run, open_run, partitions, read_bucket, write_run

ROWS_IN_MEMORY = 131_072  # of keys, when events are gathered
UNLEVELLED = [name for name in ENTRY.names or () if name != "level"]
PER_ROW = 5  # strings of a row in a bucket: header, prompt, low, high, extra


LoadKey = Callable[[], PrivacyKey]
"""A way for a task to get the key, which is not sent to other processes."""


def key_loader(key: PrivacyKey) -> LoadKey:
    """Reads the key's file again; a key without one (of a seed) stays in this process."""
    return (lambda: key) if key.path is None else partial(_load_same, key.path, key.keyed_digest([b"same key"]))


def _load_same(path: Path, check: str) -> PrivacyKey:
    """UserError if the file is gone or holds another key."""
    key = load_key(path)
    if key.keyed_digest([b"same key"]) != check:
        raise UserError(f"{path}: changed while it was in use; put the first key back and run again")
    return key


# --- map: chunks to sorted runs ---------------------------------------------------------------------------------------


def finished_runs(folder: Path, number: int) -> list[Run]:
    """The runs of a chunk that an interrupted release or another task finished; none unless all are there."""
    runs: list[Run] = []
    while run := open_run(_run_path(folder, number, len(runs))):
        runs.append(run)
        if run.facts["last"]:
            return runs
    return []


def _run_path(folder: Path, number: int, part: int) -> Path:
    return folder / f"{number:06d}-{part:04d}.run"


def spill(chunk: Chunk, number: int, layout: Layout, key: LoadKey, folder: Path, durable: bool) -> list[Run]:
    """Turn chunk `number` into runs, unless that was done before. UserError names the first bad row."""
    if finished := finished_runs(folder, number):
        return finished
    prf = key().prf
    runs: list[Run] = []
    position = number << 32
    batches = chain(read_chunk(chunk, layout), [None])  # the last one says that nothing follows
    for some, following in pairwise(batches):
        assert some is not None
        rows = canonicalize(some, position, prf)
        rows.keys["letters"] = letter_tags(rows, layout.kind, prf)
        facts = {
            "last": following is None,
            "extra": _kinds(some.extra, len(layout.options.columns)),
            "bytes": chunk.size(),
            "unnamed": some.unnamed,
            "dropped": dict(some.dropped),
            "spellings": spelling_digests(some.spellings),
        }
        runs.append(write_run(_run_path(folder, number, len(runs)), rows, durable, **facts))
        position += len(some.preferred)
    return runs


def _kinds(extra: pa.Array | None, columns: int) -> list[list[str]]:
    """The kinds of values that each extra column holds."""
    kinds: list[set[str]] = [set() for _ in range(columns)]
    for text in extra.to_pylist() if extra is not None else ():
        for names, value in zip(kinds, json.loads(text), strict=True):
            wide = isinstance(value, int) and not -(2**63) <= value < 2**63
            names.add("wide" if wide else type(value).__name__)
    return [sorted(found) for found in kinds]


def extra_fields(names: Sequence[str], runs: Sequence[Run]) -> tuple[pa.Field, ...]:
    """The Arrow types of the extra columns: text, whole numbers, numbers, truth values, or else JSON text."""
    types = {("bool",): pa.bool_(), ("int",): pa.int64(), ("float",): pa.float64(), ("float", "int"): pa.float64()}
    fields = []
    for place, name in enumerate(names):
        kinds = {kind for run in runs for kind in run.facts["extra"][place]} - {"NoneType"}
        kind = types.get(tuple(sorted(kinds)), pa.string())
        fields.append(pa.field(name, kind, metadata=None if kinds <= {"str"} or kind != pa.string() else {"json": "1"}))
    return tuple(fields)


# --- gather: which events there are -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The events of one group of the store's partitions, in a file. counts: by partition, from `first` on. levels: of
    each of the `KeptRows`, how many rows there are at each level."""

    path: Path
    first: int
    counts: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    duplicates: int

    def partitions(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number, rows (ENTRY)) of every partition of the store that has events here."""
        events, ends = np.fromfile(self.path, ENTRY), np.cumsum(self.counts)
        for partition, count, end in zip(range(self.first, 256), self.counts, ends, strict=False):
            if count:
                yield partition, events[end - count : end]


@dataclass(frozen=True)
class Events:
    """The kept events, in files. content: what identifies them and their labels."""

    pieces: tuple[Piece, ...]
    content: bytes

    def __len__(self) -> int:
        return sum(self.rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of each of the `KeptRows`."""
        return tuple(map(sum, self.levels))

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Of each of the `KeptRows`, how many rows there are at each level of `MOST_LEVELS`."""
        counts = sum(np.array(piece.levels, np.int64) for piece in self.pieces)
        return tuple(map(tuple, np.asarray(counts).tolist()))

    @property
    def one_level_each(self) -> bool:
        """True if no labeller has events at two levels; events that name nobody may all be of one person."""
        pairs = [np.unique(rows[~rows["left_out"]][["labeler", "level"]]) for _, rows in self.partitions()]
        people = np.unique(np.concatenate(pairs))["labeler"]
        return len(np.unique(people)) == len(people)

    @property
    def left_out(self) -> int:
        """Events that are marked as left out."""
        return sum(sum(piece.counts) for piece in self.pieces) - len(self)

    @property
    def duplicates(self) -> int:
        """Rows that were left out because an earlier one holds the same event."""
        return sum(piece.duplicates for piece in self.pieces)

    def partitions(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number, rows) of every partition of the store that has events."""
        for piece in self.pieces:
            yield from piece.partitions()

    @property
    def bounds(self) -> list[int]:
        """257 row numbers, by the ids' first byte."""
        return [0, *accumulate(count for piece in self.pieces for count in piece.counts)]

    def merge(
        self, pool: Workers, store: EventStore, levels: Sequence[float], into: StagedGeneration, add_up: bool = False
    ) -> tuple[int, int]:
        """Enter all events into the store, each at the ε of its level; returns how many contradict their stored label,
        and how many rename a known record (see `EventStore.merge`)."""
        tasks = ((piece, store, tuple(levels), into, add_up) for piece in self.pieces)
        results = [result for some in pool.run(merge_piece, tasks) for result in some]
        return sum(result.conflicts for result in results), sum(result.renamed for result in results)


def merge_piece(
    piece: Piece, store: EventStore, levels: tuple[float, ...], into: StagedGeneration, add_up: bool
) -> list[MergeResult]:
    """`Events.merge` for one piece."""
    return [
        store.merge(partition, rows, np.array(levels)[rows["level"]], into=into, add_up=add_up)
        for partition, rows in piece.partitions()
    ]


def gather_events(
    pool: Workers,
    parts: Sequence[KeptRows],
    key: PrivacyKey,
    folder: Path,
    left_out: Path | None = None,
    keep: bool = False,
) -> Events:
    """Write the kept events to files in an owner-only folder; content: keyed digest of events and labels, in an order
    of its own.

    parts: no two of them hold the same record. left_out: as in `KeptRows`; those are in the files, marked, but do not
    count. keep: as in `gather_pieces`.
    """
    pieces = tuple(gather_pieces(pool, parts, folder, left_out, keep))
    return Events(pieces, bytes.fromhex(key.keyed_digest(_content(pieces))))


def gather_pieces(
    pool: Workers, parts: Sequence[KeptRows], folder: Path, left_out: Path | None = None, keep: bool = False
) -> Iterator[Piece]:
    """The pieces of `gather_events`. keep: take those of the same rows that are there, and leave the others there."""
    make_private_folder(folder)
    bits = bucket_bits(sum(run.rows for part in parts for run in part.runs), ROWS_IN_MEMORY)
    paths = (folder / f"{group:03d}.events" for group in range(1 << min(bits, 8)))
    tasks = ((parts, bits, group, path, left_out) for group, path in enumerate(paths))
    return pool.run(kept_piece if keep else gather_piece, tasks)


def kept_piece(parts: Sequence[KeptRows], bits: int, group: int, path: Path, left_out: Path | None) -> Piece:
    """`gather_piece`, unless another task did; its facts are written last."""
    facts = path.with_suffix(".json")
    with suppress(OSError, ValueError):
        return Piece(path, **json.loads(facts.read_text(encoding="utf-8")))
    piece = gather_piece(parts, bits, group, path, left_out, durable=True)
    write_json(facts, {name: value for name, value in asdict(piece).items() if name != "path"}, mode=0o600)
    return piece


def _content(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Events and labels, one piece in memory at a time; then their levels, unless all are the lowest: a release of one
    ε has the digest that it had before there were levels."""
    levelled = False
    for rows in (np.fromfile(piece.path, ENTRY) for piece in pieces):
        levelled = levelled or bool(rows["level"].any())
        yield repack_fields(rows[UNLEVELLED]).tobytes()
    for piece in pieces if levelled else ():
        yield np.fromfile(piece.path, ENTRY)["level"].tobytes()


def gather_piece(
    parts: Sequence[KeptRows], bits: int, group: int, path: Path, left_out: Path | None = None, durable: bool = False
) -> Piece:
    """The events of one group of partitions, see `runs.partitions`."""
    counts: list[int] = []
    levels, duplicates = np.zeros((len(parts), MOST_LEVELS), np.int64), 0
    gone = np.fromfile(left_out, "S16") if left_out else np.empty(0, "S16")
    with new_file(path, 0o600, durable=durable) as temporary, temporary.open("wb") as file:
        for found in zip(*(partitions(part, bits, group) for part in parts), strict=True):
            file.write(_events(np.concatenate([keys for _, keys, _ in found]), gone))
            counts.append(sum(len(keys) for _, keys, _ in found))
            kept = [keys["level"][~_among(as_tags(event_tags(keys)), gone)] for _, keys, _ in found]
            levels += [np.bincount(level, minlength=MOST_LEVELS) for level in kept]
            duplicates += sum(copies for _, _, copies in found)
    return Piece(path, group * len(counts), tuple(counts), tuple(map(tuple, levels.tolist())), duplicates)


def _events(keys: Keys, gone: np.ndarray) -> bytes:
    """`events.ENTRY` rows in the order of their tags."""
    words = event_tags(keys).view(">u8").astype(np.uint64)
    keys = keys[np.lexsort((words[:, 1], words[:, 0]))]
    rows = np.zeros(len(keys), ENTRY)
    for name, tags in (("tag", event_tags(keys)), ("record", record_tags(keys)), ("labeler", keys["labeler"])):
        rows[name] = as_tags(tags)
    for name in ("label", "corrects", "letters", "level"):
        rows[name] = keys[name]
    rows["blind"], rows["left_out"] = blinds(keys), _among(rows["tag"], gone)
    return rows.tobytes()


def _among(tags: np.ndarray, gone: np.ndarray) -> Bools:
    """Mask of the tags that are in `gone`, which is mostly empty."""
    return np.isin(tags, gone) if len(gone) else np.zeros(len(tags), bool)


# --- count: how often rules are right ---------------------------------------------------------------------------------


def count_right(
    rows: KeptRows,
    mechanism: RandomizedResponse | LevelledResponse,
    key: PrivacyKey,
    decisions: Mapping[str, Sequence[int]],
    question: Sequence[bytes],
) -> tuple[dict[str, int], dict[str, bytes]]:
    """By rule, (how many labels are the expected one, the name of the question: what is expected of which events).

    decisions: by rule, for every kept row in order: +1 for the label that was released, -1 for the other, 0 for none.
    question: further fields of the names.
    """
    counts = dict.fromkeys(decisions, 0)
    expected: dict[str, list[bytes]] = {rule: [] for rule in decisions}
    start = 0
    for keys in (keys for byte in range(256) for _, keys, _ in partitions(rows, 8, byte)):
        z = release_labels(mechanism, key.prf, keys)
        for rule, signs in decisions.items():
            wanted = np.asarray(signs[start : start + len(keys)], np.int8) * z
            counts[rule] += int(((wanted == keys["label"]) & (wanted != 0)).sum())
            expected[rule].append(wanted.tobytes())
        start += len(keys)
    fields = (*question, len(decisions).to_bytes(8, "big"))
    digest = {rule: key.keyed_digest(map(frame, (b"count", *fields, b"".join(e)))) for rule, e in expected.items()}
    return counts, {rule: bytes.fromhex(name) for rule, name in digest.items()}


# --- reduce: buckets to shards ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardJob:
    """Facts that all shards of a release share. bits: log2 of their number. keys: of messages."""

    mechanism: Mechanism
    key: LoadKey
    kind: bytes
    extra: tuple[pa.Field, ...]
    bits: int
    folder: Path
    keys: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Of the shards."""
        plain = [field.remove_metadata() for field in self.extra]  # the note that a text is JSON stays here
        levelled = isinstance(self.mechanism, LevelledResponse)
        return release_schema("conversational" if self.kind == MESSAGES else "standard", plain, self.keys, levelled)


def write_bucket(job: ShardJob, rows: KeptRows, shard: int) -> int:
    """Randomise and write one shard, durably, unless it is there already; returns its rows."""
    target = job.folder / shard_name(shard)
    bucket = read_bucket(rows, shard, job.bits, texts=not target.exists())
    if target.exists():
        return len(bucket.keys)
    labels: Signs = bucket.keys["label"]
    if not isinstance(job.mechanism, PublicLabels):
        labels = release_labels(job.mechanism, job.key().prf, bucket.keys)
    with new_file(target, beside=job.folder) as temporary:
        write_shard(temporary, job.schema, _tables(job, bucket, labels))
    return len(bucket.keys)


def _tables(job: ShardJob, bucket: Bucket, labels: Signs) -> Iterator[pa.Table]:
    chosen_is_lower = (labels == 1) == a_is_lower(bucket.keys)
    for start in range(0, len(labels), ROWS_PER_GROUP):
        part = slice(start, start + ROWS_PER_GROUP)
        first = bucket.order[part] * PER_ROW
        lower = chosen_is_lower[part]
        places = (first + 1, first + np.where(lower, 2, 3), first + np.where(lower, 3, 2))
        texts = [_texts(bucket.texts, place, job.kind) for place in places]
        if job.kind == MESSAGES:
            texts = [text_array(text, job.schema.field(0).type) for text in texts]
        beside = [_hexadecimal(bucket.keys["id"][part])]
        if isinstance(job.mechanism, LevelledResponse):
            levels = np.array([level.epsilon for level in job.mechanism.levels])
            values = pa.py_buffer(levels[bucket.keys["level"][part]])
            beside.append(pa.Array.from_buffers(pa.float64(), len(lower), [None, values]))
        extra = _extra(bucket.texts, first + 4, job.extra) if job.extra else []
        yield pa.table([*texts, *beside, *extra], schema=job.schema)


def _strings(flat: pa.Array, places: npt.NDArray[np.int64]) -> pa.Array:
    return flat.take(arrow_places(places)).view(pa.large_string())


def _texts(flat: pa.Array, places: npt.NDArray[np.int64], kind: bytes) -> Any:
    strings = _strings(flat, places)
    if kind != MESSAGES:
        return strings.cast(pa.string())
    return [decode_messages(text) for text in strings.to_pylist()]


def _extra(flat: pa.Array, places: npt.NDArray[np.int64], fields: Sequence[pa.Field]) -> list[pa.Array]:
    rows = [json.loads(text) for text in _strings(flat, places).to_pylist()]
    columns: list[list[Any]] = [[row[place] for row in rows] for place in range(len(fields))]
    for column, field in zip(columns, fields, strict=True):
        if field.metadata:
            column[:] = [None if value is None else json.dumps(value, ensure_ascii=False) for value in column]
    return [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]


def _hexadecimal(ids: npt.NDArray[Any]) -> pa.Array:
    text = ids.astype(">u8").tobytes().hex().encode()
    ends = np.arange(len(ids) + 1, dtype=np.int32) * 64
    return pa.Array.from_buffers(pa.string(), len(ids), [None, pa.py_buffer(ends), pa.py_buffer(text)])
