"""Whole columns against the plain functions, bit for bit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.privacy.batches import (
    KEYS,
    Canonical,
    Columns,
    Keys,
    a_is_lower,
    blank_texts,
    blinds,
    canonicalize,
    event_order,
    event_tags,
    first_of_each,
    record_tags,
    release_labels,
)
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.prf import Prf
from private_rlhf.privacy.records import (
    HEADER_BYTES,
    MESSAGES,
    TEXT,
    Text,
    canonical_record,
    encode_text,
    event_bytes,
    is_blank,
)

PRF = Prf(bytes(range(32)))
ODD = ["", " ", "\u2003\n", "\x1c", "a", "é", "\U0001f600", "a\0", "\0", "    b"]
words = st.text(max_size=5) | st.sampled_from(ODD)
rows = st.lists(st.tuples(words, words, words, st.booleans()), max_size=12)


def columns_of(table: list[tuple[Text, Text, Text, bool]], kind: bytes = TEXT) -> Columns:
    def column(place: int) -> pa.Array:
        return pa.array([encode_text(row[place]).decode() for row in table], pa.large_string())

    blank = np.array([any(is_blank(text) for text in row[:3]) for row in table], bool)
    preferred = np.array([1 if row[3] else -1 for row in table], np.int8)
    return Columns(column(0), column(1), column(2), preferred, kind, blank)


def hexadecimal(key: Keys) -> str:
    return "".join(f"{int(word):016x}" for word in key["id"])


def texts_of(made: Canonical, key: Keys) -> list[bytes]:
    data, start = bytes(made.blob), int(key["start"]) + HEADER_BYTES
    texts = []
    for length in key["lengths"]:
        texts.append(data[start : start + int(length)])
        start += int(length)
    return texts


def check_against_plain(table: list[tuple[Text, Text, Text, bool]], made: Canonical) -> None:
    identical = empty = 0
    expected = {}
    for place, (prompt, first, second, first_preferred) in enumerate(table):
        record = canonical_record(prompt, *((first, second) if first_preferred else (second, first)))
        if record is None:
            identical += 1
        elif any(map(is_blank, (prompt, first, second))):
            empty += 1
        else:
            expected[place + 7] = record
    assert (made.identical, made.empty) == (identical, empty)
    assert {int(key["position"]) for key in made.keys} == expected.keys()
    ids = [hexadecimal(key) for key in made.keys]
    assert ids == sorted(ids)
    for key in made.keys:
        record = expected[int(key["position"])]
        assert (hexadecimal(key), int(key["label"])) == (record.record_id, record.label)
        context, low, high, extra = texts_of(made, key)
        assert (context, extra) == (encode_text(record.prompt), b"")
        ordered = [low, high] if a_is_lower(key.reshape(1))[0] else [high, low]
        assert [encode_text(record.response_a), encode_text(record.response_b)] == ordered


@given(rows)
def test_strings_as_the_plain_records(table: list[tuple[str, str, str, bool]]) -> None:
    check_against_plain(table, canonicalize(columns_of(table), 7, PRF))


@given(rows)
def test_messages_as_the_plain_records(table: list[tuple[str, str, str, bool]]) -> None:
    turns = [
        (*([{"role": "user", "content": text}] if text else [] for text in row[:3]), row[3]) for row in table
    ]
    check_against_plain(turns, canonicalize(columns_of(turns, MESSAGES), 7, PRF))


@given(st.lists(words))
def test_blank_as_the_plain_function(texts: list[str]) -> None:
    for kind in (pa.string(), pa.large_string()):
        assert blank_texts(pa.array(texts, kind)).tolist() == [is_blank(text) for text in texts]
        shifted = pa.array(["x", *texts], kind).slice(1)
        assert blank_texts(shifted).tolist() == [is_blank(text) for text in texts]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("epsilon", [1e-300, 1e-39, 1e-6, 0.1, 0.5, 1.0, 2.0, 10.0, 37.0, 50.0, 200.0])
def test_releases_as_the_plain_mechanism(epsilon: float, named: bool) -> None:
    """2,000 events. At these epsilon the threshold lies in octaves from none to 127, on both halves of the word."""
    table = [(f"p{i}", "yes", "no", i % 3 == 0) for i in range(2000)]
    columns = columns_of(table)
    who, which = [f"w{i % 7}" for i in range(2000)], [f"{i % 2}" for i in range(2000)]
    if named:
        columns.labelers, columns.events = who, which
        columns.corrects = np.arange(2000) % 3 == 0  # a corrected label draws coins of its own
    keys = canonicalize(columns, 0, PRF).keys
    mechanism = RandomizedResponse(epsilon)
    released = release_labels(mechanism, PRF, keys)
    for key, z in zip(keys, released, strict=True):
        row = int(key["position"])
        event = event_bytes(hexadecimal(key), *((who[row], which[row]) if named else (None, None)))
        assert mechanism.release(PRF, event, int(key["label"])) == z


def test_a_walk_over_several_blocks_as_the_plain_mechanism() -> None:
    """epsilon 1e-36 puts the threshold into octave 7: walks of many short steps, of which some need a second block."""
    keys = canonicalize(columns_of([(f"p{i}", "yes", "no", True) for i in range(3000)]), 0, PRF).keys
    for threshold in (1 << 7, (1 << 7) + 1, (1 << 8) - 1, 1, 2, 3):
        mechanism = RandomizedResponse(1.0)
        object.__setattr__(mechanism, "threshold", threshold)
        released = release_labels(mechanism, PRF, keys)
        plain = [mechanism.release(PRF, event_bytes(hexadecimal(key)), int(key["label"])) for key in keys]
        assert released.tolist() == plain


def test_tags_name_events_and_begin_with_the_record() -> None:
    columns = columns_of([("p", "a", "b", True)] * 5)
    columns.labelers, columns.events = ["ann", "ann", "bob", "", "ann"], ["1", "2", "1", "1", "1"]
    keys = canonicalize(columns, 0, PRF).keys
    tags = event_tags(keys)
    assert tags[:, 0].tolist() == [int(hexadecimal(keys[0])[:2], 16)] * 5
    assert len({bytes(tag) for tag in tags}) == 4
    by_place = {int(key["position"]): bytes(tag) for key, tag in zip(keys, tags, strict=True)}
    assert by_place[0] == by_place[4]
    who = {int(key["position"]): bytes(key["labeler"]) for key in keys}
    assert who[0] == who[1] == who[4] != who[2]
    assert who[3] == bytes(16) != who[2]  # an empty name is none: the record's event without a labeller
    records = {bytes(tag) for tag in record_tags(keys)}
    plain = canonicalize(columns_of([("p", "a", "b", True)]), 0, PRF).keys
    assert records == {bytes(event_tags(plain)[0])} == {bytes(record_tags(plain)[0])}
    assert np.all(np.abs(blinds(keys)) == 1)
    assert not canonicalize(columns_of([("p", "a", "b", True)]), 0, PRF).keys["labeler"].any()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=20, unique=True))
def test_order_and_first_as_plain_sorting(triples: list[tuple[int, int, int]]) -> None:
    """Ids that differ in the first or in the last word only, tags, positions."""
    keys = np.zeros(len(triples), KEYS)
    for key, (record, event, position) in zip(keys, triples, strict=True):
        key["id"][:] = (record // 2, 0, 0, record % 2)
        key["root"][46], key["position"] = event, position
    order = event_order(keys)
    assert [triples[row] for row in order] == sorted(triples)
    first = first_of_each(keys[order])
    kept = [triples[row] for row in order[first]]
    firsts: dict[tuple[int, int], tuple[int, int, int]] = {}
    for triple in sorted(triples):
        firsts.setdefault(triple[:2], triple)
    assert kept == list(firsts.values())
