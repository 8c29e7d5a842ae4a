"""The noisy statistic of central label-DP: its sensitivity, the law of its noise, and an audit that sees too little."""

from __future__ import annotations

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.counts import Bits
from private_rlhf.privacy.prf import Prf
from private_rlhf_lab.league.noisy_sum import (
    DiscreteGaussian,
    exact_statistic,
    gaussian_for,
    l1_sensitivity,
    laplace_for,
    noisy_statistic,
    squared_l2_sensitivity,
)
from scipy import stats

PRF = Prf(bytes(range(32)))


def bits(number: int) -> Bits:
    return Bits(PRF, hashlib.sha256(b"%d" % number).digest())


def law(variance: float, edge: int) -> np.ndarray:
    """P(X = k), k = -edge..edge, of the discrete Gaussian; summed far beyond the edge."""
    reach = int(edge + 40 * math.sqrt(variance) + 40)
    weight = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance))
    return (weight / weight.sum())[reach - edge : reach + edge + 1]


def chi_square(variance: Fraction, expected: float, draws: int = 6000) -> float:
    """p-value of draws at `variance` against the law at `expected`, tails joined where fewer than 10 are expected."""
    noise = DiscreteGaussian(variance)
    values = np.array([noise.draw(bits(number)) for number in range(draws)])
    edge = 0
    while draws * (1 - law(expected, edge + 1).sum()) / 2 > 10:
        edge += 1
    inside = law(expected, edge)
    tail = (1 - inside.sum()) / 2
    seen = [int((values < -edge).sum()), *((values == k).sum() for k in range(-edge, edge + 1))]
    return float(stats.chisquare([*seen, int((values > edge).sum())], draws * np.array([tail, *inside, tail])).pvalue)


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(5, 2), Fraction(40)])
def test_the_law_is_the_stated_one_and_a_near_miss_is_seen(variance: Fraction) -> None:
    """The draws are fixed by their names; a sound law would give such a p-value once in 10,000 sets of names."""
    assert chi_square(variance, float(variance)) > 1e-4
    assert chi_square(variance, 1.25 * float(variance)) < 1e-4


def test_on_a_fine_grid_the_noise_is_gaussian() -> None:
    """Kolmogorov–Smirnov at the scale that rewards use; a false alarm once in 10,000 sets of names."""
    noise = DiscreteGaussian(Fraction(1 << 44))
    values = np.array([noise.draw(bits(number)) for number in range(3000)]) / 2.0**22
    assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_sensitivities_are_those_of_all_neighbours(seed: int) -> None:
    """All label vectors of six events and all that differ in one label."""
    rows = np.random.default_rng(seed).integers(-9, 10, (6, 3))
    squares, sums = [], []
    for labels in itertools.product((-1, 1), repeat=6):
        for place in range(6):
            other = np.array(labels)
            other[place] = -other[place]
            moved = exact_statistic(rows, np.array(labels)) - exact_statistic(rows, other)
            squares.append(int((moved**2).sum()))
            sums.append(int(np.abs(moved).sum()))
    assert max(squares) == squared_l2_sensitivity(rows)
    assert max(sums) == l1_sensitivity(rows)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_the_delta_of_the_gaussian_is_below_the_claim(epsilon: float) -> None:
    """One coordinate, exactly: δ = Σ max(0, P(k) − e^ε·P(k − Δ)), at the variance that zCDP's conversion asks for."""
    rows, delta = np.array([[20], [-7]]), 1e-6
    variance = float(gaussian_for(rows, Fraction(zcdp_rho(epsilon, delta))).variance)
    probability = law(variance, int(12 * math.sqrt(variance)) + 40)
    exceeding = np.maximum(probability[20:] - math.exp(epsilon) * probability[:-20], 0.0).sum()
    assert 1e-9 < exceeding <= delta


def audited(rows: np.ndarray, noise: object, delta: float, draws: int = 4000) -> float:
    """A lower bound on ε, false in one of 1,000 audits: neighbours that differ in event 0, the longest row, and the
    event that s̃ lies on one side along this row. Clopper–Pearson at 0.05 % for each of both shares, one threshold.
    """
    labels = np.ones(len(rows), dtype=np.int64)
    other = np.array([-1, *labels[1:]])
    shown = [
        np.array([np.dot(noisy_statistic(rows, which, noise, bits(2 * number + side)), rows[0])
                  for number in range(draws)])
        for side, which in enumerate((labels, other))
    ]  # fmt: skip
    middle = float(np.dot(exact_statistic(rows, labels) + exact_statistic(rows, other), rows[0])) / 2
    hits, alarms = (int((values > middle).sum()) for values in shown)
    low = stats.beta.ppf(0.0005, hits, draws - hits + 1)
    high = stats.beta.ppf(0.9995, alarms + 1, draws - alarms)
    return math.log((low - delta) / high)


ROWS = np.array([[60, -80], [30, 30], [-5, 90]])


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_planted_neighbours_stay_below_epsilon_and_too_little_noise_is_caught(epsilon: float) -> None:
    """The mutants: a Gaussian of a twelfth of the standard deviation, and Laplace noise for six times ε."""
    delta = 1e-6
    gaussian = gaussian_for(ROWS, Fraction(zcdp_rho(epsilon, delta)))
    assert audited(ROWS, gaussian, delta) <= epsilon
    assert audited(ROWS, DiscreteGaussian(gaussian.variance / 144), delta) > epsilon
    laplace = laplace_for(ROWS, epsilon)
    assert audited(ROWS, laplace, 0.0) <= epsilon
    assert audited(ROWS, laplace_for(ROWS, 6 * epsilon), 0.0) > epsilon


def test_an_epsilon_whose_noise_fits_no_number_is_refused() -> None:
    for epsilon in (1e-140, 1e-300, 5e-324):
        with pytest.raises(UserError, match=r"epsilon must leave noise that fits a number, got .*: take a larger one"):
            laplace_for(ROWS, epsilon)
    assert math.isfinite(laplace_for(ROWS, 1e-100).variance)


def test_noise_is_fresh_unless_bits_are_given() -> None:
    noise, labels = gaussian_for(ROWS * 1000, Fraction(1, 100)), np.array([1, -1, 1])
    assert noisy_statistic(ROWS, labels, noise) != noisy_statistic(ROWS, labels, noise)
    assert noisy_statistic(ROWS, labels, noise, bits(1)) == noisy_statistic(ROWS, labels, noise, bits(1))


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (ROWS * 1.0, [1, 1, 1]),
        (ROWS[:0], []),
        (ROWS << 40, [1, 1, 1]),
        (ROWS, [1, 1]),
        (ROWS, [1, 0, 1]),
    ],
)
def test_bad_input_is_refused(rows: np.ndarray, labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows|entries|labels"):
        exact_statistic(rows, np.array(labels))


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="rho"):
        gaussian_for(ROWS, Fraction(0))
    with pytest.raises(UserError, match="epsilon"):
        laplace_for(ROWS, math.inf)
