"""One subset a step: the dominating pair by itself, its composition, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.accounting import subset_sampling
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions
from private_rlhf.accounting.subset_sampling import composed_epsilon, least_noise_multiplier
from scipy.integrate import quad
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
    exact = profile(rate, multiplier, epsilon)
    assert pmf.get_delta_for_epsilon(epsilon) >= exact - 1e-13
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


def test_phases_compose_as_their_sum() -> None:
    split = composed_epsilon(500, [(0.9, 20), (0.9, 30)], DELTA)
    assert split == pytest.approx(composed_epsilon(500, [(0.9, 50)], DELTA), rel=1e-6)
    assert composed_epsilon(500, [(0.9, 20), (1.5, 30)], DELTA) < split
    # Subsets of many records: between the whole population and one record.
    ends = [composed_epsilon(500, [(2.0, 20)], DELTA, size) for size in (1, 50, 500)]
    assert ends == sorted(ends)


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
