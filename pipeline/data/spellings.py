"""Keyed tags of the letters and digits of pairs, by which the ledger knows a pair again in another spelling.

A pair's tag is of prompt and answer together, for both answers in an order of their own: white space, case,
punctuation, zero-width characters, message forms and the place where the prompt ends change nothing of it (`letters`).
The first `WHOLE` rows of a source have tags, and of the others those, one in 32, that the last letters of their answers
pick: reading the letters of every row would slow each release.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
from private_rlhf.data.letters import is_dressed, plain_ascii, turns
from private_rlhf.privacy.batches import Bools, Bytes, Canonical, Keys
from private_rlhf.privacy.events import NOT_TAGGED
from private_rlhf.privacy.prf import Prf, frame
from private_rlhf.privacy.records import HEADER_BYTES, MESSAGES, TEXT, Text, decode_messages

WHOLE = 2048
PICKED_BITS = 5  # one row in 2^5
TAIL_BYTES, TAIL_LETTERS = 16, 4  # where the last letters of an answer are looked for, and how many count
LETTERS_DOMAIN = b"letters/v1"
Places = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
_NUMBERS = np.arange(256, dtype=np.uint32)
_IS_LATIN = np.char.isalnum(_NUMBERS.astype(np.uint8).view("S1")) & (_NUMBERS < 128)
# numbers of bytes that ignore case, 0 for bytes that are left out: of Latin text, and of other scripts (the last bits
# of what follows the first byte of a character are those of its letter, in either case)
_LATIN, _OTHER = (
    np.where(keep, 1 + (_NUMBERS & 31) + (_NUMBERS & 64), 0).astype(np.uint32)
    for keep in (_IS_LATIN, _NUMBERS >> 6 == 2)
)


def letter_tags(rows: Canonical, kind: bytes, prf: Prf) -> npt.NDArray[np.uint64]:
    """(n,) tags of the rows: `NOT_TAGGED` for those that have none. kind: `records.TEXT` or `MESSAGES`."""
    keys = rows.keys
    tags = np.full(len(keys), NOT_TAGGED, np.uint64)
    chosen = np.flatnonzero((keys["position"] < WHOLE) | _picked(keys, np.frombuffer(rows.blob, np.uint8)))
    if len(chosen):
        blocks = prf.blocks(LETTERS_DOMAIN, _pairs(keys[chosen], memoryview(rows.blob), kind))
        words = np.frombuffer(blocks, "<u8").reshape(len(chosen), -1)[:, 0]
        tags[chosen] = np.maximum(words, NOT_TAGGED + 1)
    return tags


def _pairs(keys: Keys, view: memoryview, kind: bytes) -> Iterator[bytes]:
    """The letters and digits of each pair."""
    stops = np.cumsum(keys["lengths"][:, :3], axis=1, dtype=np.int64)
    for start, (first, second, end) in zip(keys["start"].tolist(), stops.tolist(), strict=True):
        row = bytes(view[start + HEADER_BYTES : start + HEADER_BYTES + end])
        read = partial(_letters, kind=kind) if kind == MESSAGES or is_dressed(row) else plain_ascii
        prompt = read(row[:first])
        lower, higher = sorted((prompt + read(row[first:second]), prompt + read(row[second:])))
        yield frame(lower) + higher


def _letters(data: bytes, kind: bytes) -> bytes:
    text: Text = data.decode() if kind == TEXT else decode_messages(data)
    return "".join(content for _, content in turns(text)).encode()


def _picked(keys: Keys, data: Bytes) -> Bools:
    """Mask of the rows that the last letters of their two answers pick, whichever of them is the lower."""
    prompt, low, high = (keys["lengths"][:, place].astype(np.int64) for place in range(3))
    body = keys["start"].astype(np.int64) + HEADER_BYTES
    both = np.zeros(len(keys), np.uint32)
    for end, length in ((body + prompt + low, low), (body + prompt + low + high, high)):
        sums, found = np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint8)
        for codes, start, size, enough in (
            (_LATIN, end, length, TAIL_LETTERS),
            (_LATIN, body + prompt, prompt, TAIL_LETTERS),
            (_OTHER, end, length, 1),
        ):
            some = np.flatnonzero(found < enough)
            sums[some], found[some] = _add_tail(codes, data, start[some], size[some], sums[some], found[some])
        both += _mixed(sums)
    picked: Bools = _mixed(both) >> np.uint32(32 - PICKED_BITS) == 0
    return picked


def _add_tail(
    codes: npt.NDArray[np.uint32], data: Bytes, end: Places, length: Places, sums: Words, found: npt.NDArray[np.uint8]
) -> tuple[Words, npt.NDArray[np.uint8]]:
    """The sums and counts with the last letters before `end`, up to `TAIL_LETTERS` in all."""
    for first in range(1, TAIL_BYTES, 4):
        some = np.flatnonzero((found < TAIL_LETTERS) & (length >= first))
        ends, lengths, words, counts = end[some], length[some], sums[some], found[some]
        for back in range(first, first + 4):
            code = codes[data[ends - back]]  # inside: a header comes before every text
            take = (code != 0) & (lengths >= back) & (counts < TAIL_LETTERS)
            words = np.where(take, words * np.uint32(131) + code, words)
            counts = counts + take
        sums[some], found[some] = words, counts
    return sums, found


def _mixed(words: Words) -> Words:
    """Bits of all places in every place (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ words >> np.uint32(shift)) * np.uint32(factor)
    return words ^ words >> np.uint32(16)
