"""How many answers of a person count within a budget: the law by derivatives, the split by enumeration."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from pipeline.core.errors import UserError
from pipeline.core.person_budget import best_epsilon, epsilon_each, information, split_budget


def fisher(epsilon: float, margin: float) -> float:
    """Information about the margin of one released answer, by differences of its probability."""

    def chance(at: float) -> float:
        keep = 1 / (1 + math.exp(-epsilon))
        return (1 - keep) + (2 * keep - 1) / (1 + math.exp(-at))

    slope = (chance(margin + 1e-5) - chance(margin - 1e-5)) / 2e-5
    return slope**2 / (chance(margin) * (1 - chance(margin)))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.18, 8.0])
def test_the_law_that_the_split_follows(epsilon: float) -> None:
    assert information(epsilon, 1) / 4 == pytest.approx(fisher(epsilon, 0.0), rel=1e-8)
    for margin in (0.7, -3.0):
        shrink, t = math.tanh(epsilon / 2), math.tanh(margin / 2)
        law = shrink**2 * (1 - t**2) ** 2 / (4 * (1 - (shrink * t) ** 2))
        assert law == pytest.approx(fisher(epsilon, margin), rel=1e-6)


def test_one_answer_carries_what_twenty_do_11_6_times() -> None:
    assert split_budget(2.0, 20) == (1, 2.0)
    assert information(2.0, 1) / information(2.0, 20) == pytest.approx(11.62, abs=0.005)


def test_the_best_epsilon_of_an_answer() -> None:
    best = best_epsilon()
    assert best == pytest.approx(2.17731898, abs=1e-8)
    rate = [math.tanh(each / 2) ** 2 / each for each in (best - 1e-4, best, best + 1e-4)]
    assert rate[1] > max(rate[0], rate[2])


@pytest.mark.parametrize("questions", [1, 2, 3, 7, 40])
def test_no_other_whole_number_carries_more(questions: int) -> None:
    """By enumeration, from budgets of a hundredth on, also beside every budget where two numbers carry the same."""
    for step in range(1, 1201):
        total = step / 20
        answers, epsilon = split_budget(total, questions)
        assert information(total, answers) == max(information(total, k) for k in range(1, questions + 1)), total
        assert epsilon == epsilon_each(total, answers)


def test_without_a_limit_and_at_the_ends() -> None:
    assert split_budget(20.0) == (9, math.nextafter(20 / 9, 0.0))  # 9 times 20/9 in floats is above 20
    assert split_budget(20.0, 3)[0] == 3
    assert [split_budget(total)[0] for total in (1e-9, 1e-300, 2.0, 2.9, 3.2)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("answers", [1, 3, 7, 49, 1000])
def test_what_all_answers_cost_is_never_above_the_budget(answers: int) -> None:
    for total in (0.1, 1.0, 2.3, 17.77, 1e6):
        each = epsilon_each(total, answers)
        assert Fraction(each) * answers <= Fraction(total) < Fraction(math.nextafter(each, math.inf)) * answers


@pytest.mark.parametrize(("total", "questions"), [(0.0, 3), (-1.0, 3), (math.inf, 3), (math.nan, 3), (1.0, 0)])
def test_nonsense_is_refused(total: float, questions: int) -> None:
    with pytest.raises(UserError, match="a person"):
        split_budget(total, questions)
