"""Calibration: sound models lie on the diagonal, over-confident ones do not; coverage against the normal law."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.evaluation.calibration import coverage, preference_calibration

QUARTER = LabelNoise(math.log(3), Fraction(3, 4))


def noisy_margins(count: int, epsilon: float, seed: int) -> np.ndarray:
    """Margins r̄(chosen) − r̄(rejected) of a model that knows the truth, `chosen` by a private Bradley–Terry label."""
    generator = np.random.default_rng(seed)
    margin = generator.normal(0, 2, count)
    label = np.where(generator.random(count) < 1 / (1 + np.exp(-margin)), 1, -1)
    kept = generator.random(count) < 1 / (1 + math.exp(-epsilon))
    return margin * np.where(kept, label, -label)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_true_model_is_calibrated_whatever_the_noise(epsilon: float) -> None:
    """Five shares within 3.3 standard errors (a true model fails one seed in 200); an over-confident one is caught."""
    noise = LabelNoise.of(epsilon)
    margin = noisy_margins(40_000, epsilon, seed=1)
    rows = preference_calibration(margin, noise)
    assert [row["n"] for row in rows] == [8000] * 5
    for row in rows:
        standard_error = (row["ci_high"] - row["ci_low"]) / (2 * 1.96)
        assert abs(row["observed"] - row["predicted"]) < 3.3 * standard_error
    assert [row["predicted"] for row in rows] == sorted(row["predicted"] for row in rows)
    assert any(row["predicted"] > row["ci_high"] for row in preference_calibration(3 * margin, noise))
    assert all(row["predicted"] > row["ci_high"] for row in preference_calibration(margin, PUBLIC)[3:])  # noise left in


def test_debiased_shares_are_exact_and_not_clipped() -> None:
    rows = preference_calibration(np.array([1.0, 1.0, -1.0, 1.0]), QUARTER, bins=1)
    assert rows[0]["observed"] == pytest.approx((0.75 - 0.25) / 0.5)
    assert rows[0]["predicted"] == pytest.approx(1 / (1 + math.exp(-1)))
    assert preference_calibration(np.array([1.0, 2.0]), QUARTER, bins=1)[0]["observed"] == pytest.approx(1.5)


def test_ties_and_few_pairs() -> None:
    assert preference_calibration(np.zeros(3), QUARTER) == []
    assert [row["n"] for row in preference_calibration(np.array([1.0, 0.0, -2.0]), QUARTER)] == [1, 1]
    with pytest.raises(ValueError, match="epsilon"):
        preference_calibration(np.ones(2), LabelNoise.of(0.0))


def test_coverage_is_nominal_for_normal_errors_and_blind_to_shifts_of_a_prompt() -> None:
    generator = np.random.default_rng(0)
    truth, shift = generator.normal(size=(4000, 50)), generator.normal(0, 9, size=(4000, 1))
    scale = generator.uniform(0.1, 2, size=(4000, 50))
    reward = truth + scale * generator.normal(size=truth.shape) + shift
    rows = coverage(reward, scale * math.sqrt(49 / 50), truth)
    assert [row["kappa"] for row in rows] == sorted(row["kappa"] for row in rows)
    assert all(row["coverage"] == pytest.approx(row["nominal"], abs=0.03) for row in rows)
    assert all(row["ci_low"] < row["coverage"] < row["ci_high"] for row in rows)
    assert rows[0]["n"] == truth.size


def test_coverage_by_hand() -> None:
    reward, truth = np.array([[1.0, 3.0]]), np.array([[0.0, 4.0]])  # centred: ∓1 against ∓2, both off by one
    rows = coverage(reward, np.array([[0.5, 2.0]]), truth, kappas=(0.25, 1.0, 2.0))
    assert [row["coverage"] for row in rows] == [0.0, 0.5, 1.0]
    assert coverage(truth, np.zeros((1, 2)), truth)[0]["coverage"] == 1.0
