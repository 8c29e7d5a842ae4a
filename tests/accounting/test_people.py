"""Randomised response per person, and conversions between notions of privacy."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.accounting.conversions import advanced_composition, zcdp_epsilon, zcdp_epsilon_closed, zcdp_rho
from private_rlhf.accounting.people import at_levels, randomized_response
from private_rlhf.privacy.person import person_epsilon
from scipy.stats import norm


def test_person_level_by_enumeration() -> None:
    """Eight labels of one person: exact δ at the promised ε over all 256 released vectors."""
    promise = randomized_response(0.5, 8, 1e-3)
    assert (promise.epsilon, promise.delta) == (4.0, 0.0)
    alpha = math.exp(0.5) / (1 + math.exp(0.5))
    matches = np.array([sum(bits) for bits in itertools.product((0, 1), repeat=8)])
    p = alpha**matches * (1 - alpha) ** (8 - matches)
    q = p[::-1]
    assert np.maximum(p - math.exp(promise.details["exact"]["epsilon"]) * q, 0).sum() == pytest.approx(1e-3, rel=1e-6)
    assert np.log(p / q).max() == pytest.approx(4.0)


def test_a_hundred_labels_of_one_person() -> None:
    assert randomized_response(0.5, 100).details["exact"]["epsilon"] == pytest.approx(33.3, abs=0.05)
    assert randomized_response(0.5, 10**6).details["exact"]["epsilon"] is None


@given(st.dictionaries(st.integers(1, 60), st.integers(1, 30), min_size=1, max_size=4))
def test_answers_at_several_levels_add_up_exactly(tenths: dict[int, int]) -> None:
    """In whole tenths; the exact ε at δ is at most the sum, and rounding takes nothing from it."""
    answers = [(tenth / 10, number) for tenth, number in tenths.items()]
    promise = at_levels(answers, 1e-3)
    totals = [tenth * number for tenth, number in tenths.items()]
    assert promise.epsilon == sum(totals) / 10
    assert [row["total"] for row in promise.details["by_level"]] == [total / 10 for total in totals]
    assert promise.details["exact"]["epsilon"] == person_epsilon(answers, 1e-3) <= promise.epsilon + 1e-12
    if len(answers) == 1:
        assert promise.details["exact"] == randomized_response(*answers[0], 1e-3).details["exact"]


def test_levels_of_a_person_by_enumeration() -> None:
    """Two answers at .5 and one at 2: the largest log-ratio of all vectors is the sum, and δ at the stated ε holds."""
    promise, levels = at_levels([(0.5, 2), (2.0, 1)], 1e-2), np.array([0.5, 0.5, 2.0])
    keep = 1 / (1 + np.exp(-levels))
    vectors = np.array(list(itertools.product((0, 1), repeat=3)))
    p, q = (np.where(vectors == side, keep, 1 - keep).prod(axis=1) for side in (1, 0))
    assert np.log(p / q).max() == pytest.approx(promise.epsilon) == pytest.approx(3.0)
    assert np.maximum(p - math.exp(promise.details["exact"]["epsilon"]) * q, 0).sum() <= 1e-2


def gaussian_delta(epsilon: float, rho: float) -> float:
    """Exact δ of the Gaussian mechanism that is exactly ρ-zCDP (Balle and Wang 2018): sensitivity/σ = √(2ρ)."""
    mu = math.sqrt(2.0 * rho)
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("rho", [1e-4, 0.03, 1.2, 40.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_zcdp_conversion_covers_the_gaussian_and_beats_the_closed_form(rho: float, delta: float) -> None:
    epsilon = zcdp_epsilon(rho, delta)
    assert gaussian_delta(epsilon, rho) <= delta * (1 + 1e-9)
    assert epsilon <= zcdp_epsilon_closed(rho, delta)
    orders = 1.0 + np.geomspace(1e-4, 1e5, 40_000)
    grid = rho * orders + np.log(1 / (orders * delta)) / (orders - 1) + np.log1p(-1 / orders)
    assert epsilon == pytest.approx(max(0.0, grid.min()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("epsilon", "rho"), [(8.0, 1.230), (5.0, 0.551), (2.0, 0.108), (1.0, 0.0306)])
def test_rho_of_published_budgets(epsilon: float, rho: float) -> None:
    largest = zcdp_rho(epsilon, 1e-5)
    assert largest == pytest.approx(rho, abs=5e-4)
    assert zcdp_epsilon(largest, 1e-5) <= epsilon < zcdp_epsilon(largest * 1.001, 1e-5)


def test_advanced_composition_keeps_both_terms() -> None:
    assert advanced_composition(0.1, 10, 1e-5) == pytest.approx(0.1 * math.sqrt(20 * math.log(1e5)) + math.expm1(0.1))
    assert advanced_composition(0.0, 5, 1e-5) == 0.0


def test_accountants_load_nothing_heavy() -> None:
    """A privacy card may call them."""
    heavy = ("torch", "transformers", "dp_accounting", "matplotlib")
    modules = "private_rlhf.accounting.people, private_rlhf.accounting.conversions, private_rlhf.commands.account"
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
