"""Canonical order and ids: symmetric in the two responses, injective in the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.privacy.records import Text, canonical_record, encode_text, event_bytes, is_blank, record_id

GOLDEN_ID = "396495d49d6fe53c8df7ec05d73c8dac6514f523925a60ce7b82068c6d898916"
words = st.text(max_size=6)
messages = st.lists(st.fixed_dictionaries({"role": words, "content": words}), max_size=3)
texts: st.SearchStrategy[Text] = st.one_of(words, messages)


@given(texts, texts, texts)
def test_swapping_the_responses_changes_the_label_alone(prompt: Text, first: Text, second: Text) -> None:
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
    assert (encode_text(first) == encode_text(second)) == (first == second)


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
        record_id([{"role": "user", "content": "p"}], ["a", "b"]),
    }
    assert len(ids) == 5
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
        ("r", None, None),
        ("s", None, None),
        ("r", "", None),
        ("r", None, ""),
        ("r", "a", "b"),
        ("r", "ab", ""),
        ("r", "", "ab"),
    ]
    assert len({event_bytes(*case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("text", "blank"),
    [("", True), (" \n\t", True), ("x", False), ([], True), ([{"role": "user", "content": " "}], True)],
)
def test_blank(text: Text, blank: bool) -> None:
    assert is_blank(text) is blank
