"""The exact verdicts against closed forms, direct sums and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.audit.judge import Guesses, adjust, clopper_pearson, detectable_excess, judge_one, upper_tail
from private_rlhf.core.stats import holm_adjusted


def direct_tail(correct: int, n: int, p: float) -> float:
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(correct, n + 1))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 0.99))
def test_the_tail_is_the_sum(correct: int, n: int, p: float) -> None:
    if correct <= n:
        assert upper_tail(correct, n, p) == pytest.approx(direct_tail(correct, n, p), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.data())
def test_clopper_pearson_ends_where_each_tail_is_a_fortieth(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    low, high = clopper_pearson(correct, n)
    if correct > 0:
        assert upper_tail(correct, n, low) == pytest.approx(0.025, rel=1e-6)
    if correct < n:
        assert 1 - upper_tail(correct + 1, n, high) == pytest.approx(0.025, rel=1e-6)


def test_holm_by_hand() -> None:
    assert holm_adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjusted([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_a_perfect_guess_is_a_leak_and_a_fair_one_is_not() -> None:
    generator = np.random.default_rng(3)
    truth = generator.choice([-1, 1], 400).astype(np.int8)
    z = np.where(generator.random(400) < 0.6, truth, -truth).astype(np.int8)
    events = np.arange(400)
    judged = adjust([judge_one(Guesses("a", "", events, guess), truth, 0.6) for guess in (truth, z)])
    assert [verdict.leak for verdict in judged] == [True, False]
    assert (judged[0].n, judged[0].correct) == (400, 400)
    assert judged[0].p_value == pytest.approx(0.6**400, rel=1e-6)


def test_unknown_labels_do_not_count() -> None:
    truth = np.array([1, 0, -1], dtype=np.int8)
    verdict = judge_one(Guesses("a", "", np.arange(3), np.array([1, 1, 1], dtype=np.int8)), truth, 0.5)
    assert (verdict.n, verdict.correct) == (2, 1)


def test_a_true_alpha_is_accused_as_seldom_as_stated() -> None:
    """500 families of 20 sound attacks at level 5 %: more than 42 accusations have probability below 1e-3."""
    generator = np.random.default_rng(11)
    correct = generator.binomial(200, 0.6, size=(500, 20))
    accused = sum(min(holm_adjusted([upper_tail(int(k), 200, 0.6) for k in row])) < 0.05 for row in correct)
    assert accused <= 42
    assert accused >= 3  # the binomial is discrete, but the test is no dead letter


@pytest.mark.parametrize(("n", "alpha"), [(200, 0.55), (5000, 0.88), (20_000, 0.525)])
def test_the_stated_excess_is_found_with_the_stated_power(n: int, alpha: float) -> None:
    excess = detectable_excess(n, alpha, family=30)
    generator = np.random.default_rng(5)

    def power(rate: float) -> float:
        draws = generator.binomial(n, rate, size=4000)
        values, counts = np.unique(draws, return_counts=True)
        found = [upper_tail(int(value), n, alpha) < 0.001 / 30 for value in values]
        return float(counts[found].sum() / 4000)

    assert 0.88 < power(alpha + excess) < 0.92  # 4 standard errors of a share of 0.9 in 4,000
    assert power(alpha + 0.7 * excess) < 0.7


def test_too_few_guesses_find_nothing() -> None:
    assert detectable_excess(3, 0.9, family=10) == pytest.approx(0.1)
    assert detectable_excess(0, 0.9, family=10) == pytest.approx(0.1)
