"""Attacks on ids: is an id a plain digest of the texts in an order that the label decides? Leak 5."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.view import Table, View
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import ID_DOMAIN, Text, encode_text, text_kind

SAMPLE = 24  # rows on which every recipe is tried; one hit in them is enough for all rows to be tried
LEAST_DIGITS = 8
_SEPARATORS = (*("", "\n", "\n\n", "\t", " ", "|", "||", "|||", ",", ":", "::", ";"), *"-_#", "###", *"\0\x1e\x1f")

Recipe = Callable[[Text, Text, Text], bytes]  # prompt, preferred, other -> what is digested


def _raw(text: Text) -> str:
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _joined(separator: str, with_prompt: bool) -> Recipe:
    def recipe(prompt: Text, one: Text, two: Text) -> bytes:
        parts = [_raw(prompt)] * with_prompt + [_raw(one), _raw(two)]
        return separator.join(parts).encode()

    return recipe


_SHAPES: dict[str, Callable[[Text, Text, Text], Any]] = {
    "object": lambda prompt, one, two: {"prompt": prompt, "chosen": one, "rejected": two},
    "object of two": lambda _, one, two: {"chosen": one, "rejected": two},
    "list": lambda *texts: list(texts),
    "list of two": lambda _, one, two: [one, two],
}


def _as_json(build: Callable[[Text, Text, Text], Any], sort: bool, ascii_only: bool, tight: bool) -> Recipe:
    separators = (",", ":") if tight else None

    def recipe(prompt: Text, one: Text, two: Text) -> bytes:
        value = build(prompt, one, two)
        return json.dumps(value, sort_keys=sort, ensure_ascii=ascii_only, separators=separators).encode()

    return recipe


def _record(prompt: Text, one: Text, two: Text) -> bytes:
    """What `record_id` digests, but for the order of the responses."""
    texts = [encode_text(text) for text in (prompt, one, two)]
    return ID_DOMAIN + text_kind(prompt) + b"".join(len(text).to_bytes(8, "big") for text in texts) + b"".join(texts)


def recipes() -> dict[str, Recipe]:
    """Every serialisation that is tried, by name. Each depends on which response comes first."""
    made: dict[str, Recipe] = {}
    for separator, with_prompt in product(_SEPARATORS, (True, False)):
        made[f"{'prompt, ' * with_prompt}two responses joined by {separator!r}"] = _joined(separator, with_prompt)
    for sort, ascii_only, tight in product((False, True), repeat=3):
        tail = f"(sort_keys={sort}, ensure_ascii={ascii_only}, compact={tight})"
        for shape, build in _SHAPES.items():
            made[f"JSON {shape} {tail}"] = _as_json(build, sort, ascii_only, tight)
    made["repr of a tuple"] = lambda *texts: repr(texts).encode()
    made["repr of a list"] = lambda *texts: repr(list(texts)).encode()
    made["framed texts"] = lambda *texts: b"".join(frame(_raw(text).encode()) for text in texts)
    made["framed encodings"] = lambda *texts: b"".join(frame(encode_text(text)) for text in texts)
    made["this program's records, their responses unsorted"] = _record
    made["prompt and preferred response"] = lambda prompt, one, _: (_raw(prompt) + _raw(one)).encode()
    made["prompt, line break, preferred response"] = lambda prompt, one, _: f"{_raw(prompt)}\n{_raw(one)}".encode()
    made["preferred response"] = lambda _, one, __: _raw(one).encode()
    made["other response"] = lambda _, __, two: _raw(two).encode()
    return made


_HASHES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "blake2b", "blake2s", "sha3_256")
_NAMESPACES = (uuid.NAMESPACE_DNS, uuid.NAMESPACE_URL, uuid.NAMESPACE_OID, uuid.NAMESPACE_X500)


def digests(message: bytes) -> Iterator[str]:
    """The message's digests as hexadecimal digits: of common hashes (also short BLAKE2) and of name-based UUIDs."""
    for name in _HASHES:
        yield hashlib.new(name, message, usedforsecurity=False).hexdigest()
    for size in (8, 16, 20, 32):
        yield hashlib.blake2b(message, digest_size=size).hexdigest()
    for space in _NAMESPACES:
        yield uuid.uuid5(space, message.decode("utf-8", "replace")).hex


def _is_digest_of(value: str, message: bytes) -> bool:
    """Whether the id is (the start of) one of the message's digests."""
    return any(digest.startswith(value) for digest in digests(message))


def ids(view: View) -> Iterator[Guesses]:
    """For each id column: find the serialisation whose digest it is, then read each row's label off its order."""
    available = recipes()
    for table in view.tables:
        for name, values in id_columns(table).items():
            for label, recipe in _fitting(view, table, values, available).items():
                yield _read_off(view, table, f"{table.name}: {name} is a digest of {label}", values, recipe)


def id_columns(table: Table) -> dict[str, list[str]]:
    """Columns of hexadecimal strings (dashes and a prefix of letters such as `pair-` removed), as digits."""
    found = {}
    for name, values in table.columns.items():
        plain = [_digits(value) for value in values]
        if plain and all(digits is not None for digits in plain[:SAMPLE]):
            found[name] = [digits or "" for digits in plain]
    return found


def _digits(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    text = value.lower().replace("-", "").replace("_", "")
    text = text.split(":")[-1]
    while text and text[0] not in "0123456789abcdef":
        text = text[1:]
    good = len(text) >= LEAST_DIGITS and all(digit in "0123456789abcdef" for digit in text)
    return text if good else None


def _fitting(view: View, table: Table, values: Sequence[str], available: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes that explain at least one id of the first rows, in either order of the responses; not those that
    explain all of them in one order, which is then that of the texts and tells nothing."""
    found: dict[str, Recipe] = {}
    sample = list(zip(table.event, values, strict=True))[:SAMPLE]
    rows = [(value, view.prompts[event], view.first[event], view.second[event]) for event, value in sample]
    for value, prompt, one, two in rows:
        for name, recipe in available.items():
            if name not in found and any(_tries(recipe, value, prompt, *pair) for pair in ((one, two), (two, one))):
                found[name] = recipe
    return {
        name: recipe
        for name, recipe in found.items()
        if not all(_tries(recipe, value, prompt, one, two) for value, prompt, one, two in rows)
        and not all(_tries(recipe, value, prompt, two, one) for value, prompt, one, two in rows)
    }


def _tries(recipe: Recipe, value: str, prompt: Text, one: Text, two: Text) -> bool:
    try:
        return _is_digest_of(value, recipe(prompt, one, two))
    except (TypeError, UnicodeEncodeError):
        return False


def _read_off(view: View, table: Table, variant: str, values: Sequence[str], recipe: Recipe) -> Guesses:
    events, labels = [], []
    for event, value in zip(table.event, values, strict=True):
        prompt, one, two = view.prompts[event], view.first[event], view.second[event]
        forward, backward = _tries(recipe, value, prompt, one, two), _tries(recipe, value, prompt, two, one)
        if forward != backward:
            events.append(event)
            labels.append(1 if forward else -1)
    return Guesses("ids", variant, np.array(events, dtype=np.int64), np.array(labels, dtype=np.int8))
