"""Noisy counts: the law of the noise, its determinism, and what a wrong scale would look like."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.counts import Bits, DiscreteLaplace, noisy_counts
from private_rlhf.privacy.prf import Prf
from scipy import stats

PRF = Prf(bytes(range(32)))


def name(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def chi_square(epsilon: float, expected: float, draws: int = 6000) -> float:
    """p-value of draws at `epsilon` against the law at `expected`, tails joined where fewer than 10 are expected."""
    noise = DiscreteLaplace.shared(epsilon, 1)
    values = np.array([noise.draw(Bits(PRF, name(number))) for number in range(draws)])
    q = math.exp(-expected)
    edge = 0
    while draws * (1 - q) / (1 + q) * q ** (edge + 1) > 10:
        edge += 1
    seen = [int((values == k).sum()) for k in range(-edge, edge + 1)]
    law = [(1 - q) / (1 + q) * q ** abs(k) for k in range(-edge, edge + 1)]
    tail = (1 - sum(law)) / 2
    seen = [int((values < -edge).sum()), *seen, int((values > edge).sum())]
    return float(stats.chisquare(seen, draws * np.array([tail, *law, tail])).pvalue)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_the_law_is_the_stated_one_and_a_near_miss_is_seen(epsilon: float) -> None:
    """The draws are fixed by their names; a sound law would give such a p-value once in 10,000 sets of names."""
    assert chi_square(epsilon, epsilon) > 1e-4
    assert chi_square(epsilon, 0.88 * epsilon) < 1e-4


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(1)])
def test_survival_has_the_exponential_s_probability(exponent: Fraction) -> None:
    """Five standard errors; fixed by the names."""
    draws, chance = 4000, math.exp(-float(exponent))
    kept = sum(Bits(PRF, name(number)).survives(exponent) for number in range(draws))
    assert abs(kept / draws - chance) <= 5 * math.sqrt(chance * (1 - chance) / draws)


def test_bits_come_in_any_portions_and_below_is_uniform() -> None:
    bits = Bits(PRF, name(0))
    whole = Bits(PRF, name(0)).take(1000)
    parts = 0
    for size in (1, 0, 7, 384, 500, 108):
        parts = parts << size | bits.take(size)
    assert parts == whole
    assert Bits(PRF, name(1)).take(1000) != whole
    bits = Bits(PRF, name(2))
    seen = np.bincount([bits.below(5) for _ in range(5000)], minlength=5)
    assert stats.chisquare(seen).pvalue > 1e-4
    assert bits.below(1) == 0
    with pytest.raises(ValueError, match="a name must have 32 bytes, got 3"):
        Bits(PRF, b"abc")


@pytest.mark.parametrize("epsilon", [0.01, 0.4, 1.0, 3.0, 9.0])
def test_variance_and_interval_are_those_of_the_law(epsilon: float) -> None:
    noise, q = DiscreteLaplace.shared(epsilon, 1), math.exp(-epsilon)
    k = np.arange(-20000, 20001)
    law = (1 - q) / (1 + q) * q ** np.abs(k)
    assert noise.variance == pytest.approx(float((law * k**2).sum()), rel=1e-6)
    half = noise.half_width()
    assert law[np.abs(k) > half].sum() <= 0.05 + 1e-12
    assert half == 0 or law[np.abs(k) > half - 1].sum() > 0.05


def test_a_question_has_one_answer_and_several_share_the_budget() -> None:
    names = {"one": name(1), "two": name(2)}
    first = noisy_counts(PRF, names, {"one": 40, "two": 60}, 1.0)
    assert first == noisy_counts(PRF, names, {"one": 40, "two": 60}, 1.0)
    assert first["epsilon_per_count"] == 0.5
    more = noisy_counts(PRF, names, {"one": 41, "two": 60}, 1.0)["counts"]
    assert (more["one"] - first["counts"]["one"], more["two"]) == (1, first["counts"]["two"])
    answers = {noisy_counts(PRF, {"one": name(number)}, {"one": 0}, 0.1)["counts"]["one"] for number in range(40)}
    assert len(answers) > 10


def test_every_count_gets_the_noise_that_is_stated() -> None:
    """The share of ε that the answer states, drawn by the law above, and nothing done to it afterwards."""
    names = {f"rule {number}": name(number) for number in range(4)}
    answer = noisy_counts(PRF, names, dict.fromkeys(names, 100), 0.2)
    assert answer["epsilon"] == 0.2 == 4 * answer["epsilon_per_count"]
    noise = DiscreteLaplace(Fraction(0.2) / 4)
    assert answer["counts"] == {rule: 100 + noise.draw(Bits(PRF, own)) for rule, own in names.items()}


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_bad_epsilon(epsilon: float) -> None:
    with pytest.raises(UserError, match="epsilon must be a finite number above 0"):
        DiscreteLaplace.shared(epsilon, 1)


def test_extreme_epsilons_are_drawn_exactly() -> None:
    assert DiscreteLaplace.shared(700.0, 1).draw(Bits(PRF, name(0))) == 0
    assert abs(DiscreteLaplace.shared(1e-12, 1).draw(Bits(PRF, name(0)))) > 10**8
