"""Canonical preference records: an order and an id that are symmetric functions of the unordered pair.

Everything here treats the two responses alike until the last step, where `label` says which of the two canonically
ordered responses was preferred. Swapping chosen and rejected in the input therefore changes `label` and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from private_rlhf.privacy.prf import frame

CANONICALISATION = 2  # part of every manifest; raise it when an order, an id or a drop rule below changes
ID_DOMAIN = b"record2"  # 7 bytes; then the kind of text, 1 byte, and the lengths of the three texts
TEXT, MESSAGES = b"T", b"M"  # the kinds of text
HEADER_BYTES = 8 + 3 * 8
PREFIX_BITS = 12  # of a record id, the most by which rows are divided into buckets or shards
_ABSENT = frame(b"-")

Message = dict[str, Any]
"""role, content: texts; further keys are JSON values."""
Text = str | list[Message]


class RawPair(NamedTuple):
    """One row as read, number `row` (from 1): the *true* preference, for the privatise stage and public labels only."""

    prompt: Text
    chosen: Text
    rejected: Text
    row: int = 0


class PreferenceRecord(NamedTuple):
    """A pair in canonical order with its true label: +1 if response_a was preferred, -1 if response_b was."""

    record_id: str
    prompt: Text
    response_a: Text
    response_b: Text
    label: int


def encode_text(text: Text) -> bytes:
    """UTF-8 of a string, or of the messages' canonical JSON; injective among texts of one kind (see `text_kind`).

    UnicodeEncodeError on a lone surrogate, which no UTF-8 file can hold.
    """
    if isinstance(text, str):
        return text.encode()
    turns = [[turn["role"], turn["content"], *filter(None, [further_keys(turn)])] for turn in text]
    return to_json(turns).encode()


def decode_messages(data: bytes | str) -> list[Message]:
    """The inverse of `encode_text` for messages."""
    return [{"role": role, "content": content, **dict(*further)} for role, content, *further in json.loads(data)]


def to_json(value: Any) -> str:
    """The canonical JSON of a value; keys of objects stay in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def further_keys(message: Message) -> dict[str, Any]:
    """The keys of a message beside its role and content, such as tool calls."""
    return {key: message[key] for key in sorted(message.keys() - {"role", "content"})} if len(message) > 2 else {}


def message_text(message: Message) -> str:
    """The content of a message, then the canonical JSON of its further keys."""
    return "\n".join([message["content"], *map(to_json, filter(None, [further_keys(message)]))])


def text_kind(text: Text) -> bytes:
    """TEXT or MESSAGES."""
    return TEXT if isinstance(text, str) else MESSAGES


def is_blank(text: Text) -> bool:
    """True for no characters besides white space; for messages, in none of them, or in a turn of the assistant."""
    if isinstance(text, str):
        return not text or text.isspace()
    blank = [not further_keys(turn) and is_blank(turn["content"]) for turn in text]
    return all(blank) or any(turn["role"] == "assistant" for turn, empty in zip(text, blank, strict=True) if empty)


def canonical_record(prompt: Text, chosen: Text, rejected: Text) -> PreferenceRecord | None:
    """The canonical record, or None if the two responses are identical.

    The id is the SHA-256 (hex) of domain, kinds, the three lengths (8 bytes each) and the three encoded texts, the two
    responses in the order of their bytes: it depends only on the unordered pair. response_a is the first in that order
    if the id is even, else the second, so that the order has nothing to do with what the texts say either.
    """
    first, second = encode_text(chosen), encode_text(rejected)
    kinds = {text_kind(prompt), text_kind(chosen), text_kind(rejected)}
    if first == second:
        return None
    context = encode_text(prompt)
    low, high = min(first, second), max(first, second)
    lengths = b"".join(len(text).to_bytes(8, "big") for text in (context, low, high))
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind is None:
        raise ValueError("prompt and responses are texts of one kind")
    digest = hashlib.sha256(ID_DOMAIN + kind + lengths + context + low + high)
    odd = digest.digest()[-1] & 1
    if (first == low) != odd:
        return PreferenceRecord(digest.hexdigest(), prompt, chosen, rejected, 1)
    return PreferenceRecord(digest.hexdigest(), prompt, rejected, chosen, -1)


def record_id(prompt: Text, responses: Sequence[Text]) -> str:
    """The public id of an unordered pair. ValueError if there are not two different responses."""
    record = canonical_record(prompt, *responses) if len(responses) == 2 else None
    if record is None:
        raise ValueError("a pair has two different responses")
    return record.record_id


def bucket_bits(rows: int, per_bucket: int) -> int:
    """log2 of the number of buckets: the least that leaves at most `per_bucket` rows in one on average, up to 2^12."""
    return min(PREFIX_BITS, max(0, (-(-rows // per_bucket) - 1).bit_length()))


def fold_name(name: str) -> str:
    """The spelling that stands for all spellings of a labeller's name: without format characters (Unicode category Cf),
    in NFKC, casefolded, with single spaces between words. It is its own fold."""
    if not name.isascii():
        name = "".join(character for character in name if unicodedata.category(character) != "Cf")
        name = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(name.casefold().split())


def event_bytes(record_id: str, labeler: str | None = None, event: str | None = None) -> bytes:
    """The PRF's name of one labelling event: record, labeller and event id; absent (None) differs from empty.

    Injective: 32 bytes of record id, then two framed fields. Events that differ in any of the three get independent
    bits (design: two labels, one flip).
    """
    return bytes.fromhex(record_id) + event_suffix(labeler, event)


def event_suffix(labeler: str | None, event: str | None) -> bytes:
    """The part of `event_bytes` after the record id."""
    return b"".join(_ABSENT if part is None else frame(b"+" + part.encode()) for part in (labeler, event))
