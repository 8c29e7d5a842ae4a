"""The ridge of the largest evidence: against the integral itself, and where cross-validation fails."""

from __future__ import annotations

import math

import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.bonus_fit import elliptical_bonus, fit_ensemble
from private_rlhf.reward_models.linear import PairProblem, fit_linear, ridge_in_units_of
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.ridge import (
    MARGIN_SCALE,
    assign_folds,
    evidence_ridges,
    log_evidence,
    ridge_by_evidence,
    ridge_from_margin_scale,
    select_ridge,
)


def pairs(count: int, theta: list[float], epsilon: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, count, len(theta), generator=generator, dtype=torch.float64).unbind()
    noise = LabelNoise.of(epsilon)
    prefer = torch.sigmoid((first - second) @ torch.tensor(theta, dtype=torch.float64))
    plus = noise.keep_prob * prefer + noise.flip_prob * (1 - prefer)
    label = torch.where(torch.rand(count, generator=generator, dtype=torch.float64) < plus, 1.0, -1.0).double()
    return first, second, label


def problem(count: int, theta: list[float], epsilon: float, seed: int = 0) -> PairProblem:
    noise = LabelNoise.of(epsilon)
    return PairProblem(*pairs(count, theta, epsilon, seed), noise, None, get_loss("private_likelihood"))


@pytest.mark.parametrize("epsilon", [0.5, 2.0, math.inf])
def test_laplace_is_close_to_the_integral_over_one_weight(epsilon: float) -> None:
    """log ∫ P̃(z|θ) N(θ; 0, 1/λ) dθ by the trapezium rule."""
    held = problem(600, [0.8], epsilon)
    ridges = [100.0, 10.0, 1.0, 0.1]
    grid = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    likelihood = torch.tensor([-held.total_loss(theta[None]) for theta in grid[::20]])
    fine = grid[::20]
    for ridge in ridges:
        found, _ = log_evidence(held, ridge)
        prior = 0.5 * math.log(ridge / (2 * math.pi)) - 0.5 * ridge * fine**2
        exact = float(torch.logsumexp(likelihood + prior, dim=0)) + math.log(float(fine[1] - fine[0]))
        assert found == pytest.approx(exact, abs=0.15)


def test_the_ridge_follows_the_signal() -> None:
    noise = LabelNoise.of(1.0)
    ridges = [
        ridge_by_evidence(*pairs(1000, [scale] * 8, 1.0, seed=3), noise, None) for scale in (0.0, 0.3, 1.0)
    ]
    assert ridges[0] > ridges[1] > ridges[2]


def test_without_labels_the_prior_decides() -> None:
    none = torch.empty(0, 8, dtype=torch.float64)
    found = ridge_by_evidence(none, none, none[:, 0], LabelNoise.of(1.0), None)
    assert found == min(evidence_ridges(8), key=lambda ridge: abs(math.log(ridge * MARGIN_SCALE**2 / 8)))


def test_few_noisy_labels_never_get_a_tiny_ridge() -> None:
    """120 labels at ε = 0.5 about 60 weights say next to nothing: no draw of them leads far from the prior, where
    cross-validation takes a ridge of a hundredth of it.
    """
    noise, theta = LabelNoise.of(0.5), [0.1] * 60
    known, judged = ridge_from_margin_scale(MARGIN_SCALE, 60), []
    for seed in range(10):
        drawn = pairs(120, theta, 0.5, seed=seed)
        assert known / 20 < ridge_by_evidence(*drawn, noise, None) < 20 * known
        judged.append(select_ridge(*drawn, noise, folds=torch.from_numpy(assign_folds(range(120), 5, 0))).ridge)
    assert min(judged) < known / 20


def test_units_of_losses() -> None:
    noise = LabelNoise.of(1.0)
    assert ridge_in_units_of(get_loss("private_likelihood"), 3.0, noise) == pytest.approx(3.0)
    assert ridge_in_units_of(get_loss("private_least_squares"), 3.0, noise) == pytest.approx(6.0)
    assert ridge_in_units_of(get_loss("debiased"), 3.0, noise) > 3.0


@pytest.mark.parametrize("loss", ["private_least_squares", "debiased"])
def test_one_prior_gives_one_uncertainty_whatever_the_loss(loss: str) -> None:
    """Γ is of the private labels' information and of the prior; the ridge of another loss has another unit."""
    noise, drawn = LabelNoise.of(0.5), pairs(400, [0.5] * 6, 0.5, seed=1)
    ridge = ridge_in_units_of(get_loss(loss), 12.0, noise)
    fit, likely = fit_linear(*drawn, noise, ridge=ridge, loss=loss), fit_linear(*drawn, noise, ridge=12.0)
    assert likely.prior == likely.ridge == 12.0
    assert fit.prior == pytest.approx(12.0)
    deviations, expected = (torch.linalg.inv(each.information).diagonal().sqrt() for each in (fit, likely))
    assert torch.allclose(deviations, expected, rtol=0.05)
    spread = fit_ensemble(fit, *drawn, num_heads=200).heads.std(dim=0)
    assert torch.allclose(spread, expected, rtol=0.3)  # 200 heads: ±5 % each, and the fit's own curvature
    bounded = [fit_linear(*drawn, noise, ridge=weight, loss=name, reward_bound=8.0)
               for weight, name in ((ridge, loss), (12.0, "private_likelihood"))]  # fmt: skip
    few = [elliptical_bonus(each, *(side[:2] for side in drawn[:2])).covariance for each in bounded]
    least = [float(torch.linalg.eigvalsh(covariance)[0]) for covariance in few]  # two pairs leave the prior in most
    assert least == pytest.approx([6.0, 6.0], rel=1e-6)
    trusting = fit_linear(*drawn, noise, ridge=12.0, loss="uncorrected")
    assert trusting.prior == 12.0  # it takes z for the truth
