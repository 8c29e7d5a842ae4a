"""Losses against closed forms, finite differences, high-precision references, and their known limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.losses import (
    LOSSES,
    check_reward_bound,
    debiased_loss,
    fisher_weight,
    get_loss,
    private_likelihood_loss,
    uncorrected_loss,
)

EPSILONS = (1e-4, 0.1, 0.5, 2.0, 8.0, 40.0, math.inf)
MARGINS = (-1e4, -300.0, -30.0, -3.0, -0.2, 0.0, 1e-3, 1.0, 7.0, 60.0, 1e4)


def _grid(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = list(itertools.product(MARGINS, (-1.0, 1.0)))
    return tuple(torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))


def _sigmoid(x: float) -> np.longdouble:
    x = np.longdouble(x)
    return 1 / (1 + np.exp(-x)) if x > 0 else np.exp(x) / (1 + np.exp(x))


def _reference_probability(margin: float, label: float, epsilon: float) -> np.longdouble:
    flip = np.longdouble(0) if math.isinf(epsilon) else _sigmoid(-epsilon)
    return (1 - flip) * _sigmoid(label * margin) + flip * _sigmoid(-label * margin)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_private_likelihood_value_and_gradient_match_extended_precision(epsilon: float) -> None:
    margin, label = _grid(torch.float32)
    margin.requires_grad_()
    loss = private_likelihood_loss(margin, label, epsilon)
    (gradient,) = torch.autograd.grad(loss.sum(), margin)
    for i, (m, z) in enumerate(zip(margin.tolist(), label.tolist(), strict=True)):
        probability = _reference_probability(m, z, epsilon)
        if probability > 0:
            assert float(loss.detach()[i]) == pytest.approx(float(-np.log(probability)), rel=1e-5, abs=1e-6)
            slope = -z * LabelNoise.of(epsilon).factor * _sigmoid(m) * _sigmoid(-m) / probability
            # Relative accuracy also where the gradient is tiny: a naive logaddexp fails this at small epsilon.
            assert float(gradient[i]) == pytest.approx(float(slope), rel=2e-5, abs=1e-37)
        else:
            assert float(loss.detach()[i]) == pytest.approx(abs(m), rel=1e-6)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", LOSSES)
def test_everything_is_finite_and_slope_is_the_gradient(name: str, epsilon: float) -> None:
    loss = get_loss(name)
    for dtype, tolerance in ((torch.float32, 3e-5), (torch.float64, 1e-12)):
        margin, label = _grid(dtype)
        margin.requires_grad_()
        value = loss.value(margin, label, epsilon)
        assert value.dtype == dtype
        assert value.shape == margin.shape
        (gradient,) = torch.autograd.grad(value.sum(), margin, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), margin)
        slope = loss.slope(margin.detach(), label, epsilon)
        curvature = loss.curvature(margin.detach(), epsilon)
        for tensor in (value, gradient, second, slope, curvature):
            assert bool(torch.isfinite(tensor).all())
        assert bool((curvature >= 0).all())
        torch.testing.assert_close(gradient.detach(), slope, rtol=tolerance, atol=1e-30)


def _reference_second_derivative(name: str, margin: float, label: float, epsilon: float) -> np.longdouble:
    """Closed forms in extended precision, in x = zΔ; P = (1−α) + (2α−1) σ(x) is the likelihood of the label."""
    up, down = _sigmoid(label * margin), _sigmoid(-label * margin)
    slope, bend = up * down, up * down * (down - up)
    flip = np.longdouble(0) if math.isinf(epsilon) else _sigmoid(-epsilon)
    signal = 1 - 2 * flip
    if name == "private_likelihood":
        likelihood = flip + signal * up
        return (signal * slope / likelihood) ** 2 - signal * bend / likelihood if likelihood > 0 else slope
    if name == "private_least_squares":
        return 8 * (signal * slope) ** 2 - 8 * (flip + signal * down) * signal * bend
    return slope


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_match_extended_precision_at_all_margins(name: str, epsilon: float) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-8)):
        margin, label = _grid(dtype)
        margin.requires_grad_()
        (gradient,) = torch.autograd.grad(get_loss(name).value(margin, label, epsilon).sum(), margin, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), margin)
        expected = [
            float(_reference_second_derivative(name, m, z, epsilon))
            for m, z in zip(margin.tolist(), label.tolist(), strict=True)
        ]
        scale = min(1.0, max(abs(value) for value in expected))
        assert second.tolist() == pytest.approx(expected, abs=tolerance * scale)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_least_squares_matches_extended_precision_relatively(epsilon: float) -> None:
    """Also where prediction and label agree to within rounding: the textbook difference of the two is then noise."""
    margin, label = _grid(torch.float32)
    loss = get_loss("private_least_squares")
    margin.requires_grad_()
    value = loss.value(margin, label, epsilon)
    (gradient,) = torch.autograd.grad(value.sum(), margin)
    flip = np.longdouble(0) if math.isinf(epsilon) else _sigmoid(-epsilon)
    for i, (m, z) in enumerate(zip(margin.tolist(), label.tolist(), strict=True)):
        error = 2 * (flip + (1 - 2 * flip) * _sigmoid(-z * m))
        slope = -4 * z * (1 - 2 * flip) * _sigmoid(m) * _sigmoid(-m) * error
        assert float(value.detach()[i]) == pytest.approx(float(error**2), rel=1e-5, abs=1e-37)
        assert float(gradient[i]) == pytest.approx(float(slope), rel=3e-5, abs=1e-37)
        textbook = ((2 * _sigmoid(m) - 1) * (1 - 2 * flip) - z) ** 2
        assert float(error**2) == pytest.approx(float(textbook), abs=1e-15)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", ["private_likelihood", "private_least_squares"])
def test_curvature_is_the_expected_second_derivative_by_enumeration(name: str, epsilon: float) -> None:
    """E_z[∂²ℓ] over both values of z at the true margin, which for the likelihood is the Fisher information."""
    loss = get_loss(name)
    margin = torch.linspace(-6, 6, 25, dtype=torch.float64).requires_grad_()
    expected = torch.zeros_like(margin)
    for z in (-1.0, 1.0):
        label = torch.full_like(margin, z)
        probability = torch.exp(-private_likelihood_loss(margin, label, epsilon)).detach()
        value = loss.value(margin, label, epsilon)
        (gradient,) = torch.autograd.grad(value.sum(), margin, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), margin)
        expected = expected + probability * second
    torch.testing.assert_close(loss.curvature(margin.detach(), epsilon), expected.detach(), rtol=1e-8, atol=1e-14)


@settings(deadline=None, derandomize=True)
@given(margin=st.floats(-12, 12), epsilon=st.floats(1e-3, 30))
def test_fisher_weight_is_the_variance_of_the_score(margin: float, epsilon: float) -> None:
    delta = torch.tensor([margin, margin], dtype=torch.float64)
    label = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss = get_loss("private_likelihood")
    probability = torch.exp(-loss.value(delta, label, epsilon))
    assert float(probability.sum()) == pytest.approx(1.0, abs=1e-12)
    score = loss.slope(delta, label, epsilon)
    assert float((probability * score).sum()) == pytest.approx(0.0, abs=1e-12)
    assert float(fisher_weight(delta[:1], epsilon)) == pytest.approx(float((probability * score**2).sum()), rel=1e-7)


def test_fisher_weight_known_values() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    for epsilon in EPSILONS:
        assert float(fisher_weight(zero, epsilon)) == pytest.approx(LabelNoise.of(epsilon).factor ** 2 / 4, rel=1e-12)
    tail = fisher_weight(torch.tensor([-20.0, 20.0]), math.inf)
    assert tail.tolist() == pytest.approx([math.exp(-20)] * 2, rel=1e-5)


@settings(deadline=None, derandomize=True)
@given(margin=st.floats(-1e4, 1e4), epsilon=st.floats(1e-4, 100))
def test_swapping_the_pair_and_the_label_changes_nothing(margin: float, epsilon: float) -> None:
    delta, one = torch.tensor([margin], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for name in LOSSES:
        loss = get_loss(name)
        assert torch.equal(loss.value(delta, one, epsilon), loss.value(-delta, -one, epsilon))
        torch.testing.assert_close(loss.curvature(delta, epsilon), loss.curvature(-delta, epsilon))


def test_limits_in_epsilon() -> None:
    margin, label = _grid(torch.float32)
    plain = torch.nn.functional.softplus(-margin * label)
    assert torch.equal(private_likelihood_loss(margin, label, math.inf), plain)
    assert torch.equal(debiased_loss(margin, label, math.inf), plain)
    # At epsilon = 38 a float alpha is 1; the flip still caps the loss of a confident miss at about epsilon.
    assert 1.0 - LabelNoise.of(38.0).flip_prob == 1.0
    confident_miss = private_likelihood_loss(torch.tensor([1e4]), torch.tensor([-1.0]), 38.0)
    assert float(confident_miss) == pytest.approx(38.0, rel=1e-6)
    margin = margin.clone().requires_grad_()
    nothing = private_likelihood_loss(margin, label, 0.0)
    torch.testing.assert_close(nothing.detach(), torch.full_like(nothing, math.log(2)).detach())
    (gradient,) = torch.autograd.grad(nothing.sum(), margin)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_debiased_loss_is_unbiased_for_the_clean_loss() -> None:
    margin = torch.linspace(-5, 5, 11, dtype=torch.float64)
    for epsilon, truth in itertools.product((0.1, 1.0, 5.0), (-1.0, 1.0)):
        label = torch.full_like(margin, truth)
        alpha = LabelNoise.of(epsilon).keep_prob
        mean = alpha * debiased_loss(margin, label, epsilon) + (1 - alpha) * debiased_loss(margin, -label, epsilon)
        torch.testing.assert_close(mean, uncorrected_loss(margin, label, epsilon), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("epsilon", "limit"), [(0.1, 0.08), (0.5, 0.38), (2.0, 1.33)])
def test_uncorrected_loss_shrinks_a_margin_of_two_to_its_known_limit(epsilon: float, limit: float) -> None:
    """Population minimisers on a grid: the corrected losses find 2, the uncorrected one the shrunken margin."""
    grid = torch.linspace(-1, 5, 60001, dtype=torch.float64)
    positive = float(torch.exp(-private_likelihood_loss(torch.tensor([2.0]).double(), torch.ones(1), epsilon)))
    ones = torch.ones_like(grid)
    for name in LOSSES:
        loss = get_loss(name)
        risk = positive * loss.value(grid, ones, epsilon) + (1 - positive) * loss.value(grid, -ones, epsilon)
        minimiser = float(grid[risk.argmin()])
        assert minimiser == pytest.approx(limit if name == "uncorrected" else 2.0, abs=0.006)


def test_label_smoothing_shrinks_further_and_is_refused() -> None:
    epsilon = 1.0
    alpha = LabelNoise.of(epsilon).keep_prob
    grid = torch.linspace(0, 3, 3001, dtype=torch.float64)
    positive = alpha * float(_sigmoid(2.0)) + (1 - alpha) * float(_sigmoid(-2.0))
    smoothed = alpha * positive + (1 - alpha) * (1 - positive)
    plain = torch.nn.functional.softplus
    minimisers = [float(grid[(p * plain(-grid) + (1 - p) * plain(grid)).argmin()]) for p in (positive, smoothed)]
    assert minimisers[1] < 0.6 * minimisers[0] < 2.0
    with pytest.raises(ValueError, match="already randomised"):
        get_loss("label_smoothing")


def test_bfloat16_margins_are_widened() -> None:
    margin = torch.tensor([1.5], dtype=torch.bfloat16)
    assert private_likelihood_loss(margin, torch.ones(1, dtype=torch.int64), 1.0).dtype == torch.float32


def test_errors_name_the_culprit() -> None:
    one = torch.ones(2)
    with pytest.raises(ValueError, match="epsilon must be a number of at least 0"):
        private_likelihood_loss(one, one, -1.0)
    with pytest.raises(ValueError, match="epsilon must be"):
        fisher_weight(one, math.nan)
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        debiased_loss(one, one, 0.0)
    for name in LOSSES:
        with pytest.raises(ValueError, match="private_label must have the shape"):
            get_loss(name).value(one, torch.ones(1), 1.0)
        with pytest.raises(ValueError, match=r"a label must be -1 or \+1"):
            get_loss(name).value(one, torch.tensor([1, 255], dtype=torch.uint8), 1.0)
    for bound in (True, "3", 0.0, math.inf):
        with pytest.raises(ValueError, match="reward_bound must be a positive width or None"):
            check_reward_bound(bound)  # type: ignore[arg-type]
    assert check_reward_bound(np.float32(3.0)) == 3.0
    with pytest.raises(ValueError, match=r"loss must be one of private_likelihood.*, got 'bt'"):
        get_loss("bt")
