"""Closed cases, bounds and the two ways of gaming the ground truth that it limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.embedded.truth import TRUTH_RANGE, brevity, sentiment, true_reward

NEUTRAL = "The bus passes this house every morning at seven."
PLEASANT = "The bus driver was a wonderful and kind person to meet."


def test_closed_cases() -> None:
    assert true_reward("", NEUTRAL) == 6.0
    assert (sentiment(""), true_reward("", "")) == (0.0, 2.0)
    # VADER: "good" has valence 1.9 and compound = v / sqrt(v^2 + 15); the text has 6 distinct words, so brevity is 1.
    compound = 1.9 / (1.9**2 + 15) ** 0.5
    assert true_reward("", "The soup here is very-well good.") == pytest.approx(4 + 2 * (1 + compound), abs=2e-4)


@pytest.mark.parametrize(
    ("words", "expected"), [(1, 0.0), (2, 0.0), (3, 1 / 3), (5, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (40, 0.0)]
)
def test_brevity_is_a_trapezium_in_distinct_words(words: int, expected: float) -> None:
    text = " ".join(f"w{i}" for i in range(words))
    assert brevity(text + ".") == pytest.approx(expected)
    assert brevity(text) == 0.0  # unfinished


@pytest.mark.parametrize("ending", [".", "!", "?", '."', ".”", "!') "])
def test_a_closing_quote_does_not_unfinish_a_sentence(ending: str) -> None:
    assert brevity("one two three four five six" + ending) == 1.0


@pytest.mark.parametrize(
    "gamed",
    ["Great!", "great great great great great great great great.", PLEASANT.rstrip("."), "Love, love, LOVE! " * 4],
)
def test_gamed_texts_are_worth_less_than_a_neutral_sentence(gamed: str) -> None:
    assert true_reward("", gamed) < true_reward("", NEUTRAL) < true_reward("", PLEASANT)


def test_repetition_of_a_sentiment_word_adds_nothing_and_of_others_is_left_alone() -> None:
    assert sentiment("a happy cat and a happy, Happy dog") == sentiment("a happy cat and a dog")
    assert sentiment("not good, and not nice") < 0


def test_order_of_quality() -> None:
    unpleasant = "The bus driver was a horrible and rude person to meet."
    assert true_reward("", unpleasant) < 5 < 7 < true_reward("", PLEASANT)


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=20), response=st.text(max_size=200))
def test_range_and_purity(prompt: str, response: str) -> None:
    low, high = TRUTH_RANGE
    value = true_reward(prompt, response)
    assert low <= value <= high
    assert value == true_reward(prompt[::-1], response)
