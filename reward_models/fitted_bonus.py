"""The statistics of Γ of a fitted reward, of the kind that the recipe names."""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.bonuses import Bonus
from private_rlhf.reward_models.dropout import DropoutBonus, check_dropout
from private_rlhf.reward_models.elliptical import EllipticalAccumulator, EllipticalConstants
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


def head_bonus(
    fit: LinearFit, features: PairFeatures, noise: LabelNoise, settings: RewardConfig, seed: int = 0
) -> Bonus:
    """Γ of the linear fit to the pairs, in the fit's own basis and with its own ridge.

    Raises:
        UserError: the statistics cannot be inverted.
    """
    if settings.uncertainty.kind == "fisher":
        return _checked(lambda: FisherBonus.from_fit(fit, settings.kappa))
    return _checked(lambda: _other(fit, features, noise, settings, seed))


def _other(fit: LinearFit, features: PairFeatures, noise: LabelNoise, settings: RewardConfig, seed: int) -> Bonus:
    """A bonus of another kind than `fisher`."""
    own = settings.uncertainty
    if own.kind == "mc_dropout":
        return DropoutBonus(fit.weight, settings.reward_bound, own.samples, seed, settings.kappa)
    if own.kind == "ensemble":
        return fit_ensemble(
            features.chosen,
            features.rejected,
            torch.ones(len(features)),
            noise,
            weight=fit.weight,
            ridge=fit.ridge,
            basis=fit.basis,
            start=fit.theta,
            reward_bound=settings.reward_bound,
            loss=settings.loss,
            num_heads=own.heads,
            seed=seed,
            kappa=settings.kappa,
            numbers=features.numbers,
            spread=features.spread,
        )
    ellipse = EllipticalAccumulator(
        fit.weight, noise=noise, ridge=fit.ridge, reward_bound=settings.reward_bound, basis=fit.basis
    )
    ellipse.update(features.chosen, features.rejected)
    ellipse.all_reduce(features.spread.sum)
    constants = EllipticalConstants(own.c, own.delta, own.tau, own.log_covering)
    return ellipse.bonus(settings.kappa, constants=constants)


def _checked(make: Any) -> Any:
    try:
        return make()
    except ValueError as error:
        raise UserError(
            f"Γ of the fitted reward cannot be computed ({error}): raise reward.ridge (with reward.mode lora or full "
            "reward.refit_ridge) or lower reward.num_components"
        ) from None
