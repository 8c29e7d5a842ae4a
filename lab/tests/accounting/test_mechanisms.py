"""DPTD and private RL."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from private_rlhf.accounting.conversions import advanced_composition, zcdp_epsilon
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions
from private_rlhf.accounting.subset_sampling import least_noise_multiplier
from private_rlhf_lab.accounting.dptd import dptd, joint_sensitivity
from private_rlhf_lab.accounting.private_rl import private_rl
from scipy.stats import norm


def test_both_players_are_one_event() -> None:
    """σ per player over 2√2·G; with the whole population of one record it is the plain Gaussian mechanism."""
    assert joint_sensitivity(1.0) == pytest.approx(2.0 * math.sqrt(2.0))
    single = dptd(1, 10, 1.0, 20.0, 1e-5, "transition")
    multiplier = 20.0 / (2.0 * math.sqrt(2.0))
    assert single.details["noise_multiplier"] == pytest.approx(multiplier)
    spread = multiplier / math.sqrt(10)
    tails = norm.cdf([0.5 / spread - single.epsilon * spread, -0.5 / spread - single.epsilon * spread])
    assert tails[0] - math.exp(single.epsilon) * tails[1] == pytest.approx(1e-5, rel=0.02)
    assert dptd(500, 10, 1.0, 20.0, 1e-5, "transition").epsilon < single.epsilon


def test_trajectories_are_sampled_one_in_m() -> None:
    by_trajectory = dptd(2500, 20, 1.0, 6.0, 1e-5, "trajectory", trajectories=5)
    assert by_trajectory.details["sampling_rate"] == 0.2
    assert by_trajectory.epsilon == dptd(5, 20, 1.0, 6.0, 1e-5, "transition").epsilon
    assert by_trajectory.epsilon > dptd(2500, 20, 1.0, 6.0, 1e-5, "transition").epsilon


def test_the_published_noise_of_dptd_is_not_private() -> None:
    """Multiplier 0.03 at n = 2500, T = 39: claimed ε = 1."""
    assert dptd(2500, 39, 1.0, 0.03 * joint_sensitivity(1.0), 1e-5, "transition").epsilon > 100.0


def test_calibrated_noise_meets_the_target_and_is_not_wasteful() -> None:
    sigma = joint_sensitivity(1.0) * least_noise_multiplier(1.0, 2500, 39, 1e-5)
    assert dptd(2500, 39, 1.0, sigma, 1e-5, "transition").epsilon <= 1.0
    assert dptd(2500, 39, 1.0, 0.99 * sigma, 1e-5, "transition").epsilon > 1.0


def test_private_rl_by_every_route() -> None:
    exact = private_rl(99, 8.0, 1e-5, 1.0)
    assert (exact.epsilon, exact.delta, exact.details["route"]) == (8.0, 1e-5, "bounded_range")
    found = private_rl(99, 8.0, 1e-5, 1.0, exact=False)
    assert (found.epsilon, found.delta, found.details["route"]) == (8.0, 1e-5, "zcdp")
    assert 1.05 < exact.details["exponent"] / found.details["exponent"] < 1.08
    assert exact.details["zcdp"] == found.details["zcdp"]
    many = private_rl(1000, 8.0, 1e-5, 1.0).details
    assert (many["route"], "bounded_range" in many) == ("zcdp", False)
    step = found.details["zcdp"]["epsilon_per_update"]
    assert step == pytest.approx(math.sqrt(8 * 1.2297 / 99), rel=1e-3)
    assert zcdp_epsilon(99 * step**2 / 8, 1e-5) <= 8.0
    assert found.details["exponent"] == pytest.approx(step / 2)
    advanced = found.details["advanced_composition"]["epsilon_per_update"]
    assert advanced_composition(advanced, 99, 1e-5) == pytest.approx(8.0)
    assert private_rl(99, 8.0, 1e-5, 25.0, exact=False).details["exponent"] == pytest.approx(step / 50)
    assert private_rl(1, 8.0, 1e-5, 1.0).details["route"] == "basic"


def test_exponential_mechanism_is_as_private_as_assumed() -> None:
    """Scores move by at most 1 either way: the exact loss of one draw is at most ε₀, and attained."""
    step = private_rl(10, 4.0, 1e-5, 1.0).details["epsilon_per_update"]
    weight = step / 2.0
    worst = 0.0
    for move in itertools.product((-1.0, 0.0, 1.0), repeat=3):
        base = np.array([0.0, -40.0, 3.0])
        logs = [s * weight - np.log(np.exp(s * weight).sum()) for s in (base, base + np.array(move))]
        worst = max(worst, float(np.abs(logs[0] - logs[1]).max()))
    assert 0.5 * step < worst <= step


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dptd(100, 10, 0.0, 1.0, 1e-5, "transition"), "clip"),
        (lambda: dptd(100, 10, 1.0, 1.0, 0.0, "transition"), "target_delta"),
        (lambda: dptd(100, 10, 1.0, 1.0, 1e-5, "trajectory"), "trajectories"),
        (lambda: dptd(None, 10, 1.0, 1.0, 1e-5, "transition"), "rows"),
        (lambda: dptd(4, 10, 1.0, 1.0, 1e-5, "trajectory", 5), "trajectories"),
        (lambda: dptd(100, 10, 1.0, 1.0, 1e-5, "row"), "neighbors"),
        (lambda: private_rl(0, 8.0, 1e-5, 1.0), "updates"),
        (lambda: private_rl(3, 8.0, 0.0, 1.0), "delta"),
        (lambda: private_rl(3, 8.0, 1e-5, 0.0), "sensitivity"),
    ],
)
def test_outside_the_assumptions(call: object, name: str) -> None:
    with pytest.raises(OutsideAssumptions, match=f"^{name} "):
        call()  # type: ignore[operator]
