"""The verdict on a reward: when it may be a coin, and how many labels would tell."""

from __future__ import annotations

import math
from typing import Any

import pytest
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.reward_verdict import RewardVerdict
from private_rlhf.core.stats import wilson


def fit(private_share: float, held_out: int, epsilon: float, trained: int = 900) -> dict[str, Any]:
    """As reward/fit.json states it."""
    noise = LabelNoise.of(epsilon)
    accuracy = noise.debias(wilson(private_share * held_out, held_out)).as_dict()
    stated = {"validation_accuracy_debiased": accuracy, "validation_pairs": held_out, "num_pairs": trained}
    return stated | noise.as_json()


def verdict(*given: Any) -> RewardVerdict:
    made = RewardVerdict.of(fit(*given))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("share", "coin"), [(0.7, False), (0.61, False), (0.59, True), (0.5, True), (0.41, True), (0.3, True)]
)
def test_an_interval_that_is_not_above_one_half_is_a_coin_s(share: float, coin: bool) -> None:
    assert verdict(share, 100, 2.0).is_coin == coin


def test_nothing_held_out_has_no_verdict() -> None:
    assert RewardVerdict.of({"num_pairs": 900, "held_out_labels": "none were read"}) is None


@pytest.mark.parametrize("epsilon", [0.5, 2.0, math.inf])
@pytest.mark.parametrize("accuracy", [0.55, 0.7, 0.95])
def test_the_number_of_labels_is_where_the_interval_leaves_one_half(epsilon: float, accuracy: float) -> None:
    """At the stated number, and not at 2 % less, Wilson's interval of the expected share excludes 1/2."""
    few = verdict(0.5, 100, epsilon)
    share = 0.5 + few.noise.factor * (accuracy - 0.5)
    held_out = few.labels_needed(accuracy) * few.share
    for size, excluded in ((math.ceil(held_out) + 1, True), (math.floor(0.98 * held_out) - 1, False)):
        assert (wilson(share * size, size).ci_low > 0.5) == excluded


def test_the_words_follow_the_accuracy() -> None:
    assert "at that accuracy about 1 960 labels at epsilon 2 would" in verdict(0.57, 100, 2.0).advice
    assert "at the interval's end about" in verdict(0.49, 100, 2.0).advice
    assert "more than 10 000 000 labels at epsilon 0.1" in verdict(0.5002, 100_000, 0.1).advice
    assert verdict(0.3, 100, 2.0).advice == "more labels do not help an accuracy below 0.5"
    assert "public labels would exclude" in verdict(0.55, 100, math.inf).advice


def test_an_accuracy_on_few_labels_is_withheld() -> None:
    """At ε = 2 twenty labels leave an interval wider than half; where enough would be held out is said."""
    few = verdict(0.6, 20, 2.0)
    assert few.stated == "withheld: 20 of at least 22"
    assert few.advice == "about 1 012 labels at epsilon 2 would show it"
    assert "0.6" not in few.sentence("PPO")
    assert verdict(0.6, 22, 2.0).stated.startswith("0.63")


def test_labels_on_few_prompts_ask_for_prompts() -> None:
    """Two thousand labels on ten prompts count as ten: no number of labels on these shows more."""
    few = RewardVerdict.of(fit(0.85, 10, 2.0) | {"validation_pairs": 2000})
    assert few is not None
    assert few.advice == "labels on more prompts would show it"


def test_the_page_says_what_was_trained_on_a_coin() -> None:
    said = verdict(0.5, 100, 2.0).sentence("PPO")
    assert said.endswith("; PPO trained the policy on it all the same (--accept-reward).")
    assert "--accept-reward" not in verdict(0.5, 100, 2.0).sentence(None)
    assert verdict(0.7, 100, 2.0).sentence("PPO").startswith("The reward is better than a coin")
