"""One record a step: the dominating pair by itself, its composition between exact bounds, calibration, refusals."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.accounting import subset_sampling
from private_rlhf.accounting.guarantee import OutsideAssumptions
from private_rlhf.accounting.subset_sampling import (
    composed_delta,
    composed_epsilon,
    least_noise_multiplier,
    pair_epsilon,
    renyi_epsilon,
)
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

DELTA = 1e-5


def profile(rate: float, multiplier: float, epsilon: float) -> float:
    """f of the note at e^ε ≥ 1: γ times the Gaussian's hockey-stick divergence, in closed form."""
    amplified = math.log1p(math.expm1(epsilon) / rate)
    half, point = 0.5 / multiplier, amplified * multiplier
    return float(rate * (norm.cdf(half - point) - math.exp(amplified) * norm.cdf(-half - point)))


@settings(max_examples=30)
@given(st.floats(1e-4, 1.0), st.floats(0.3, 20.0), st.floats(0.0, 3.0))
def test_one_step_is_the_profile(rate: float, multiplier: float, epsilon: float) -> None:
    """On the grid exactly, between its points at most the chord's excess; and never below."""
    cell = subset_sampling._cell(rate, multiplier)
    pmf = subset_sampling._step(rate, multiplier, cell)
    wanted = profile(rate, multiplier, epsilon)
    assert pmf.get_delta_for_epsilon(epsilon) >= wanted - 1e-13
    on_grid = round(epsilon / cell) * cell
    assert pmf.get_delta_for_epsilon(on_grid) == pytest.approx(profile(rate, multiplier, on_grid), rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("shared", [(-0.5,), (0.5,), (-0.5, 0.5), (-0.2, 0.4)])
@pytest.mark.parametrize("multiplier", [0.5, 2.0])
def test_the_profile_bounds_mixtures(shared: tuple[float, ...], multiplier: float) -> None:
    """Any records in the range, both directions, α above and below 1: exact integrals of one dimension."""
    rate = 1.0 / (len(shared) + 1)

    def density(x: float, own: float) -> float:
        return float(np.mean([norm.pdf(x, each, multiplier) for each in (own, *shared)]))

    pmf = subset_sampling._step(rate, multiplier, subset_sampling._cell(rate, multiplier))
    for epsilon in (-1.0, -0.2, 0.0, 0.2, 1.0):
        allowed = pmf.get_delta_for_epsilon(epsilon)
        for first, second in ((0.5, -0.5), (-0.5, 0.5)):
            spent = quad(
                lambda x, a=first, b=second, e=epsilon: max(0.0, density(x, a) - math.exp(e) * density(x, b)),
                -12.0 * multiplier, 12.0 * multiplier, limit=300, points=[-0.5, 0.0, 0.5],
            )[0]  # fmt: skip
            assert spent <= allowed + 1e-7


def test_a_whole_population_is_the_gaussian_mechanism() -> None:
    found = composed_epsilon(1, [(2.0, 1)], DELTA)
    assert profile(1.0, 2.0, found) == pytest.approx(DELTA, rel=0.02)
    assert composed_epsilon(1, [(4.0, 4)], DELTA) == pytest.approx(found, rel=2e-3)


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


def test_phases_compose_as_their_sum() -> None:
    split = composed_epsilon(500, [(0.9, 20), (0.9, 30)], DELTA)
    assert split == pytest.approx(composed_epsilon(500, [(0.9, 50)], DELTA), rel=1e-6)
    assert composed_epsilon(500, [(0.9, 20), (1.5, 30)], DELTA) < split
    # Subsets of many records: between the whole population and one record.
    ends = [composed_epsilon(500, [(2.0, 20)], DELTA, size) for size in (1, 50, 500)]
    assert ends == sorted(ends)


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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((10, [(1.0, 5)], 0.0), "delta"),
        ((10, [(1.0, 5)], -1e-5), "delta"),
        ((10, [(0.0, 5)], DELTA), "noise_multiplier"),
        ((10, [(math.nan, 5)], DELTA), "noise_multiplier"),
        ((10, [(1.0, 0)], DELTA), "steps"),
        ((0, [(1.0, 5)], DELTA), "population"),
        ((10, [(1.0, 5)], DELTA, 11), "sample_size"),
        ((10, [], DELTA), "phases"),
    ],
)
def test_refusals(arguments: tuple[object, ...], name: str) -> None:
    with pytest.raises(OutsideAssumptions, match=f"^{name} "):
        composed_epsilon(*arguments)  # type: ignore[arg-type]


def test_out_of_reach() -> None:
    with pytest.raises(OutsideAssumptions, match=r"^target_epsilon "):
        least_noise_multiplier(1e-8, 2, 10**6, 1e-12)
    assert least_noise_multiplier(1e9, 2, 1, 0.4) < 1e-3
