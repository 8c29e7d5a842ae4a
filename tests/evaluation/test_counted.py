"""Win rates from noisy counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from private_rlhf.evaluation.rates import LONGER, counted_rates, counted_share, spread
from private_rlhf.privacy.counts import DiscreteLaplace


def test_choices_are_spread_over_the_rows_of_the_bundle() -> None:
    choices = {"sft": np.array([1, -1, 0], np.int8), LONGER: np.array([1, 1, 1], np.int8)}
    assert spread(choices, [4, 0, 2], 5) == {"sft": [-1, 0, 0, 0, 1], LONGER: [1, 0, 1, 0, 1]}


def test_rates_in_closed_form() -> None:
    choices = {"sft": np.array([1, -1, 0, 0], np.int8), LONGER: np.array([1, 0, 0, 0], np.int8)}
    rates = counted_rates(choices, {"epsilon": 1.0, "counts": {"sft": 2, LONGER: 1}})
    assert (rates["sft"].value, rates["sft"].n) == (0.75, 4)  # two right, two ties
    assert rates[LONGER].value == 0.625  # one right, three equally long
    half = math.sqrt(1.96**2 * 0.75 * 0.25 / 4 + (DiscreteLaplace.shared(0.5, 1).half_width() / 4) ** 2)
    assert rates["sft"].ci_high - rates["sft"].value == pytest.approx(half)
    assert counted_share(-3, 4, DiscreteLaplace.shared(1.0, 1)).value == -0.75  # clipping would bias it


@pytest.mark.parametrize("epsilon", [0.03, 0.3, 3.0])
def test_intervals_hold_the_truth(epsilon: float) -> None:
    """3,000 evaluations of 400 pairs, noise that dominates or does not matter: 95 % of the intervals hold the true
    rate, within -1.5 and +3.5 points (a standard error is 0.4)."""
    generator, noise = np.random.default_rng(4), DiscreteLaplace.shared(epsilon, 1)
    q, held = math.exp(-epsilon), 0
    for right in generator.binomial(400, 0.7, 3000):
        drawn = generator.geometric(1 - q) - generator.geometric(1 - q)  # discrete Laplace
        found = counted_share(int(right + drawn), 400, noise)
        held += found.ci_low <= 0.7 <= found.ci_high
    assert 0.935 < held / 3000 < 0.985
