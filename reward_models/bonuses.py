"""The kinds of bonus by name: their fit, and their storage as float64 tensors, so that a checkpoint holds no pickle."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.basis import FeatureBasis, identity_basis
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.linear import LinearFit
from private_rlhf.reward_models.uncertainty import (
    DropoutBonus,
    EllipticalBonus,
    EllipticalConstants,
    EnsembleBonus,
    FisherBonus,
    QuadraticBonus,
    check_dropout,
    elliptical_bonus,
    fit_ensemble,
)
from torch import Tensor

Bonus = FisherBonus | EllipticalBonus | EnsembleBonus | DropoutBonus
BONUS_KINDS = ("fisher", "elliptical", "ensemble", "mc_dropout")


def bonus_kind(bonus: Bonus) -> str:
    """The name of a bonus's kind."""
    return BONUS_KINDS[(FisherBonus, EllipticalBonus, EnsembleBonus, DropoutBonus).index(type(bonus))]


def bonus_tensors(bonus: Bonus) -> dict[str, Tensor]:
    """Everything but `reward_bound` and `kappa`, which the metadata holds."""
    tensors, scalars = {"weight": bonus.weight}, {}
    if isinstance(bonus, QuadraticBonus):
        tensors |= {"basis": bonus.basis.matrix, bonus.matrix_name: getattr(bonus, bonus.matrix_name)}
    if isinstance(bonus, EllipticalBonus):
        scalars = {"epsilon": bonus.noise.epsilon, "num_pairs": bonus.num_pairs, **asdict(bonus.constants)}
    elif isinstance(bonus, EnsembleBonus):
        tensors["heads"] = bonus.heads
    elif isinstance(bonus, DropoutBonus):
        scalars = {"samples": bonus.samples, "seed": bonus.seed}
    for name, value in scalars.items():
        if value is not None:
            tensors[name] = torch.tensor(float(value), dtype=torch.float64)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def bonus_from_tensors(
    kind: str, tensors: dict[str, Tensor], reward_bound: float | None, kappa: float, noise: LabelNoise
) -> Bonus:
    """The inverse of `bonus_tensors`, with `noise` as the metadata states it. KeyError for a missing tensor, ValueError
    for statistics that cannot be used.
    """
    weight = tensors["weight"]
    if kind == "ensemble":
        return EnsembleBonus(weight, tensors["heads"], reward_bound, kappa)
    if kind == "mc_dropout":
        return DropoutBonus(weight, reward_bound, int(tensors["samples"]), int(tensors["seed"]), kappa)
    basis = FeatureBasis(tensors["basis"]) if "basis" in tensors else identity_basis(len(weight))  # of earlier versions
    if kind == "fisher":
        return FisherBonus(weight, basis, tensors["information"], reward_bound, kappa)
    names = {field.name for field in fields(EllipticalConstants)} & set(tensors)
    constants = EllipticalConstants(**{name: float(tensors[name]) for name in names})
    pairs = int(tensors["num_pairs"])
    return EllipticalBonus(weight, basis, tensors["covariance"], reward_bound, noise, pairs, constants, kappa)


def check_uncertainty(backbone: torch.nn.Module, settings: RewardConfig) -> None:
    """Before hours of training, UserError for an MC-dropout bonus of a backbone without dropout."""
    try:
        if settings.uncertainty.kind == "mc_dropout":
            check_dropout(backbone)
    except ValueError as error:
        raise UserError(f"reward.uncertainty.kind mc_dropout: {error}") from None


def head_bonus(fit: LinearFit, features: PairFeatures, settings: RewardConfig, seed: int = 0) -> Bonus:
    """Γ of the linear fit to the pairs, in the basis of the fit and with its ridge, of the kind that the recipe names.
    UserError where the statistics cannot be inverted.
    """
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
