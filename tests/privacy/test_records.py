"""Canonical order and ids: symmetric in the two responses, injective in the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.privacy.records import (
    Text,
    canonical_record,
    decode_messages,
    encode_text,
    event_bytes,
    is_blank,
    record_id,
    text_kind,
)
from support.preference_files import assistant, user

GOLDEN_ID = "219d10b27c55e8fb2fedf6944975aee2654e3886fbc4715f4add7a022b2c45d0"
words = st.text(max_size=6)
messages = st.lists(st.fixed_dictionaries({"role": words, "content": words}), max_size=3)
texts: st.SearchStrategy[Text] = st.one_of(words, messages)


@given(st.one_of(st.tuples(words, words, words), st.tuples(messages, messages, messages)))
def test_swapping_the_responses_changes_the_label_alone(row: tuple[Text, Text, Text]) -> None:
    prompt, first, second = row
    record, swapped = canonical_record(prompt, first, second), canonical_record(prompt, second, first)
    if first == second:
        assert record is None
        assert swapped is None
        return
    assert record is not None
    assert swapped is not None
    assert record[:4] == swapped[:4]
    assert record.label == -swapped.label
    preferred = record.response_a if record.label == 1 else record.response_b
    assert preferred == first


@given(texts, texts)
def test_encoding_is_injective(first: Text, second: Text) -> None:
    def encoded(text: Text) -> tuple[bytes, bytes]:
        return text_kind(text), encode_text(text)

    assert (encoded(first) == encoded(second)) == (first == second)
    if not isinstance(first, str):
        assert decode_messages(encode_text(first)) == first


@given(words, words, words)
def test_text_is_kept_as_it_is(prompt: str, first: str, second: str) -> None:
    record = canonical_record(prompt, first, second)
    if record is not None:
        assert record.prompt == prompt
        assert {record.response_a, record.response_b} == {first, second}


def test_ids_tell_every_part_apart() -> None:
    ids = {
        record_id("p", ["a", "b"]),
        record_id("p", ["b", "a"]),
        record_id("pa", ["", "b"]),
        record_id("", ["pa", "b"]),
        record_id("p", ["ab", ""]),
        record_id([{"role": "user", "content": "p"}], [[], [{"role": "assistant", "content": "b"}]]),
        record_id('[["user","p"]]', ["[]", '[["assistant","b"]]']),
    }
    assert len(ids) == 6
    with pytest.raises(ValueError, match="of one kind"):
        record_id([{"role": "user", "content": "p"}], ["a", "b"])
    assert all(len(value) == 64 for value in ids)
    with pytest.raises(ValueError, match="two different responses"):
        record_id("p", ["a", "a"])


def test_ids_never_change() -> None:
    assert record_id("prompt", ["one", "two"]) == GOLDEN_ID


def test_the_canonical_order_is_no_function_of_what_is_preferred_or_longer() -> None:
    """Response "long" comes first about half the time over 400 prompts: outside [150, 250] with probability 6e-7."""
    first = sum(canonical_record(f"p{i}", "long " * 9, "no").response_a != "no" for i in range(400))  # type: ignore[union-attr]
    assert 150 <= first <= 250


def test_events_differ_by_record_labeler_and_event() -> None:
    cases = [
        ("0" * 64, None, None),
        ("1" * 64, None, None),
        ("0" * 64, "", None),
        ("0" * 64, None, ""),
        ("0" * 64, "a", "b"),
        ("0" * 64, "ab", ""),
        ("0" * 64, "", "ab"),
    ]
    assert len({event_bytes(*case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("text", "blank"),
    [
        ("", True),
        (" \n\t", True),
        ("x", False),
        ([], True),
        (user(" "), True),
        ([*user("x"), *assistant("\n")], True),
        ([*user(" "), *assistant("x")], False),
        ([*user("x"), {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], False),
    ],
)
def test_blank(text: Text, blank: bool) -> None:
    assert is_blank(text) is blank
