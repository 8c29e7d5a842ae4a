"""Canonical preference records: an order and an id that are symmetric functions of the unordered pair.

Everything here treats the two responses alike until the last step, where `label` says which of the two canonically
ordered responses was preferred. Swapping chosen and rejected in the input therefore changes `label` and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.privacy.prf import frame

CANONICALISATION = 1  # part of every manifest; raise it when an order, an id or a drop rule below changes
_RESPONSE_DOMAIN = frame(b"private-rlhf/response/v1")
_RECORD_DOMAIN = frame(b"private-rlhf/record/v1")
_ABSENT = frame(b"-")

Message = dict[str, str]
Text = str | list[Message]


class RawPair(NamedTuple):
    """One row as read: the *true* preference. Lives in the privatise stage (and where labels are declared public) only.

    Each text is a string or a list of {"role", "content"} messages. `row` is the row's number in its file, from 1.
    """

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


class PrivateRecord(NamedTuple):
    """A pair in canonical order with the released label z (same meaning as above). Has no field for the true label."""

    record_id: str
    prompt: Text
    response_a: Text
    response_b: Text
    private_label: int


def encode_text(text: Text) -> bytes:
    """An injective encoding: a tag, then UTF-8 of the string, or of the messages' canonical JSON.

    UnicodeEncodeError on a lone surrogate, which no UTF-8 file can hold.
    """
    if isinstance(text, str):
        return b"T" + text.encode()
    turns = [[message["role"], message["content"]] for message in text]
    return b"M" + json.dumps(turns, ensure_ascii=False, separators=(",", ":")).encode()


def is_blank(text: Text) -> bool:
    """No characters besides white space; for messages, in none of them."""
    if isinstance(text, str):
        return not text or text.isspace()
    return all(is_blank(message["content"]) for message in text)


def canonical_record(prompt: Text, chosen: Text, rejected: Text) -> PreferenceRecord | None:
    """The canonical record, or None if the two responses are identical.

    response_a is the response with the smaller SHA-256 of the encoded (prompt, response); the id is the SHA-256 (hex)
    of the two digests in that order, so both depend on the unordered pair alone. Equal digests mean equal responses
    (collisions of SHA-256 aside).
    """
    stem = hashlib.sha256(_RESPONSE_DOMAIN + frame(encode_text(prompt)))
    hash_chosen, hash_rejected = stem.copy(), stem
    hash_chosen.update(encode_text(chosen))
    hash_rejected.update(encode_text(rejected))
    digest_chosen, digest_rejected = hash_chosen.digest(), hash_rejected.digest()
    if digest_chosen < digest_rejected:
        record_id = hashlib.sha256(_RECORD_DOMAIN + digest_chosen + digest_rejected).hexdigest()
        return PreferenceRecord(record_id, prompt, chosen, rejected, 1)
    if digest_chosen > digest_rejected:
        record_id = hashlib.sha256(_RECORD_DOMAIN + digest_rejected + digest_chosen).hexdigest()
        return PreferenceRecord(record_id, prompt, rejected, chosen, -1)
    return None


def record_id(prompt: Text, responses: Sequence[Text]) -> str:
    """The public id of an unordered pair. ValueError if there are not two different responses."""
    record = canonical_record(prompt, *responses) if len(responses) == 2 else None
    if record is None:
        raise ValueError("a pair has two different responses")
    return record.record_id


def event_bytes(record_id: str, labeler: str | None = None, event: str | None = None) -> bytes:
    """The PRF's name of one labelling event: record, labeller and event id; absent (None) differs from empty.

    Events that differ in any of the three get independent bits (design: two labels, one flip).
    """
    name = frame(record_id.encode())
    for part in (labeler, event):
        name += _ABSENT if part is None else frame(b"+" + part.encode())
    return name
