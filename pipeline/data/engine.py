"""The steps of a release in external memory: sorted runs from chunks, events from runs, shards from buckets.

Each step works on one piece at a time, in any process, and leaves a whole file or none, so memory does not grow with
the rows and an interrupted release goes on where it stopped. `curate` puts the steps together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.core.errors import UserError
from pipeline.data.chunks import Chunk, read_chunk
from pipeline.data.layout import Layout
from pipeline.data.release import MESSAGES_TYPE, ROWS_PER_GROUP, release_schema, shard_name, write_shard
from pipeline.privacy.batches import Signs, a_is_lower, canonicalise, event_tags, release_labels
from pipeline.privacy.events import EventStore, StagedGeneration
from pipeline.privacy.keys import PrivacyKey, load_key
from pipeline.privacy.mechanism import RandomizedResponse
from pipeline.privacy.records import MESSAGES, decode_messages
from pipeline.privacy.runs import Bucket, Run, bucket_bits, open_run, partitions, read_bucket, write_run

ROWS_IN_MEMORY = 131_072  # of keys, when events are gathered
_EVENT = np.dtype([("tag", "u1", (16,)), ("labeler", "u1", (16,)), ("label", "i1")])
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)
_PER_ROW = 5  # strings of a row in a bucket: header, prompt, low, high, extra


@dataclass(frozen=True)
class KeyFile:
    """How a worker process gets the key: it reads the file itself and makes sure that it is still the same key."""

    path: Path
    check: str

    @classmethod
    def of(cls, key: PrivacyKey) -> KeyFile:
        """The reference to a key that was read from a file."""
        assert key.path is not None
        return cls(key.path, key.keyed_digest([b"same key"]))

    def load(self) -> PrivacyKey:
        """UserError if the file is gone or holds another key."""
        key = load_key(self.path)
        if key.keyed_digest([b"same key"]) != self.check:
            raise UserError(f"{self.path}: changed while it was in use; put the first key back and run again")
        return key


# --- map: chunks to sorted runs ---------------------------------------------------------------------------------------


def finished_runs(folder: Path, number: int) -> list[Run] | None:
    """The runs of a chunk that was finished before, else None."""
    runs: list[Run] = []
    while run := open_run(_run_path(folder, number, len(runs))):
        runs.append(run)
        if run.facts["last"]:
            return runs
    return None


def _run_path(folder: Path, number: int, part: int) -> Path:
    return folder / f"{number:06d}-{part:04d}.run"


def spill(chunk: Chunk, number: int, layout: Layout, key_file: KeyFile, folder: Path) -> list[Run]:
    """Turn chunk `number` into runs. UserError names the first bad row."""
    prf = key_file.load().prf
    runs: list[Run] = []
    position = number << 32
    columns = read_chunk(chunk, layout)
    some = next(columns, None)
    while some is not None:
        following = next(columns, None)
        kinds = _kinds(some.extra, len(layout.options.columns))
        rows = canonicalise(some, position, prf)
        path, last = _run_path(folder, number, len(runs)), following is None
        runs.append(write_run(path, rows, last=last, extra=kinds, bytes=chunk.size()))
        position += len(some.preferred)
        some = following
    return runs


def _kinds(extra: pa.Array | None, columns: int) -> list[list[str]]:
    """Per extra column, which kinds of values it holds."""
    kinds: list[set[str]] = [set() for _ in range(columns)]
    for text in extra.to_pylist() if extra is not None else ():
        for found, value in zip(kinds, json.loads(text), strict=True):
            wide = isinstance(value, int) and not -(2**63) <= value < 2**63
            found.add("wide" if wide else type(value).__name__)
    return [sorted(found) for found in kinds]


def extra_fields(names: Sequence[str], runs: Sequence[Run]) -> tuple[pa.Field, ...]:
    """The Arrow types of the extra columns: text, whole numbers, numbers, truth values, or else JSON text."""
    fields = []
    for place, name in enumerate(names):
        kinds = {kind for run in runs for kind in run.facts["extra"][place]} - {"NoneType"}
        kind = pa.string()
        if kinds == {"bool"}:
            kind = pa.bool_()
        elif kinds == {"int"}:
            kind = pa.int64()
        elif kinds in ({"float"}, {"float", "int"}):
            kind = pa.float64()
        fields.append(pa.field(name, kind, metadata=None if kinds <= {"str"} or kind != pa.string() else {"json": "1"}))
    return tuple(fields)


# --- gather: which events there are -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Events:
    """The kept events: a file of them by partition of the store, their number, and what identifies them all."""

    path: Path
    bounds: tuple[int, ...]
    duplicates: int
    content: bytes

    def __len__(self) -> int:
        return self.bounds[-1]

    def merge(self, store: EventStore, epsilon: float, into: StagedGeneration) -> int:
        """Enter all events into the store; returns how many contradict their stored label."""
        conflicts = 0
        for partition in range(256):
            count = self.bounds[partition + 1] - self.bounds[partition]
            if count:
                rows = np.fromfile(self.path, _EVENT, count, offset=self.bounds[partition] * _EVENT.itemsize)
                tags, labelers = np.ascontiguousarray(rows["tag"]), np.ascontiguousarray(rows["labeler"])
                labels = np.ascontiguousarray(rows["label"])
                merged = store.merge(partition, tags, labels, labelers if labelers.any() else None, epsilon, into=into)
                conflicts += merged.conflicts
        return conflicts


def gather_events(runs: Sequence[Run], key: PrivacyKey, path: Path) -> Events:
    """Write the kept events to `path`; content: keyed digest of events and labels, in an order of its own."""
    bounds, duplicates = [0], 0
    bits = bucket_bits(sum(run.rows for run in runs), ROWS_IN_MEMORY)

    def content() -> Iterator[bytes]:
        nonlocal duplicates
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for _, keys, copies in partitions(runs, bits):
                tags = event_tags(keys)
                words = tags.view(">u8").astype(np.uint64)
                order = np.lexsort((words[:, 1], words[:, 0]))
                rows = np.zeros(len(keys), _EVENT)
                rows["tag"], rows["labeler"], rows["label"] = tags[order], keys["labeler"][order], keys["label"][order]
                data = rows.tobytes()
                file.write(data)
                bounds.append(bounds[-1] + len(rows))
                duplicates += copies
                yield data

    digest = bytes.fromhex(key.keyed_digest(content()))
    return Events(path, tuple(bounds), duplicates, digest)


# --- reduce: buckets to shards ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardJob:
    """What all shards of a release have in common. bits: log2 of their number."""

    mechanism: RandomizedResponse
    key_file: KeyFile
    kind: bytes
    extra: tuple[pa.Field, ...]
    bits: int
    folder: Path

    @property
    def schema(self) -> pa.Schema:
        """Of the shards."""
        plain = [field.remove_metadata() for field in self.extra]  # the note that a text is JSON stays here
        return release_schema("conversational" if self.kind == MESSAGES else "standard", plain)



def write_bucket(job: ShardJob, runs: Sequence[Run], shard: int) -> int:
    """Randomise and write one shard, durably, unless it is there already; returns its rows."""
    target = job.folder / shard_name(shard)
    bucket = read_bucket(runs, shard, job.bits, texts=not target.exists())
    if target.exists():
        return len(bucket.keys)
    temporary = job.folder.parent / f".{target.name}.{os.getpid()}.tmp"
    labels = release_labels(job.mechanism, job.key_file.load().prf, bucket.keys)
    try:
        write_shard(temporary, job.schema, _tables(job, bucket, labels))
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(bucket.keys)


def _tables(job: ShardJob, bucket: Bucket, labels: Signs) -> Iterator[pa.Table]:
    chosen_is_lower = (labels == 1) == a_is_lower(bucket.keys)
    for start in range(0, len(labels), ROWS_PER_GROUP):
        part = slice(start, start + ROWS_PER_GROUP)
        first = bucket.order[part] * _PER_ROW
        lower = chosen_is_lower[part]
        places = (first + 1, first + np.where(lower, 2, 3), first + np.where(lower, 3, 2))
        texts = [_texts(bucket.texts, place, job.kind) for place in places]
        extra = _extra(bucket.texts, first + 4, job.extra) if job.extra else []
        yield pa.table([*texts, _hexadecimal(bucket.keys["id"][part]), *extra], schema=job.schema)


def _strings(flat: pa.Array, places: npt.NDArray[np.int64]) -> pa.Array:
    return flat.take(pa.array(places)).view(pa.large_string())


def _texts(flat: pa.Array, places: npt.NDArray[np.int64], kind: bytes) -> pa.Array:
    strings = _strings(flat, places)
    if kind != MESSAGES:
        return strings.cast(pa.string())
    return pa.array([decode_messages(text) for text in strings.to_pylist()], MESSAGES_TYPE)


def _extra(flat: pa.Array, places: npt.NDArray[np.int64], fields: Sequence[pa.Field]) -> list[pa.Array]:
    rows = [json.loads(text) for text in _strings(flat, places).to_pylist()]
    columns: list[list[Any]] = [[row[place] for row in rows] for place in range(len(fields))]
    return [
        pa.array(
            [None if value is None else json.dumps(value, ensure_ascii=False) for value in column]
            if field.metadata
            else column,
            field.type,
        )
        for column, field in zip(columns, fields, strict=True)
    ]


def _hexadecimal(ids: npt.NDArray[Any]) -> pa.Array:
    text = _HEX[ids.astype(">u8").view(np.uint8).reshape(-1)]
    ends = np.arange(len(ids) + 1, dtype=np.int32) * 64
    return pa.Array.from_buffers(pa.string(), len(ids), [None, pa.py_buffer(ends), pa.py_buffer(text)])
