"""The statistics of Γ of a fitted reward, of the kind that the recipe names."""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.bonuses import Bonus
from private_rlhf.reward_models.dropout import DropoutBonus, check_dropout
from private_rlhf.reward_models.elliptical import EllipticalConstants, elliptical_bonus
from private_rlhf.reward_models.ensemble import fit_ensemble
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.linear import LinearFit
from private_rlhf.reward_models.uncertainty import FisherBonus


def check_uncertainty(backbone: torch.nn.Module, settings: RewardConfig) -> None:
    """Before hours of training: a backbone without dropout has no MC-dropout bonus.

    Raises:
        UserError: it has none.
    """
    if settings.uncertainty.kind == "mc_dropout":
        try:
            check_dropout(backbone)
        except ValueError as error:
            raise UserError(f"reward.uncertainty.kind mc_dropout: {error}") from None


def head_bonus(fit: LinearFit, features: PairFeatures, settings: RewardConfig, seed: int = 0) -> Bonus:
    """Γ of the linear fit to the pairs, in the basis of the fit and with its ridge.

    Raises:
        UserError: the statistics cannot be inverted.
    """
    kind, kappa, sides = settings.uncertainty, settings.kappa, (features.chosen, features.rejected)
    try:
        if kind.kind == "fisher":
            return FisherBonus.from_fit(fit, kappa)
        if kind.kind == "mc_dropout":
            return DropoutBonus(fit.weight, settings.reward_bound, kind.samples, seed, kappa)
        if kind.kind == "ensemble":
            shares: dict[str, Any] = {"numbers": features.numbers, "spread": features.spread}
            ones = torch.ones(len(features))
            return fit_ensemble(fit, *sides, ones, num_heads=kind.heads, seed=seed, kappa=kappa, **shares)
        constants = EllipticalConstants(kind.c, kind.delta, kind.tau, kind.log_covering)
        return elliptical_bonus(fit, *sides, kappa, constants, features.spread)
    except ValueError as error:
        raise UserError(
            f"Γ of the fitted reward cannot be computed ({error}): raise reward.ridge (with reward.mode lora or full "
            "reward.refit_ridge) or lower reward.num_components"
        ) from None
