"""Published noise, its side conditions and the accountant's: closed forms, and an attack that tells them apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.accounting.subset_sampling import composed_epsilon
from private_rlhf_lab.accounting.dptd import dptd, joint_sensitivity
from private_rlhf_lab.studies.dptd import attack, before_after, noise, theory
from private_rlhf_lab.studies.dptd.trajectories import Transitions

BUDGET = noise.Budget(1.0, 1e-5, 39, 1.0, 2500, 5, 500)


def test_step_sizes() -> None:
    assert noise.step_sizes(3) == pytest.approx([1 / (4 * math.sqrt(t + 3)) for t in range(3)])


def test_published_noise_by_hand() -> None:
    """Theorem 5.1 at n = 2500, T = 39, ε = 1, δ = 1e-5, β' = 1/2: σ² = 14·39·α'/(2500²·½)."""
    found = noise.paper_noise(BUDGET, 0.5)
    order = math.log(1e5) / 0.5 + 1.0
    assert found.order == pytest.approx(order)
    assert found.sigma**2 == pytest.approx(14 * 39 * order / (2500**2 * 0.5))
    assert found.relative_variance == pytest.approx(found.sigma**2 / 4)
    assert not found.admissible
    # The noise multiplier that makes the theorem void: 0.03 of one player's sensitivity.
    assert found.sigma / 2.0 == pytest.approx(0.0324, abs=1e-4)


def test_trajectories_multiply_the_published_noise() -> None:
    """Theorem A.1: 2nG for 2G, m for n."""
    whole = noise.paper_noise(replace(BUDGET, neighbors="trajectory"), 0.5)
    assert whole.sigma == pytest.approx(noise.paper_noise(BUDGET, 0.5).sigma * 500 * 2500 / 5)


@given(st.floats(0.05, 200.0), st.floats(1e-9, 0.1), st.floats(0.001, 0.999))
def test_no_split_asks_for_less_noise(epsilon: float, delta: float, split: float) -> None:
    budget = replace(BUDGET, epsilon=epsilon, delta=delta)
    least = noise.least_noise_split(epsilon, delta)
    assert 0.0 < least < 1.0
    assert noise.paper_noise(budget).sigma <= noise.paper_noise(budget, split).sigma * (1 + 1e-9)


def test_the_admissible_split_is_the_largest() -> None:
    found = noise.admissible_noise(BUDGET)
    assert found is not None
    assert found.admissible
    assert not noise.paper_noise(BUDGET, found.split * 1.0101).admissible
    assert found.sigma > 10 * noise.paper_noise(BUDGET).sigma


def test_theorem_steps() -> None:
    assert BUDGET.theorem_steps(351) == pytest.approx(2500 / math.sqrt(351 * math.log(1e5)))
    whole = replace(BUDGET, neighbors="trajectory")
    assert whole.theorem_steps(351) == pytest.approx(5 / (500 * math.sqrt(351 * math.log(1e5))))


@pytest.mark.parametrize(("neighbors", "epsilon"), [("transition", 0.1), ("transition", 1.0), ("trajectory", 1.0)])
def test_the_accountant_s_calibration_meets_the_claim(neighbors: noise.Neighbors, epsilon: float) -> None:
    """Certified by the public accountant with all its orders, and not much noise is wasted."""
    budget = replace(BUDGET, neighbors=neighbors, epsilon=epsilon)
    sigma = noise.accountant_sigma(budget)
    trajectories = 5 if neighbors == "trajectory" else None
    certified = dptd(2500, 39, 1.0, sigma, 1e-5, neighbors, trajectories).epsilon
    assert 0.7 * epsilon <= certified <= epsilon
    deviations = noise.deviations("accountant", budget)
    assert deviations[0] == sigma
    assert deviations[1:] == pytest.approx(sigma * 3.0 * noise.step_sizes(38))


def test_constant_noise_is_accounted_step_by_step() -> None:
    """Between the bounds of all steps at the weakest and all at the strongest multiplier; weakest at t = 0."""
    found = noise.bracket(BUDGET, 3.0)
    weakest = 3.0 / joint_sensitivity(1.0)
    strongest = weakest / (3.0 * noise.step_sizes(38)[-1])
    high, low = (composed_epsilon(2500, [(each, 39)], 1e-5) for each in (weakest, strongest))
    assert low < found.low <= found.high <= high
    assert found.high < 0.1 * found.renyi


def transitions(rows: int = 40) -> Transitions:
    generator = np.random.default_rng(3)
    return Transitions(
        0.1 * generator.normal(size=(rows, 4)),
        np.ones(rows),
        0.1 * generator.normal(size=(rows, 4)),
        np.full(rows, 0.95),
        np.zeros(rows, dtype=np.int64),
    )


def test_the_attack_sees_the_paper_s_noise_and_not_strong_noise() -> None:
    """At deviation 0.05 a used transition is identified; at 100 nothing is learnt of it."""
    weak = attack.attack(transitions(), np.full(5, 0.05), 1.0, 12, seed=1)
    assert weak.drawn == pytest.approx(1 - (39 / 40) ** 5)
    found = weak.delta(1.0)
    delta, low, high = found.value, found.ci_low, found.ci_high
    assert delta > 0.9 * weak.drawn
    assert low <= delta <= high <= weak.drawn
    strong = attack.attack(transitions(), np.full(5, 100.0), 1.0, 12, seed=1)
    assert np.abs(strong.losses).max() < 0.1
    assert strong.delta(1.0).value == 0.0


def test_the_attack_s_loss_of_one_step_by_hand() -> None:
    """One step, two rows: log of the ratio of two mixtures of Gaussians, written out."""
    samples = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]])
    gap, sigma = np.array([0.3, 0.4]), 0.7

    def density(rows: list[int]) -> float:
        return sum(math.exp(-((gap - 0.5 * samples[row]) ** 2).sum() / (2 * sigma**2)) for row in rows)

    ratio = attack._log_mixture(gap, 0.5, samples[:2], sigma) - attack._log_mixture(gap, 0.5, samples[1:], sigma)
    assert ratio == pytest.approx(math.log(density([0, 1]) / density([1, 2])))


def test_rows_given_a_use() -> None:
    """Every run uses the row; the first use has its conditional law (5 sd: false alarm below 1e-6)."""
    rows, steps, runs = 6, 4, 40_000
    found = attack.rows_using(2, rows, steps, runs, np.random.default_rng(0))
    assert (found == 2).any(axis=0).all()
    law = (5 / 6) ** np.arange(steps) / ((5 / 6) ** np.arange(steps)).sum()
    first = np.bincount((found == 2).argmax(axis=0), minlength=steps) / runs
    assert np.abs(first - law).max() < 5 * math.sqrt(0.25 / runs)


@settings(max_examples=20)
@given(st.floats(0.0, 5.0))
def test_delta_of_a_loss(epsilon: float) -> None:
    found = attack.Attack(0.5, np.array([epsilon + math.log(4.0), epsilon - 1.0]))
    assert found.delta(epsilon).value == pytest.approx(0.5 * 0.75 / 2)


def test_elu_s_kink_breaks_lipschitz_gradients() -> None:
    from private_rlhf_lab.studies.dptd.network import initial

    theta = initial(1, 4, np.random.default_rng(5))[0]
    assert theory.kink_growth(transitions(), theta) > 100.0


def test_noise_before_and_after_is_a_table_of_what_both_bounds_ask_for() -> None:
    (found,) = before_after.rows([("few", 50, 3)])
    assert found.losses < found.renyi
    assert found.low <= found.high < before_after.EPSILON  # Rényi's noise is more than ε = 1 needs
    assert composed_epsilon(50, [(found.losses, 3)], before_after.DELTA) <= before_after.EPSILON
    line = before_after.table([found]).splitlines()[-1]
    assert line.startswith(f"| few | 50 | 3 | {found.renyi:.3f} | {found.losses:.3f} |")
