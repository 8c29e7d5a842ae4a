"""The statistics of Γ of a fitted reward, of the kind that the recipe names."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe, RewardConfig
from reward_models.basis import FeatureBasis, identity_basis
from reward_models.bonuses import Bonus
from reward_models.dropout import DropoutBonus, check_dropout
from reward_models.elliptical import EllipticalAccumulator, EllipticalConstants
from reward_models.ensemble import fit_ensemble
from reward_models.linear import LinearFit
from reward_models.uncertainty import FisherAccumulator, FisherBonus


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


def head_bonus(fit: LinearFit, chosen: torch.Tensor, rejected: torch.Tensor, epsilon: float, recipe: Recipe) -> Bonus:
    """Γ of the linear fit to the pairs (n, d), in the fit's own basis and with its own ridge; every process has it.

    Raises:
        UserError: the statistics cannot be inverted.
    """
    settings = recipe.reward
    if settings.uncertainty.kind == "fisher":
        return _checked(lambda: FisherBonus.from_fit(fit, settings.kappa))
    return _checked(
        lambda: _other(fit.weight, fit.basis, fit.theta, fit.ridge, chosen, rejected, epsilon, recipe, None)
    )


def trained_bonus(
    weight: torch.Tensor,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    epsilon: float,
    recipe: Recipe,
    accelerator: Any,
) -> Bonus:
    """Γ of a trained model with head `weight` (d,) on its training pairs, in the last layer's features (n, d).

    The ridge λ of the recipe acts on w itself here; directions that the pairs do not explore stay uncertain. Each
    process adds up its share of the pairs.

    Raises:
        UserError: the statistics cannot be inverted.
    """
    settings, weight = recipe.reward, weight.detach().cpu()
    assert settings.ridge is not None  # the recipe requires it for these modes
    if settings.uncertainty.kind != "fisher":
        basis, ridge = identity_basis(len(weight)), settings.ridge
        return _checked(
            lambda: _other(weight, basis, weight.double(), ridge, chosen, rejected, epsilon, recipe, accelerator)
        )
    fisher = FisherAccumulator(weight, epsilon=epsilon, ridge=settings.ridge, reward_bound=settings.reward_bound)
    _stream(fisher, chosen, rejected, accelerator)
    return _checked(lambda: fisher.bonus(settings.kappa))


def _other(
    weight: torch.Tensor,
    basis: FeatureBasis,
    start: torch.Tensor,
    ridge: float,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    epsilon: float,
    recipe: Recipe,
    accelerator: Any | None,
) -> Bonus:
    """A bonus of another kind than `fisher`."""
    settings, own = recipe.reward, recipe.reward.uncertainty
    if own.kind == "mc_dropout":
        return DropoutBonus(weight.double(), settings.reward_bound, own.samples, recipe.seed, settings.kappa)
    if own.kind == "ensemble":
        return fit_ensemble(
            chosen,
            rejected,
            torch.ones(len(chosen)),
            epsilon,
            weight=weight,
            ridge=ridge,
            basis=basis,
            start=start,
            reward_bound=settings.reward_bound,
            loss=settings.loss,
            num_heads=own.heads,
            seed=recipe.seed,
            kappa=settings.kappa,
        )
    ellipse = EllipticalAccumulator(
        weight, epsilon=epsilon, ridge=ridge, reward_bound=settings.reward_bound, basis=basis
    )
    _stream(ellipse, chosen, rejected, accelerator)
    constants = EllipticalConstants(own.c, own.delta, own.tau, own.log_covering)
    return ellipse.bonus(settings.kappa, constants=constants)


def _stream(
    accumulator: FisherAccumulator | EllipticalAccumulator,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    accelerator: Any | None,
) -> None:
    """Adds the pairs (n, d), each process its share if there are several."""
    if accelerator is None or accelerator.num_processes == 1:
        accumulator.update(chosen, rejected)
        return
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    accumulator.update(chosen[mine], rejected[mine])
    device = accelerator.device
    accumulator.all_reduce(lambda tensor: accelerator.reduce(tensor.to(device), "sum").cpu())


def _checked(make: Any) -> Any:
    try:
        return make()
    except ValueError as error:
        raise UserError(
            f"Γ of the fitted reward cannot be computed ({error}): raise reward.ridge or lower reward.num_components"
        ) from None
