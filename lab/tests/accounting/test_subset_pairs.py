"""One record a step: composed losses between exact bounds, simulation, calibration."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.accounting.subset_sampling import composed_epsilon, least_noise_multiplier
from private_rlhf_lab.accounting.subset_pairs import composed_delta, pair_epsilon, renyi_epsilon
from scipy.optimize import brentq
from scipy.stats import norm

DELTA = 1e-5


# An independent program's bounds (theory review of the project): population, steps, multiplier, above, below.
REVIEWED = [
    (2500, 39, 0.782, 0.0354, 0.0345),
    (1048, 18, 0.828, 0.062, 0.061),
    (1048, 10_480, 1.025, 0.570, 0.443),
    (2500, 2_500, 0.807, 0.177, 0.149),
    (2500, 25_000, 0.867, 0.495, 0.377),
    (5, 1_000, 51.98, 0.425, 0.422),
]


@pytest.mark.parametrize(("population", "steps", "multiplier", "above", "below"), REVIEWED)
def test_against_an_independent_program(
    population: int, steps: int, multiplier: float, above: float, below: float
) -> None:
    phases = [(multiplier, steps)]
    high, low = composed_epsilon(population, phases, DELTA), pair_epsilon(1.0 / population, phases, DELTA)
    assert high == pytest.approx(above, rel=0.01)
    assert low == pytest.approx(below, rel=0.01)
    assert low < high < renyi_epsilon(population, phases, DELTA)


def test_against_simulated_losses() -> None:
    """Five steps on four records, 400,000 draws of the dominating pair's loss: δ within 4.5 standard errors (1e-5)."""
    rate, multiplier, steps, epsilon = 0.25, 1.5, 5, 0.8
    generator = np.random.default_rng(1)
    shape = (400_000, steps)
    z = generator.standard_normal(shape)
    # (1 − γ)Q + γP with Q = N(0, 1) and P = N(1/multiplier, 1); losses above 0 are U's.
    z += (generator.random(shape) < rate) / multiplier
    positive = np.log1p(rate * np.expm1(z / multiplier - 0.5 / multiplier**2))
    loss = np.where(positive > 0.0, positive, 0.0)
    # Below 0 the law is the mirror image, thinned by e^(−ℓ): drawn by its probability, the rest stays at 0.
    half = 0.5 / multiplier
    mirrored = norm.cdf(-half)  # Q's probability of a positive loss
    negative = norm.ppf(1.0 - mirrored * generator.random(shape))
    down = -np.log1p(rate * np.expm1(negative / multiplier - 0.5 / multiplier**2))
    above = (1.0 - rate) * norm.cdf(-half) + rate * norm.cdf(half)
    loss = np.where((positive <= 0.0) & (generator.random(shape) < mirrored / (1.0 - above)), down, loss)
    spent = np.maximum(-np.expm1(np.minimum(epsilon - loss.sum(axis=1), 0.0)), 0.0)
    error = float(spent.std() / math.sqrt(len(spent)))
    assert composed_delta(4, [(multiplier, steps)], epsilon) == pytest.approx(float(spent.mean()), abs=4.5 * error)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 3000), st.integers(1, 500), st.floats(0.4, 5.0), st.floats(1e-9, 1e-3))
def test_the_bracket_and_its_order(population: int, steps: int, multiplier: float, delta: float) -> None:
    """Below ≤ above; ε falls in noise, in δ and in the population, and grows in the steps (1 % for the grids)."""
    found = composed_epsilon(population, [(multiplier, steps)], delta)
    assert pair_epsilon(1.0 / population, [(multiplier, steps)], delta) <= found + 1e-9
    less = (
        composed_epsilon(population, [(1.2 * multiplier, steps)], delta),
        composed_epsilon(population, [(multiplier, steps)], 2.0 * delta),
        composed_epsilon(population + 1, [(multiplier, steps)], delta),
    )
    assert max(less) <= 1.005 * found + 1e-6
    assert composed_epsilon(population, [(multiplier, steps + 1)], delta) >= 0.995 * found - 1e-6


@pytest.mark.parametrize(("population", "multiplier"), [(1048, 0.05), (2500, 0.3), (20, 0.7), (1, 1.5)])
def test_the_pair_is_rounded_downwards(population: int, multiplier: float) -> None:
    """One step in closed form: cells of any width lose, and never gain. Several steps: below what is certified."""

    def spent(epsilon: float) -> float:
        odds = math.log(math.expm1(epsilon) + 1.0 / population) + math.log(population) if epsilon < 600.0 else epsilon
        end = multiplier * odds + 0.5 / multiplier
        first = (1 - 1 / population) * norm.sf(end) + norm.sf(end - 1 / multiplier) / population
        return float(first - math.exp(epsilon + norm.logsf(end)))

    exact = brentq(lambda epsilon: spent(epsilon) - 1e-5, 1e-3, 590.0)
    found = [pair_epsilon(1.0 / population, [(multiplier, 1)], 1e-5, exact / cells) for cells in (30, 300, 3000)]
    assert max(found) <= exact
    assert found[-1] > 0.985 * exact
    several = pair_epsilon(1.0 / population, [(multiplier, 9)], 1e-5)
    assert found[-1] < several <= composed_epsilon(population, [(multiplier, 9)], 1e-5)


def test_calibration_saves_noise() -> None:
    """n = 2500, T = 39 at ε = 1: .61 of the Rényi bound's noise, and no less."""
    losses = least_noise_multiplier(1.0, 2500, 39, DELTA)
    few = partial(renyi_epsilon, orders=(2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20))
    renyi = least_noise_multiplier(1.0, 2500, 39, DELTA, bound=few)
    assert losses / renyi == pytest.approx(0.61, abs=0.01)
    assert composed_epsilon(2500, [(losses, 39)], DELTA) <= 1.0
    assert pair_epsilon(1 / 2500, [(0.99 * losses, 39)], DELTA) > 1.0
