"""Sorted runs on disk: the external memory of the privatisation engine.

A run is one file of canonical rows in the order of their record ids: a magic number and the length of the facts, the
facts (JSON: row count, drop counts, whatever the caller adds), an index of where each 12-bit prefix of the ids begins,
the keys (`batches.KEYS`), then the texts. A *bucket* is a range of ids, 1/2^bits of them all; reading a bucket of all
runs takes only the memory of that bucket. Runs hold true labels: they live in an owner-only folder and are removed with
it. They are renamed into place when they are whole. One machine does not force them to the disk: who resumes after it
went down starts again (`boot_id`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from private_rlhf.core.atomic import new_file
from private_rlhf.privacy.batches import KEYS, Canonical, Keys, event_order, event_tags, first_of_each
from private_rlhf.privacy.records import HEADER_BYTES, PREFIX_BITS

_MAGIC = b"prlhfrun"
_HEAD = struct.Struct("<8sQ")


@dataclass(frozen=True)
class Run:
    """A whole run: its file and facts, which hold `rows`, `identical` and `empty`."""

    path: Path
    facts: dict[str, Any]
    start: int  # where the index begins

    @property
    def rows(self) -> int:
        """Rows in the run."""
        return int(self.facts["rows"])

    @property
    def _keys(self) -> int:
        return self.start + 4 * ((1 << PREFIX_BITS) + 1)

    def read(self, low: int, high: int) -> tuple[Keys, range]:
        """Keys of the ids whose 12-bit prefix p has low <= p < high, and the bytes of the file that are their texts;
        `start` counts from the first of these."""
        index = self._array(np.uint32, self.start + 4 * low, high - low + 1)
        first, end = int(index[0]), int(index[-1])
        if first == end:
            return np.zeros(0, KEYS), range(0)
        keys = self._array(KEYS, self._keys + first * KEYS.itemsize, end - first)
        begin = int(keys["start"][0])
        stop = int(keys["start"][-1]) + HEADER_BYTES + int(keys["lengths"][-1].sum(dtype=np.uint64))
        keys["start"] -= np.uint64(begin)
        texts_at = self._keys + self.rows * KEYS.itemsize
        return keys, range(texts_at + begin, texts_at + stop)

    def read_into(self, place: range, memory: npt.NDArray[np.uint8]) -> None:
        """Read these bytes of the file. OSError if it ends before."""
        with self.path.open("rb") as file:
            file.seek(place.start)
            if file.readinto(memory.data) < len(place):
                raise OSError(f"{self.path}: the run is shorter than it says")

    def _array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """Part of the file. OSError if it ends before."""
        array: npt.NDArray[Any] = np.fromfile(self.path, dtype, count, offset=offset)
        if len(array) < count:
            raise OSError(f"{self.path}: the run is shorter than it says")
        return array


def write_run(path: Path, rows: Canonical, durable: bool, **facts: Any) -> Run:
    """Write a run in one step. durable: it is on the disk before it has its name. facts: JSON types, kept with it."""
    facts = {"rows": len(rows.keys), "identical": rows.identical, "empty": rows.empty, **facts}
    text = json.dumps(facts).encode()
    prefix = (rows.keys["id"][:, 0] >> np.uint64(64 - PREFIX_BITS)).astype(np.uint32)
    index = np.searchsorted(prefix, np.arange((1 << PREFIX_BITS) + 1)).astype(np.uint32)
    parts: list[Any] = [_HEAD.pack(_MAGIC, len(text)) + text, index, np.ascontiguousarray(rows.keys), rows.blob]
    with new_file(path, 0o600, durable=durable) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(part)
    return Run(path, facts, _HEAD.size + len(text))


def open_run(path: Path) -> Run | None:
    """The run at `path`, or None if it is absent or incomplete."""
    try:
        with path.open("rb") as file:
            magic, length = _HEAD.unpack(file.read(_HEAD.size))
            facts = json.loads(file.read(length))
        return Run(path, facts, _HEAD.size + length) if magic == _MAGIC else None
    except (OSError, ValueError, struct.error):
        return None


@dataclass(frozen=True)
class KeptRows:
    """The rows of some runs with low <= record id < high whose record is not one of `without`. Can be sent to others.

    low, high: 32 bytes, or empty for no bound. left_out: file of the tags (S16, sorted) of events that are left out.
    """

    runs: tuple[Run, ...]
    low: bytes = b""
    high: bytes = b""
    without: KeptRows | None = None
    left_out: Path | None = None

    def inside(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Mask of the keys, in the order of their ids, that lie between the bounds."""
        mask = np.ones(len(keys), bool)
        if self.low or self.high:
            ids = record_ids(keys)
            mask[: np.searchsorted(ids, np.bytes_(self.low))] = False
            if self.high:
                mask[np.searchsorted(ids, np.bytes_(self.high)) :] = False
        return mask


def _prefix(record_id: bytes) -> int:
    return int.from_bytes(record_id[:2].ljust(2, b"\0"), "big") >> 16 - PREFIX_BITS


def record_ids(keys: Keys) -> npt.NDArray[np.bytes_]:
    """(n,) S32: numpy pads such strings with zero bytes and compares them unsigned, so any 32 bytes are one."""
    return np.ascontiguousarray(keys["id"].astype(">u8")).view("S32").reshape(-1)


@dataclass(frozen=True)
class Bucket:
    """The rows that are kept in one range of ids, in the order (record id, event tag)."""

    keys: Keys
    duplicates: int
    order: npt.NDArray[np.int64]  # their places among the rows of `texts`
    texts: pa.Array | None  # large_string: header, prompt, low, high, extra of every row read


def read_bucket(rows: KeptRows, bucket: int, bits: int, texts: bool) -> Bucket:
    """Merge one bucket of all runs; of rows with the same record and event the first in the input is kept."""
    width = 1 << PREFIX_BITS - bits
    first = max(_prefix(rows.low), bucket * width)
    end = min(_prefix(rows.high or b"\xff\xff") + 1, (bucket + 1) * width)
    parts = [run.read(first, end) for run in rows.runs] if first < end else []
    keys = np.concatenate([part for part, _ in parts]) if parts else np.zeros(0, KEYS)
    order = event_order(keys)
    ranked = keys[order]
    inside, leading = rows.inside(ranked), first_of_each(ranked)
    keep = inside & leading
    if rows.without is not None:
        keep &= ~np.isin(record_ids(ranked), record_ids(read_bucket(rows.without, bucket, bits, texts=False).keys))
    if rows.left_out is not None:
        tags = event_tags(ranked).view("S16").reshape(-1)
        keep &= ~np.isin(tags, np.fromfile(rows.left_out, "S16"))
    flat = strings_of(keys, _texts(rows.runs, [place for _, place in parts])) if texts else None
    return Bucket(ranked[keep], int((inside & ~leading).sum()), order[keep], flat)


def _texts(runs: Sequence[Run], places: Sequence[range]) -> npt.NDArray[np.uint8]:
    """The bytes of some runs one after another, in memory that is taken once."""
    ends = [0, *accumulate(map(len, places))]
    memory = np.empty(ends[-1], np.uint8)
    for run, place, start, end in zip(runs, places, ends, ends[1:], strict=False):
        if place:
            run.read_into(place, memory[start:end])
    return memory


def strings_of(keys: Keys, blob: npt.NDArray[np.uint8] | pa.Buffer) -> pa.Array:
    """The texts of rows that lie in this blob one after another: header, prompt, low, high, extra of each."""
    lengths = np.empty((len(keys), 1 + keys["lengths"].shape[1]), np.int64)
    lengths[:, 0] = HEADER_BYTES
    lengths[:, 1:] = keys["lengths"]
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths.ravel(), out=offsets[1:])
    return pa.Array.from_buffers(pa.large_binary(), lengths.size, [None, pa.py_buffer(offsets), pa.py_buffer(blob)])


def partitions(rows: KeptRows, bits: int, group: int) -> Iterator[tuple[int, Keys, int]]:
    """(p, kept keys without texts, duplicates) for the ids that begin with the byte p: for the p of one group, of which
    there are 2^bits, at most 256."""
    if bits > 8:
        width = 1 << bits - 8
        parts = [read_bucket(rows, group * width + place, bits, texts=False) for place in range(width)]
        yield group, np.concatenate([part.keys for part in parts]), sum(part.duplicates for part in parts)
        return
    part = read_bucket(rows, group, bits, texts=False)
    byte = (part.keys["id"][:, 0] >> np.uint64(56)).astype(np.int64)
    width = 1 << 8 - bits
    edges = np.searchsorted(byte, np.arange(group * width, (group + 1) * width + 1))
    for place in range(width):
        yield group * width + place, part.keys[edges[place] : edges[place + 1]], part.duplicates * (not place)


def id_at(rows: KeptRows, bounds: Sequence[int], place: int) -> bytes:
    """The record id (32 bytes) of the kept row at `place`, counted from 0 in the order of the ids.

    bounds: 257 row numbers; the kept rows whose ids begin with the byte p are bounds[p] to bounds[p + 1].
    """
    partition = int(np.searchsorted(bounds, place, side="right")) - 1
    keys = read_bucket(rows, partition, 8, texts=False).keys
    return keys["id"][place - bounds[partition]].astype(">u8").tobytes()
