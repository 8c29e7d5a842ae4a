"""The kinds of bonus by name, and how each is stored: float64 tensors, so that a checkpoint holds no pickle."""

from __future__ import annotations

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import FeatureBasis, IdentityBasis, identity_basis
from private_rlhf.reward_models.dropout import DropoutBonus
from private_rlhf.reward_models.elliptical import EllipticalBonus, EllipticalConstants
from private_rlhf.reward_models.ensemble import EnsembleBonus
from private_rlhf.reward_models.uncertainty import FisherBonus
from torch import Tensor

Bonus = FisherBonus | EllipticalBonus | EnsembleBonus | DropoutBonus
BONUS_KINDS = ("fisher", "elliptical", "ensemble", "mc_dropout")
_CLASSES = (FisherBonus, EllipticalBonus, EnsembleBonus, DropoutBonus)
_CONSTANTS = ("c", "delta", "tau", "log_covering")


def bonus_kind(bonus: Bonus) -> str:
    """The name of a bonus's kind."""
    return dict(zip(_CLASSES, BONUS_KINDS, strict=True))[type(bonus)]


def bonus_tensors(bonus: Bonus) -> dict[str, Tensor]:
    """Everything but `reward_bound` and `kappa`, which the metadata holds. An identity basis is left out."""
    tensors = {"weight": bonus.weight}
    if isinstance(bonus, FisherBonus | EllipticalBonus) and not isinstance(bonus.basis, IdentityBasis):
        tensors["basis"] = bonus.basis.matrix
    if isinstance(bonus, FisherBonus):
        tensors["information"] = bonus.information
    elif isinstance(bonus, EllipticalBonus):
        constants = {name: getattr(bonus.constants, name) for name in _CONSTANTS}
        numbers = {"epsilon": bonus.noise.epsilon, "num_pairs": bonus.num_pairs, **constants}
        tensors |= {"covariance": bonus.covariance} | _scalars(numbers)
    elif isinstance(bonus, EnsembleBonus):
        tensors["heads"] = bonus.heads
    else:
        tensors |= _scalars({"samples": bonus.samples, "seed": bonus.seed})
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def bonus_from_tensors(
    kind: str, tensors: dict[str, Tensor], reward_bound: float | None, kappa: float, noise: LabelNoise
) -> Bonus:
    """The inverse of `bonus_tensors`; `noise` of the labels, as the metadata states it.

    KeyError for a missing tensor, ValueError for statistics that cannot be used.
    """
    weight = tensors["weight"]
    if kind == "ensemble":
        return EnsembleBonus(weight, tensors["heads"], reward_bound, kappa)
    if kind == "mc_dropout":
        return DropoutBonus(weight, reward_bound, int(tensors["samples"]), int(tensors["seed"]), kappa)
    basis = FeatureBasis(tensors["basis"]) if "basis" in tensors else identity_basis(len(weight))
    if kind == "fisher":
        return FisherBonus(weight, basis, tensors["information"], reward_bound, kappa)
    if kind != "elliptical":
        raise ValueError(f"unknown kind of bonus {kind!r}; choose one of {', '.join(BONUS_KINDS)}")
    constants = EllipticalConstants(**{name: float(tensors[name]) for name in _CONSTANTS if name in tensors})
    pairs = int(tensors["num_pairs"])
    return EllipticalBonus(weight, basis, tensors["covariance"], reward_bound, noise, pairs, constants, kappa)


def _scalars(values: dict[str, float | int | None]) -> dict[str, Tensor]:
    """0-d float64 tensors of the values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in given.items()}
