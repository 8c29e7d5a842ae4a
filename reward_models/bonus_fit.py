"""The fit of a bonus of each kind to the pairs that the reward was fitted to."""

from __future__ import annotations

import math
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.basis import ALONE, FeatureArray, Spread
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.linear import LinearFit, minimize, pair_problem
from private_rlhf.reward_models.uncertainty import (
    Bonus,
    DropoutBonus,
    EllipticalBonus,
    EllipticalConstants,
    EnsembleBonus,
    FisherBonus,
    check_dropout,
    reward_gradient,
)
from torch import Tensor

BLOCK = 1024


def check_uncertainty(backbone: torch.nn.Module, settings: RewardConfig) -> None:
    """UserError for an MC-dropout bonus of a backbone without dropout, before hours of training."""
    try:
        if settings.uncertainty.kind == "mc_dropout":
            check_dropout(backbone)
    except ValueError as error:
        raise UserError(f"reward.uncertainty.kind mc_dropout: {error}") from None


def head_bonus(fit: LinearFit, features: PairFeatures, settings: RewardConfig, seed: int = 0) -> Bonus:
    """Γ of a linear fit to the pairs, in its basis and with its ridge, of the kind in `settings`. UserError where the
    statistics cannot be inverted."""
    kind, kappa = settings.uncertainty, settings.kappa
    try:
        if kind.kind == "fisher":
            return FisherBonus.from_fit(fit, kappa)
        if kind.kind == "mc_dropout":
            return DropoutBonus(fit.weight, settings.reward_bound, kind.samples, seed, kappa)
        if kind.kind == "ensemble":
            shares: dict[str, Any] = {"numbers": features.numbers, "spread": features.spread}
            ones = torch.ones(len(features))
            return fit_ensemble(fit, *features.sides, ones, num_heads=kind.heads, seed=seed, kappa=kappa, **shares)
        constants = EllipticalConstants(kind.c, kind.delta, kind.tau, kind.log_covering)
        return elliptical_bonus(fit, *features.sides, kappa, constants, features.spread)
    except ValueError as error:
        raise UserError(
            f"Γ of the fitted reward cannot be computed ({error}): raise reward.ridge (with reward.mode lora or full "
            "reward.refit_ridge) or lower reward.num_components"
        ) from None


def elliptical_bonus(
    fit: LinearFit,
    phi_a: Tensor,
    phi_b: Tensor,
    kappa: float = 1.0,
    constants: EllipticalConstants | None = None,
    spread: Spread = ALONE,
) -> EllipticalBonus:
    """Γ of a linear fit, Σ being that of pairs (φ_a, φ_b) (n, d) of responses that μ drew, each weighted by (2α − 1)²
    where each label has its own α. ValueError as for `EllipticalBonus`, and without pairs."""
    size = fit.basis.num_components
    total = torch.zeros(size, size, dtype=torch.float64)
    weight = torch.ones(len(phi_a), dtype=torch.float64)
    if isinstance(fit.noise, LevelledNoise):
        weight = torch.from_numpy(fit.noise.factor / fit.noise.mean_factor)
    for first, second, weights in zip(phi_a.split(BLOCK), phi_b.split(BLOCK), weight.split(BLOCK), strict=True):
        gradient_a, gradient_b = (reward_gradient(side, fit.weight, fit.reward_bound) for side in (first, second))
        rows = fit.basis.coordinates(gradient_a - gradient_b).cpu() / math.sqrt(2.0)
        rows = rows * weights[:, None]
        total += rows.T @ rows
    count = int(spread.sum(torch.tensor(float(len(phi_a)))))
    if count == 0:
        raise ValueError("pairs must not be empty, got 0: give some")
    covariance = spread.sum(total) / count
    covariance.diagonal().add_(fit.prior / count)
    return EllipticalBonus(
        fit.weight, fit.basis, covariance, fit.reward_bound, fit.noise, count, constants or EllipticalConstants(), kappa
    )


def fit_ensemble(
    fit: LinearFit,
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    *,
    num_heads: int = 8,
    seed: int = 0,
    kappa: float = 1.0,
    numbers: Tensor | None = None,
    spread: Spread = ALONE,
) -> EnsembleBonus:
    """`num_heads` heads beside a `fit` to the same pairs, each started at its θ; deterministic in `seed`.

    Head k is penalised by (λ/2)‖θ − θ_k⁰‖², θ_k⁰ ~ N(0, I/p) by the fit's prior p: to first order its covariance is
    then H⁻¹, Fisher's.
    numbers: (m,) the pairs 0, 1, … that this process holds. ValueError for fewer than two heads, or a ridge of 0.
    """
    if num_heads < 2:
        raise ValueError(f"num_heads must be at least 2, got {num_heads}: one head has no spread")
    if not fit.ridge > 0.0:
        raise ValueError(f"ridge must be a finite number above 0, got {fit.ridge!r}")
    problem = pair_problem(phi_a, phi_b, private_label, fit.noise, fit.basis, fit.reward_bound, fit.loss, spread)
    generator, heads = torch.Generator().manual_seed(seed), []
    for _ in range(num_heads):
        counts = torch.randint(fit.num_pairs, (fit.num_pairs,), generator=generator).bincount(minlength=fit.num_pairs)
        rows = torch.arange(len(problem)).repeat_interleave(counts if numbers is None else counts[numbers])
        anchor = torch.randn(len(fit.theta), dtype=torch.float64, generator=generator) / fit.prior**0.5
        theta = minimize(problem.rows(rows), fit.ridge, fit.theta, anchor=anchor, tolerance=1e-4)
        heads.append(fit.basis.weight(theta))
    return EnsembleBonus(fit.weight, torch.stack(heads), fit.reward_bound, kappa)
