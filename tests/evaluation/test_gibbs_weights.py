"""The Gibbs yardstick against closed forms, and its convergence to the exact policy as draws are added."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.evaluation.rates import beats, gibbs_expectations
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform


@given(gap=st.floats(-20, 20), kl_coef=st.floats(0.05, 5), shift=st.floats(-1e3, 1e3))
def test_two_candidates_are_a_sigmoid(gap: float, kl_coef: float, shift: float) -> None:
    weights = gibbs_weights(np.array([shift + gap, shift]), kl_coef)
    share = 1 / (1 + math.exp(-((shift + gap) - shift) / kl_coef))
    assert weights == pytest.approx([share, 1 - share], abs=1e-9)
    entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
    assert float(kl_from_uniform(weights)) == pytest.approx(math.log(2) - entropy, abs=1e-6)


def test_limits_and_extremes() -> None:
    scores = np.array([[0.0, 1.0, 5.0], [2.0, 2.0, 2.0]])
    assert gibbs_weights(scores, 1e-3)[0] == pytest.approx([0, 0, 1])
    assert gibbs_weights(scores, 1e6) == pytest.approx(np.full((2, 3), 1 / 3), abs=1e-5)
    assert np.isfinite(gibbs_weights(np.array([1e5, -1e5]), 1e-3)).all()
    assert kl_from_uniform(np.array([[0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]])) == pytest.approx([math.log(3), 0])
    assert kl_from_uniform(gibbs_weights(np.array([3.0]), 1.0)) == 0  # one draw leaves no choice
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="kl_coef must be above 0"):
            gibbs_weights(scores, bad)
    for lost in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="scores must be finite"):
            gibbs_weights([0.0, lost], 1.0)
    assert gibbs_weights([1.0, 1.0], 1.0).tolist() == [0.5, 0.5]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(0.1, 3))
def test_kl_lies_between_zero_and_log_n(scores: list[float], kl_coef: float) -> None:
    kl = float(kl_from_uniform(gibbs_weights(np.array(scores), kl_coef)))
    assert -1e-12 <= kl <= math.log(len(scores)) + 1e-12


def test_ties_count_half() -> None:
    assert beats(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0])).tolist() == [0.0, 0.5, 1.0]


REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
ESTIMATE = np.array([0.0, 1.0, -1.0, 2.5])
TRUTH = np.array([0.5, 0.7, -2.0, 1.0])
KL_COEF = 0.8


def expectations(draws: int, prompts: int, seed: int) -> np.ndarray:
    """Mean (r*, r̄, KL, win) over prompts whose answers come from a distribution over four responses."""
    generator = np.random.default_rng(seed)
    picks = generator.choice(4, p=REFERENCE, size=(prompts, draws))
    base = generator.choice(4, p=REFERENCE, size=prompts)
    found = gibbs_expectations(ESTIMATE[picks], ESTIMATE[picks], TRUTH[picks], KL_COEF, ESTIMATE[base], TRUTH[base])
    assert found.true_reward is not None
    assert found.win_truth is not None
    return np.array([found.true_reward.mean(), found.reward.mean(), found.kl.mean(), found.win_truth.mean()])


def exact() -> np.ndarray:
    policy = REFERENCE * np.exp(ESTIMATE / KL_COEF)
    policy /= policy.sum()
    win = (beats(TRUTH[:, None], TRUTH[None, :]) * policy[:, None] * REFERENCE[None, :]).sum()
    return np.array([policy @ TRUTH, policy @ ESTIMATE, policy @ np.log(policy / REFERENCE), win])


def test_expectations_converge_to_the_exact_gibbs_policy() -> None:
    """The bias falls like 1/N; at N = 2,000 with 400 prompts it is inside the noise of the baseline answers."""
    errors = [np.abs(expectations(draws, 4000, seed=1)[:3] - exact()[:3]).max() for draws in (4, 32, 256)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert expectations(2000, 400, seed=2) == pytest.approx(exact(), abs=0.06)
    assert errors[2] < 0.02


def test_the_objective_is_understated_never_overstated() -> None:
    """J of the yardstick rises with N towards the optimum of r̂ = r*."""
    best = KL_COEF * math.log((REFERENCE * np.exp(ESTIMATE / KL_COEF)).sum())
    values = []
    for draws in (1, 4, 16, 64):
        _, reward, kl, _ = expectations(draws, 4000, seed=3)
        values.append(reward - KL_COEF * kl)
    assert values == sorted(values)
    assert values[-1] < best + 0.01
    assert values[-1] > best - 0.05


def test_without_truth_there_is_none() -> None:
    scores = np.array([[0.0, 1.0]])
    found = gibbs_expectations(scores, scores, None, 1.0, np.array([0.0]), None)
    assert found.true_reward is None
    assert found.win_truth is None
    assert found.win_reward == pytest.approx([0.5 * (1 - 0.7310586) + 0.7310586])
