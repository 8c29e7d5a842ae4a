"""The linear fit: optimality, monotone decrease, efficiency, and the ridge that replaces a runaway maximiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import identity_basis, pair_basis
from private_rlhf.reward_models.linear import LinearFit, fit_linear, minimize, pair_problem
from private_rlhf.reward_models.losses import LOSSES, bounded_reward, get_loss, private_likelihood_loss
from private_rlhf.reward_models.ridge import assign_folds, default_ridges, ridge_from_margin_scale, select_ridge
from scipy import optimize


def make_pairs(
    n: int, d: int, epsilon: float, *, scale: float = 1.0, bound: float | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """phi_a, phi_b (n, d), z (n,), w (d,): Gaussian features, a random w, labels through randomised response."""
    generator = torch.Generator().manual_seed(seed)
    phi_a, phi_b = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    weight = scale * torch.randn(d, dtype=torch.float64, generator=generator) / math.sqrt(2 * d)
    margin = bounded_reward(phi_a @ weight, bound) - bounded_reward(phi_b @ weight, bound)
    return phi_a, phi_b, draw_labels(margin, epsilon, generator), weight


def draw_labels(margin: torch.Tensor, epsilon: float, generator: torch.Generator) -> torch.Tensor:
    """z (n,) = randomised response of a Bradley-Terry label."""
    label = (
        torch.rand(margin.shape, dtype=torch.float64, generator=generator) < torch.sigmoid(margin)
    ).double() * 2 - 1
    drawn = torch.rand(margin.shape, dtype=torch.float64, generator=generator)
    kept = (drawn < LabelNoise.of(epsilon).keep_prob).double() * 2 - 1
    return label * kept


@pytest.mark.parametrize("bound", [None, 4.0])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_it_reaches_the_minimum_that_a_generic_optimiser_finds(name: str, epsilon: float, bound: float | None) -> None:
    phi_a, phi_b, label, _ = make_pairs(400, 4, epsilon, scale=2.0, bound=bound)
    ridge = 3.0
    fit = fit_linear(phi_a, phi_b, label, epsilon, ridge=ridge, reward_bound=bound, loss=name)

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        margin = bounded_reward(phi_a @ weight, bound) - bounded_reward(phi_b @ weight, bound)
        value = get_loss(name).value(margin, label, epsilon).sum() + 0.5 * ridge * weight @ weight
        (gradient,) = torch.autograd.grad(value, weight)
        return float(value.detach()), gradient.numpy()

    strict = {"ftol": 1e-15, "gtol": 1e-9}
    reference = optimize.minimize(objective, np.zeros(4), jac=True, method="L-BFGS-B", options=strict)
    assert objective(fit.weight.numpy())[0] <= reference.fun + 1e-8
    assert np.abs(objective(fit.weight.numpy())[1]).max() < 1e-2 * math.sqrt(1e-9 * 400) + 1e-3
    np.testing.assert_allclose(fit.weight.numpy(), reference.x, atol=1e-4)


def test_a_far_start_overshoots_without_backtracking() -> None:
    """At margins of ±40 the curvature is e^-40 and a full scoring step is astronomically long."""
    phi_a, phi_b, label, _ = make_pairs(300, 2, math.inf)
    near = fit_linear(phi_a, phi_b, label, math.inf, ridge=0.1)
    problem = pair_problem(phi_a, phi_b, label, math.inf, identity_basis(2), None, "private_likelihood")
    far = minimize(problem, 0.1, torch.tensor([30.0, -30.0]).double())
    torch.testing.assert_close(far, near.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bound", [None, 3.0])
def test_information_is_the_expected_hessian_by_enumeration(bound: float | None) -> None:
    """E over z_1..z_n of the Hessian of Σℓ at w: each term is an expectation over its own z, computed exactly."""
    epsilon, ridge = 1.0, 0.7
    phi_a, phi_b, label, _ = make_pairs(60, 3, epsilon, scale=2.0, bound=bound)
    fit = fit_linear(phi_a, phi_b, label, epsilon, ridge=ridge, reward_bound=bound)

    def expected_score_outer() -> torch.Tensor:
        weight = fit.weight.clone().requires_grad_()
        margin = bounded_reward(phi_a @ weight, bound) - bounded_reward(phi_b @ weight, bound)
        total = torch.zeros(3, 3, dtype=torch.float64)
        for z in (-1.0, 1.0):
            losses = private_likelihood_loss(margin, torch.full_like(margin, z), epsilon)
            for loss in losses:
                (score,) = torch.autograd.grad(loss, weight, retain_graph=True)
                total += torch.exp(-loss.detach()) * torch.outer(score, score)
        return total

    expected = expected_score_outer() + ridge * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(fit.information, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("epsilon", "n"), [(1.0, 6000), (math.inf, 1500)])
def test_private_mle_is_efficient(epsilon: float, n: int) -> None:
    """(ŵ−w)ᵀ I (ŵ−w)/d averages 1 at the Cramér-Rao bound. 400 repetitions with d = 3 give it a standard error of
    √(2/1200) = 0.041; the ±0.15 band is 3.7 standard errors, so a correct fit fails about once in 4,000 seeds (the seed
    is fixed), while the uncorrected fit at ε = 1 is off by more than a factor of 10."""
    phi_a, phi_b, _, weight = make_pairs(n, 3, epsilon, scale=1.0)
    margin = (phi_a - phi_b) @ weight
    generator = torch.Generator().manual_seed(11)
    ratios: dict[str, list[float]] = {"private_likelihood": [], "uncorrected": []}
    for repetition in range(400):
        label = draw_labels(margin, epsilon, generator)
        for name, values in ratios.items():
            if name == "uncorrected" and repetition >= 20:
                continue
            fit = fit_linear(phi_a, phi_b, label, epsilon, ridge=0.0, loss=name, tolerance=1e-6)
            error = fit.weight - weight
            values.append(float(error @ fit.information @ error) / 3)
    assert np.mean(ratios["private_likelihood"]) == pytest.approx(1.0, abs=0.15)
    if math.isfinite(epsilon):
        assert np.mean(ratios["uncorrected"]) > 10.0


def test_ridge_keeps_a_hopeless_problem_finite() -> None:
    """At ε = 0.1 with 300 pairs and 20 features (2α−1)²n < 1: the maximiser is at infinity."""
    phi_a, phi_b, label, _ = make_pairs(300, 20, 0.1)
    with pytest.raises(ValueError, match="raise ridge"):
        fit_linear(phi_a, phi_b, label, 0.1, ridge=0.0)
    held = fit_linear(phi_a, phi_b, label, 0.1, ridge=20.0)
    assert float(held.weight.norm()) < 0.2


def test_invariances() -> None:
    """Order of rows, swapping a pair with its label, a per-prompt shift of both features: the same w."""
    phi_a, phi_b, label, _ = make_pairs(300, 5, 1.0)

    def fit(a: torch.Tensor, b: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return fit_linear(a, b, z, 1.0, ridge=1.0).weight

    base = fit(phi_a, phi_b, label)
    assert torch.equal(base, fit(phi_a, phi_b, label))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(base, fit(phi_a[order], phi_b[order], label[order]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(base, fit(phi_b, phi_a, -label), rtol=1e-4, atol=1e-6)
    shift = 3.0 * torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(base, fit(phi_a + shift, phi_b + shift, label), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(base, fit(phi_a.numpy(), phi_b.numpy(), label.numpy()), rtol=0, atol=0)


def test_bounded_rewards_stay_bounded_and_a_wide_bound_changes_nothing() -> None:
    phi_a, phi_b, label, _ = make_pairs(500, 4, math.inf, scale=3.0)
    narrow = fit_linear(phi_a, phi_b, label, math.inf, ridge=1.0, reward_bound=2.0)
    assert float(narrow.reward(phi_a).abs().max()) <= 1.0
    assert float(narrow.margin(phi_a, phi_b).abs().max()) <= 2.0
    wide = fit_linear(phi_a, phi_b, label, math.inf, ridge=1.0, reward_bound=1e5)
    free = fit_linear(phi_a, phi_b, label, math.inf, ridge=1.0)
    torch.testing.assert_close(wide.weight, free.weight, rtol=1e-3, atol=1e-4)


def test_basis_is_folded_back_into_a_plain_weight() -> None:
    phi_a, phi_b, label, _ = make_pairs(400, 8, 2.0)
    basis = pair_basis(phi_a + 3.0, phi_b + 3.0, num_components=6)
    fit = fit_linear(phi_a + 3.0, phi_b + 3.0, label, 2.0, ridge=2.0, basis=basis)
    coordinates = fit_linear(basis.coordinates(phi_a), basis.coordinates(phi_b), label, 2.0, ridge=2.0)
    torch.testing.assert_close(fit.theta, coordinates.weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fit.weight, basis.matrix @ fit.theta)
    assert abs(float(torch.cat([fit.reward(phi_a + 3.0), fit.reward(phi_b + 3.0)]).mean())) < 1e-9


def test_errors_name_the_culprit() -> None:
    phi_a, phi_b, label, _ = make_pairs(10, 2, 1.0)

    def fit(**changes: object) -> LinearFit:
        arguments = {"phi_a": phi_a, "phi_b": phi_b, "private_label": label, "noise": 1.0, "ridge": 1.0}
        return fit_linear(**{**arguments, **changes})  # type: ignore[arg-type]

    for changes, message in (
        ({"private_label": (label + 1) / 2}, "a label must be -1 or"),
        ({"private_label": label[:-1]}, "must have 10 entries, one for each pair, got 9"),
        ({"phi_b": phi_b[:, :1]}, "same, non-empty shape"),
        ({"phi_a": phi_a * math.nan}, "phi_a must be finite"),
        ({"noise": 0.0}, "epsilon must be above 0"),
        ({"ridge": -1.0}, "ridge must be a finite number"),
        ({"reward_bound": -1.0}, "reward_bound must be"),
        ({"loss": "label_smoothing"}, "already randomised"),
        ({"phi_a": phi_b, "ridge": 0.0}, "raise ridge"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(**changes)


# --- the choice of the ridge ---------------------------------------------------------------------------------------


def test_ridge_selection_beats_both_ends_of_the_grid_on_the_truth() -> None:
    phi_a, phi_b, label, weight = make_pairs(1500, 24, 2.0, scale=1.5)
    basis = pair_basis(phi_a, phi_b)
    folds = torch.from_numpy(assign_folds(range(len(label)), 5, 0))
    chosen = select_ridge(phi_a, phi_b, label, 2.0, basis=basis, folds=folds)
    assert chosen.ridges == default_ridges(basis.num_components)
    assert chosen.ridges[0] > chosen.ridge > chosen.ridges[-1]
    best = chosen.ridges.index(chosen.ridge)
    assert chosen.held_out_loss[best] == min(chosen.held_out_loss) < math.log(2)
    assert chosen.paired_standard_error[best] == 0.0
    # The worst end is told apart from the best by its paired standard error.
    assert chosen.held_out_loss[0] - chosen.held_out_loss[best] > 2 * chosen.paired_standard_error[0] > 0

    def risk(ridge: float) -> float:
        fit = fit_linear(phi_a, phi_b, label, 2.0, ridge=ridge, basis=basis)
        return float((((phi_a - phi_b) @ (fit.weight - weight)) ** 2).mean())

    assert risk(chosen.ridge) < min(risk(chosen.ridges[0]), risk(chosen.ridges[-1]))


def test_ridge_selection_equals_a_naive_leave_fold_out() -> None:
    phi_a, phi_b, label, _ = make_pairs(90, 3, 1.0)
    groups = [f"prompt {i // 3}" for i in range(90)]
    folds = torch.from_numpy(assign_folds(groups, 3, 0))
    chosen = select_ridge(phi_a, phi_b, label, 1.0, ridges=[1.0, 10.0], folds=folds, tolerance=1e-10)
    assert all(len(set(folds[i : i + 3].tolist())) == 1 for i in range(0, 90, 3))
    for ridge, loss in zip(chosen.ridges, chosen.held_out_loss, strict=True):
        total = 0.0
        for fold in range(3):
            rows = folds == fold
            fit = fit_linear(phi_a[~rows], phi_b[~rows], label[~rows], 1.0, ridge=ridge)
            total += float(private_likelihood_loss(fit.margin(phi_a[rows], phi_b[rows]), label[rows], 1.0).sum())
        assert loss == pytest.approx(total / 90, rel=1e-5)


def test_pairs_that_are_always_learnt_from_judge_no_ridge() -> None:
    phi_a, phi_b, label, _ = make_pairs(90, 3, 1.0)
    folds = torch.where(torch.arange(90) < 60, -1, 0)
    chosen = select_ridge(phi_a, phi_b, label, 1.0, ridges=[1.0, 10.0], folds=folds, tolerance=1e-10)
    for ridge, loss in zip(chosen.ridges, chosen.held_out_loss, strict=True):
        fit = fit_linear(phi_a[:60], phi_b[:60], label[:60], 1.0, ridge=ridge)
        held_out = private_likelihood_loss(fit.margin(phi_a[60:], phi_b[60:]), label[60:], 1.0)
        assert loss == pytest.approx(float(held_out.mean()), rel=1e-5)
    one = select_ridge(phi_a, phi_b, label, 1.0, ridges=[1.0, 10.0], folds=torch.where(torch.arange(90) < 89, -1, 0))
    assert one.paired_standard_error == (None, None)  # of one pair nothing spreads
    for wrong in (folds[1:], folds - 1):
        with pytest.raises(ValueError, match="folds must be one number for each of 90 pairs, and some must be held"):
            select_ridge(phi_a, phi_b, label, 1.0, folds=wrong)


def test_prior_margin_scale() -> None:
    assert ridge_from_margin_scale(2.0, 32) == 8.0
    with pytest.raises(ValueError, match="margin_scale must be above 0"):
        ridge_from_margin_scale(0.0, 32)
    with pytest.raises(ValueError, match="num_folds must lie between 2"):
        assign_folds(["one prompt"] * 10, 5, 0)
