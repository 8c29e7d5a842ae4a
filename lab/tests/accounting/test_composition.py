"""Composition of draws against closed forms and exact enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from private_rlhf.accounting.conversions import advanced_composition
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions
from private_rlhf_lab.accounting.composition import (
    combined_draw,
    distance_from_gap,
    draw_after_randomized_response,
    inexact_pointwise,
    inexact_total_variation,
    repeated_draws,
)
from private_rlhf_lab.accounting.steps import advanced_composition_step, bounded_range_zcdp
from scipy.stats import binom


@pytest.mark.parametrize(("epsilon", "draws"), [(0.05, 500), (0.3, 100), (1.0, 40)])
def test_repeated_draws_cover_the_exact_binomial(epsilon: float, draws: int) -> None:
    """Two actions, any mass of the first: the exact δ of m draws at the promised ε stays below the target."""
    target = 1e-5
    promise = repeated_draws(epsilon, 0.0, draws, target)
    assert promise.epsilon < draws * epsilon
    worst = 0.0
    for mass in np.linspace(0.02, 0.98, 49):
        tilted = mass * math.exp(epsilon) / (mass * math.exp(epsilon) + 1 - mass)
        p, q = binom.pmf(np.arange(draws + 1), draws, mass), binom.pmf(np.arange(draws + 1), draws, tilted)
        for one, two in ((p, q), (q, p)):
            worst = max(worst, float(np.maximum(one - math.exp(promise.epsilon) * two, 0).sum()))
    assert worst <= target
    assert worst > target / 1e3  # not absurdly loose


def test_repeated_draws_take_the_smallest_route() -> None:
    one = repeated_draws(0.5, 0.0, 1, 1e-6)
    assert (one.epsilon, one.delta, one.details["route"]) == (0.5, 0.0, "basic")
    split = repeated_draws(0.5, 1e-7, 10, 1e-6)  # no slack left
    assert (split.epsilon, split.details["route"]) == (5.0, "basic")
    many = repeated_draws(0.1, 1e-9, 100, 1e-6)
    assert many.details["route"] == "zcdp"
    assert many.delta == 1e-6
    closed = 100 * 0.01 / 8 + 0.1 * math.sqrt(50 * math.log(1 / 9e-7))
    assert many.details["routes"]["zcdp_closed_form"] == pytest.approx(closed)
    assert many.epsilon <= closed < many.details["routes"]["advanced_composition"] / 2
    assert bounded_range_zcdp(0.1, 100) == pytest.approx(0.125)


def test_repeated_draws_refuse_a_delta_that_is_already_spent() -> None:
    with pytest.raises(OutsideAssumptions, match=r"^target_delta must be at least draws"):
        repeated_draws(0.5, 1e-6, 10, 1e-6)


def test_a_vacuous_log_error_is_vacuous() -> None:
    """e^α of a hopeless α is not cut to a number that a tiny δ makes small."""
    assert inexact_pointwise(1.0, 1e-310, 800.0).delta == 1.0
    assert inexact_pointwise(1.0, 0.0, 800.0).delta == 0.0
    assert inexact_pointwise(1.0, 1e-310, 700.0).delta == pytest.approx(math.exp(700.0 + math.log(1e-310)))


def test_inexact_policies() -> None:
    assert inexact_total_variation(1.0, 1e-3, 0.01).delta == pytest.approx(1e-3 + (1 + math.e) * 0.01)
    assert inexact_total_variation(800.0, 0.0, 0.0).delta == 0.0
    assert inexact_total_variation(800.0, 0.0, 0.1).delta == 1.0
    found = inexact_pointwise(1.0, 1e-3, 0.2)
    assert (found.epsilon, found.delta) == (pytest.approx(1.4), pytest.approx(1e-3 * math.exp(0.2)))
    assert distance_from_gap(0.02, 1.0) == pytest.approx(0.1)
    assert distance_from_gap(1e9, 1.0) == 1.0


@pytest.mark.parametrize(("draw", "label"), [(0.3, 1.0), (5.0, 0.2), (2.0, 2.0)])
def test_draw_on_randomised_labels_is_the_mixture_bound(draw: float, label: float) -> None:
    alpha = math.exp(label) / (1 + math.exp(label))
    direct = math.log((alpha * math.exp(draw) + 1 - alpha) / ((1 - alpha) * math.exp(draw) + alpha))
    assert draw_after_randomized_response(draw, label) == pytest.approx(direct)
    assert direct < min(draw, label)
    assert draw_after_randomized_response(50.0, 60.0) <= 50.0


def test_two_tiny_epsilons_never_make_pure_nothing() -> None:
    """Their product leaves the floats, the ε does not."""
    made = combined_draw(1e-170, 1e-170)
    assert 0.0 < made.epsilon <= 1e-170
    assert " 0-differentially" not in made.statement


def test_a_step_of_advanced_composition_spends_the_total() -> None:
    step = advanced_composition_step(3.0, 50, 1e-5)
    assert advanced_composition(step, 50, 1e-5) == pytest.approx(3.0, rel=1e-9)
