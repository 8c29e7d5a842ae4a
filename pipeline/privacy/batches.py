"""Canonicalisation, event names and randomised response on whole columns: what `records` and `mechanism` say, in bulk.

Per row there is one SHA-256 (the record id), one keyed block (the event), for about half of the rows at the end a
second one (the walk of an octave), and no other Python object; everything else is numpy and Arrow. The plain functions
of `records` and `mechanism` are the reference that the tests compare this module with, bit for bit.

n: rows. Keys are structured arrays of `KEYS`, one entry a row; texts of a row lie one after another in a blob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LABEL_RULE
from private_rlhf.privacy.mechanism import DOMAIN, WALK_DOMAIN, LevelledResponse, RandomizedResponse, walk_counter
from private_rlhf.privacy.prf import Prf
from private_rlhf.privacy.records import HEADER_BYTES, ID_DOMAIN, event_suffix, is_blank

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Signs = npt.NDArray[np.int8]
Keys = npt.NDArray[np.void]
Words = npt.NDArray[np.uint64]

_U64 = np.uint64
_LOW = (1 << 64) - 1
LABELER_DOMAIN = b"labeler/v2"
TEXTS = 4  # prompt, lower response, higher response (in the order of their bytes), extra columns as JSON
_TAG = slice(32, 47)  # of a root: 120 bits that are no part of the mechanism
HASH_ROWS = 16384  # rows whose digests exist as Python objects at a time
KEYS = np.dtype(
    [
        ("id", "<u8", (4,)),  # the record id as four big-endian numbers (their order is the order of the ids)
        ("root", "u1", (48,)),  # the event's root, see `mechanism.Coins`
        ("record", "u1", (15,)),  # keyed tag of the record: what its event without names has in `event_tags`
        ("labeler", "u1", (16,)),  # keyed tag of the labeller, zero if there is none
        ("letters", "<u8"),  # keyed tag of the letters and digits of its texts, see `events.NOT_TAGGED`
        ("level", "u1"),  # number of its ε among the mechanism's levels
        ("corrects", "?"),  # whether the label corrects an earlier one of the same record
        ("position", "<u8"),  # place in the input
        ("start", "<u8"),  # of the row's texts in the blob
        ("lengths", "<u4", (TEXTS,)),
        ("label", "i1"),  # +1 if response_a was preferred
    ]
)


@dataclass
class Columns:
    """Rows of one kind of text, as read. Arrays of n.

    prompt, first, second: Arrow string or large_string, no nulls. preferred: +1 where `first` was preferred, else -1.
    kind: `records.TEXT` or `records.MESSAGES` (texts are then canonical JSON). blank: a row without text in prompt or a
    response. labelers, events: "" for none; or None without such a column. corrects, levels (their numbers): or None
    without such a column. extra: JSON of the extra columns, or None. spellings: of the labellers as read, and the name
    each stands for. tie_coins: a `preferred` of 0 is a tie, which gets a fair coin in its place. dropped: rows that
    were left out, by reason.
    """

    prompt: pa.Array
    first: pa.Array
    second: pa.Array
    preferred: Signs
    kind: bytes
    blank: Bools
    labelers: list[str] | None = None
    events: list[str] | None = None
    extra: pa.Array | None = None
    corrects: Bools | None = None
    levels: Bytes | None = None
    spellings: dict[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    tie_coins: bool = False

    @property
    def unnamed(self) -> int:
        """Names that are empty, in columns that name labellers or events."""
        return sum(column.count("") for column in (self.labelers, self.events) if column is not None)


@dataclass
class Canonical:
    """Canonical rows in the order of their ids, and how many were dropped on the way."""

    keys: Keys
    blob: pa.Buffer
    identical: int
    empty: int


def blank_texts(texts: pa.Array) -> Bools:
    """Mask of the strings without a character besides white space, as `records.is_blank` says."""
    edges = edge_bytes(texts)  # of most texts one of them is visible ASCII
    unsure = np.flatnonzero(~((edges > 0x20) & (edges < 0x7F)).any(axis=0))
    result = np.zeros(len(texts), bool)
    result[unsure] = [is_blank(texts[row].as_py()) for row in unsure.tolist()]
    return result


def edge_bytes(texts: pa.Array) -> Bytes:
    """The first and the last byte of each string, (2, n); zero for an empty one."""
    offsets, data = _buffers(texts)
    edges = np.zeros((2, len(texts)), np.uint8)
    some = np.flatnonzero(np.diff(offsets))
    edges[:, some] = data[[offsets[:-1][some], offsets[1:][some] - 1]]
    return edges


def _buffers(texts: pa.Array) -> tuple[npt.NDArray[Any], Bytes]:
    """Offsets (n+1) and bytes of a string or binary array."""
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    _, offsets, data = texts.buffers()
    width = np.int64 if wide else np.int32
    if not len(texts):
        return np.zeros(1, width), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, width)[texts.offset : texts.offset + len(texts) + 1]
    return ends, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)


def _bools(array: pa.Array) -> Bools:
    """A boolean array without nulls. (`to_numpy` and `pa.array` would import pandas, which takes half a second.)"""
    if not len(array):
        return np.zeros(0, bool)
    bits = np.unpackbits(np.frombuffer(array.buffers()[1], np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(bool)


def arrow_places(places: npt.NDArray[np.int64]) -> pa.Array:
    """Row numbers for `take`."""
    return pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(np.ascontiguousarray(places))])


def canonicalize(columns: Columns, position: int, prf: Prf | None) -> Canonical:
    """Drop, order, name and sort. position: the first row's place in the input; rows are numbered from there. prf: None
    where the events are named later.

    UserError where `preferred` is neither -1 nor +1, nor 0 where ties get a coin.
    """
    _check_labels(columns.preferred + (columns.preferred == 0) if columns.tie_coins else columns.preferred)
    same = _bools(pc.equal(columns.first, columns.second))
    keep = np.flatnonzero(~same & ~columns.blank)
    identical, empty = int(same.sum()), int((columns.blank & ~same).sum())
    keys = np.zeros(len(keep), KEYS)
    keys["position"] = position + keep
    first, second = _binary(columns.first), _binary(columns.second)
    swapped = _bools(pc.greater(first, second))[keep]
    blob, starts = _interleave(keys, columns, keep, swapped)
    digests = _record_ids(blob, starts, keys["lengths"])
    keys["id"] = digests.view(">u8")
    odd = (digests[:, -1] & 1).astype(bool)
    first_is_a = swapped == odd  # response_a is the lower one unless the id is odd
    keys["label"] = np.where(first_is_a, columns.preferred[keep], -columns.preferred[keep])
    if prf is not None:
        people, answers = (column and [column[row] for row in keep] for column in (columns.labelers, columns.events))
        name_events(keys, people, answers, prf)
        tied = keys["label"] == 0
        keys["label"][tied] = tie_coins(keys[tied])
    if columns.corrects is not None:
        keys["corrects"] = columns.corrects[keep]
    if columns.levels is not None:
        keys["level"] = columns.levels[keep]
    order = np.argsort(keys["id"][:, 0], kind="stable")
    return Canonical(*_sorted(keys, blob, starts, order), identical, empty)


def record_ids(prompt: pa.Array, first: pa.Array, second: pa.Array, kind: bytes) -> Bytes:
    """The ids of pairs, (n, 32), as `records.record_id` gives them; the two responses of each differ."""
    keys = np.zeros(len(first), KEYS)
    columns = Columns(prompt, first, second, keys["label"], kind, keys["corrects"])
    swapped = _bools(pc.greater(_binary(first), _binary(second)))
    blob, starts = _interleave(keys, columns, np.arange(len(keys)), swapped)
    return _record_ids(blob, starts, keys["lengths"])


def _binary(texts: pa.Array) -> pa.Array:
    return texts.cast(pa.large_string()).view(pa.large_binary()) if not pa.types.is_large_binary(texts.type) else texts


def _interleave(
    keys: Keys, columns: Columns, keep: npt.NDArray[np.int64], swapped: Bools
) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
    """Header, prompt, low, high, extra of each kept row, one row after another, in one gather; the rows' starts (n+1).

    swapped: of the kept rows, where `first` is the higher text.
    """
    rows = len(keys)
    if not rows:
        return pa.py_buffer(b""), np.zeros(1, np.int64)
    texts = [_binary(columns.prompt), _binary(columns.first), _binary(columns.second)]
    if columns.extra is not None:
        texts.append(_binary(columns.extra))
    which = [0 * keep, 1 + swapped, 2 - swapped, 3 + 0 * keep][: len(texts)]  # the text's place in `texts`
    sizes = np.stack([np.diff(_buffers(text)[0]) for text in texts])
    for place, source in enumerate(which):
        keys["lengths"][:, place] = sizes[source, keep]
    header = np.zeros((rows, HEADER_BYTES), np.uint8)
    header[:, :8] = np.frombuffer(ID_DOMAIN + columns.kind, np.uint8)
    header[:, 8:] = keys["lengths"][:, :3].astype(">u8").view(np.uint8).reshape(rows, 24)
    ends = np.arange(rows + 1, dtype=np.int64) * HEADER_BYTES
    headers = pa.Array.from_buffers(pa.large_binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(header)])
    order = np.empty((rows, 1 + len(texts)), np.int64)
    order[:, 0] = np.arange(rows)
    for place, source in enumerate(which, 1):
        order[:, place] = rows + source * sizes.shape[1] + keep
    flat = pa.concat_arrays([headers, *texts]).take(arrow_places(order.ravel()))
    offsets, _ = _buffers(flat)
    return flat.buffers()[2], offsets[:: 1 + len(texts)]


def _record_ids(blob: pa.Buffer, starts: npt.NDArray[np.int64], lengths: npt.NDArray[Any]) -> Bytes:
    """SHA-256 of header and the three texts of each row: (n, 32)."""
    view, sha256 = memoryview(blob), hashlib.sha256
    ends = starts[:-1] + HEADER_BYTES + lengths[:, :3].sum(axis=1, dtype=np.int64)
    parts = []
    for begin in range(0, len(lengths), HASH_ROWS):
        bounds = zip(starts[begin : begin + HASH_ROWS].tolist(), ends[begin : begin + HASH_ROWS].tolist(), strict=False)
        parts.append(b"".join([sha256(view[start:end]).digest() for start, end in bounds]))
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 32)


def name_events(keys: Keys, people: Sequence[str] | None, answers: Sequence[str] | None, prf: Prf) -> None:
    """Names the events of the keys: by record, labeller and event id. An empty name counts as absent: a column may name
    only some rows' labellers."""
    names = id_bytes(keys)
    keys["root"] = _roots(prf, names, [event_suffix(None, None)] * len(keys))
    keys["record"] = keys["root"][:, _TAG]
    if people is None and answers is None:
        return
    labelers, events = (
        [None] * len(keys) if column is None else [name or None for name in column] for column in (people, answers)
    )
    keys["root"] = _roots(prf, names, [event_suffix(*pair) for pair in zip(labelers, events, strict=True)])
    tags = {name: prf.block(LABELER_DOMAIN, name.encode())[:16] for name in set(labelers) if name is not None}
    joined = b"".join(bytes(16) if name is None else tags[name] for name in labelers)
    keys["labeler"] = np.frombuffer(joined, np.uint8).reshape(-1, 16)


def id_bytes(keys: Keys) -> list[bytes]:
    """The record ids, of 32 bytes each."""
    return keys["id"].astype(">u8").view("V32").ravel().tolist() if len(keys) else []


def _roots(prf: Prf, names: list[bytes], suffixes: list[bytes]) -> Bytes:
    """The roots (n, 48) of events named by record id and suffix."""
    blocks = []
    for begin in range(0, len(names), HASH_ROWS):
        part = slice(begin, begin + HASH_ROWS)
        messages = [name + end for name, end in zip(names[part], suffixes[part], strict=True)]
        blocks.append(prf.blocks(DOMAIN, messages))
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, 48)


def _sorted(
    keys: Keys, blob: pa.Buffer, starts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
) -> tuple[Keys, pa.Buffer]:
    rows = pa.Array.from_buffers(pa.large_binary(), len(keys), [None, pa.py_buffer(np.ascontiguousarray(starts)), blob])
    gathered = rows.take(arrow_places(order))
    keys = keys[order]
    offsets, _ = _buffers(gathered)
    keys["start"] = offsets[:-1]
    return keys, gathered.buffers()[2] if len(keys) else pa.py_buffer(b"")


def event_tags(keys: Keys) -> Bytes:
    """The events' names in the owner's store, (n, 16): the id's first byte, then 15 bytes of the root.

    The first byte makes the store's partitions ranges of record ids. The others are uniform (120 bits) and used for
    nothing else.
    """
    return np.concatenate([_first_byte(keys), keys["root"][:, _TAG]], axis=1)


def record_tags(keys: Keys) -> Bytes:
    """The records' names in the owner's store, (n, 16): the tags of their events without names."""
    return np.concatenate([_first_byte(keys), keys["record"]], axis=1)


def record_tags_under(prf: Prf, keys: Keys) -> Bytes:
    """`record_tags` as another key names the records: (n, 16)."""
    names = id_bytes(keys)
    roots = _roots(prf, names, [event_suffix(None, None)] * len(names))
    return np.concatenate([_first_byte(keys), roots[:, _TAG]], axis=1)


def blinds(keys: Keys) -> Signs:
    """The keyed sign of each event, -1 or +1, that its label has in the owner's store; a bit of the root for
    nothing besides."""
    return (1 - (keys["root"][:, 47] & 2)).astype(np.int8)


def tie_coins(keys: Keys) -> Signs:
    """The fair coin of each event, -1 or +1, in the place of a label that was a tie; a bit of the root for
    nothing besides."""
    return (1 - (keys["root"][:, 47] & 4) // 2).astype(np.int8)


def _first_byte(keys: Keys) -> Bytes:
    return (keys["id"][:, :1] >> _U64(56)).astype(np.uint8)


def event_order(keys: Keys) -> npt.NDArray[np.int64]:
    """The rows in the order (record id, event tag, position in the input)."""
    lead = keys["id"][:, 0]
    order = np.argsort(lead, kind="stable")
    ranked = lead[order]
    equal = ranked[1:] == ranked[:-1]
    tied = np.zeros(len(keys), bool)
    tied[1:] = equal
    tied[:-1] |= equal
    if tied.any():
        rows = order[tied]
        some = keys[rows]
        tags = np.ascontiguousarray(event_tags(some)).view(">u8").astype(np.uint64)
        ids = some["id"]
        columns = (some["position"], tags[:, 1], tags[:, 0], ids[:, 3], ids[:, 2], ids[:, 1], ids[:, 0])
        order[tied] = rows[np.lexsort(columns)]
    return order


def first_of_each(keys: Keys) -> Bools:
    """Mask of the first row of each record and event, of rows in `event_order`."""
    tags = np.ascontiguousarray(event_tags(keys)).view(">u8")
    new = np.ones(len(keys), bool)
    new[1:] = (keys["id"][1:] != keys["id"][:-1]).any(axis=1) | (tags[1:] != tags[:-1]).any(axis=1)
    return new


def a_is_lower(keys: Keys) -> Bools:
    """Mask of the rows whose response_a is the lower of the two texts."""
    return (keys["id"][:, 3] & _U64(1)) == 0


def release_labels(mechanism: RandomizedResponse | LevelledResponse, prf: Prf, keys: Keys) -> Signs:
    """z in {-1, +1} of every row, as `release` of its level on its event and label, which UserError is for as there."""
    _check_labels(keys["label"])
    return apply_coins(mechanism, prf, keys)


def apply_coins(mechanism: RandomizedResponse | LevelledResponse, prf: Prf, keys: Keys) -> Signs:
    """`release_labels` without its check: a label of 0 stays 0 where no coin decides, and so shows that none does."""
    if isinstance(mechanism, RandomizedResponse):
        return _coins(mechanism, prf, keys)
    z = np.zeros_like(keys["label"])
    for number, level in enumerate(mechanism.levels):
        rows = np.flatnonzero(keys["level"] == number)
        z[rows] = _coins(level, prf, keys[rows])
    return z


def _coins(mechanism: RandomizedResponse, prf: Prf, keys: Keys) -> Signs:
    threshold = mechanism.threshold
    if threshold == 0:
        return np.where(keys["root"][:, 47] & 1, 1, -1).astype(np.int8)
    octave = threshold.bit_length() - 1
    words = np.ascontiguousarray(keys["root"][:, :32]).view(">u8").astype(np.uint64)  # visited: 2 words, coins: 2
    z = keys["label"].copy()
    for half, base in ((0, 64), (1, 0)):  # octaves 127-64, then 63-0: the lowest one that is visited decides
        above = words[:, half] & _U64(_LOW & -(1 << max(0, octave + 1 - base)))
        lowest = above & (~above + _U64(1))
        hit = lowest != 0
        z[hit] = np.where(words[hit, 2 + half] & lowest[hit], 1, -1)
    half, bit = (0, octave - 64) if octave >= 64 else (1, octave)
    walkers = np.flatnonzero(words[:, half] >> _U64(bit) & _U64(1))
    lowest_coin = np.where(words[walkers, 2 + half] >> _U64(bit) & _U64(1), 1, -1)
    roots: list[bytes] = np.ascontiguousarray(keys["root"][walkers]).view("V48").ravel().tolist()
    coins = _walk(prf, roots, octave, threshold, lowest_coin.astype(np.int8))
    z[walkers[coins != 0]] = coins[coins != 0]
    return z


def _check_labels(labels: Signs) -> None:
    if not bool((np.abs(labels) == 1).all()):
        raise UserError(LABEL_RULE)


def _walk(prf: Prf, roots: list[bytes], octave: int, threshold: int, lowest_coin: Signs) -> Signs:
    """The coin of the lowest visit >= threshold in a visited octave, 0 if there is none. See `Coins.walk`."""
    bottom = _wide(1 << octave)
    result = np.zeros(len(roots), np.int8)
    bound = np.zeros((len(roots), 2), np.uint64)  # the lowest visit so far, zero before the first; as (high, low) words
    coin = np.zeros(len(roots), np.int8)  # of the lowest visit >= threshold so far
    active = np.arange(len(roots))
    counter = 0
    while len(active):
        end = walk_counter(octave, counter)
        data = b"".join(
            prf.blocks(WALK_DOMAIN, [roots[row] + end for row in active[start : start + HASH_ROWS]])
            for start in range(0, len(active), HASH_ROWS)
        )
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 48)
        rows = np.arange(len(active))
        for which in (0, 1):
            word = np.ascontiguousarray(blocks[rows, 16 * which : 16 * which + 16]).view(">u8").astype(np.uint64)
            try_coin = (2 * (blocks[rows, 32 + which] & 1).astype(np.int8) - 1).astype(np.int8)
            at = active[rows]
            if counter == which == 0:
                level, taken = (word & _wide((1 << octave) - 1)) | bottom, np.ones(len(at), bool)
            else:
                level = word & _mask_below(bound[at])
                taken = _less(level, bound[at])
            below = taken & _less(level, _wide(threshold))
            ended = taken & _less(level, bottom)
            result[at[below]] = np.where(ended & (coin[at] != 0), lowest_coin[at], coin[at])[below]
            going = taken & ~below
            coin[at[going]], bound[at[going]] = try_coin[going], level[going]
            rows = rows[~below]
        active = active[rows]
        counter += 1
    return result


def _wide(number: int) -> Words:
    """A number below 2^128 as (high, low) words."""
    return np.array([number >> 64, number & _LOW], np.uint64)


def _less(first: Words, second: Words) -> Bools:
    high = first[..., 0] < second[..., 0]
    return high | ((first[..., 0] == second[..., 0]) & (first[..., 1] < second[..., 1]))


def _mask_below(bound: Words) -> Words:
    """2^bits - 1 where `bits` is the bit length of bound - 1; bound >= 1."""
    low = bound[:, 1] - _U64(1)
    high = bound[:, 0] - (bound[:, 1] == 0).astype(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        high, low = high | high >> _U64(shift), low | low >> _U64(shift)
    return np.stack([high, np.where(high != 0, _U64(_LOW), low)], axis=1)
