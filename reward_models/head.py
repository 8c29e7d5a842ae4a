"""The linear head r̄ = r(w·φ) of pairs of features: fitted by the private likelihood, with a ridge chosen by the same.

Frozen features are judged by cross-validation. Features that were trained on the pairs know their labels: there the
head is fitted again, its ridge judged by held-out pairs. That head is released, since Γ is the standard deviation
around the maximum of a penalised likelihood, and gradient descent does not stop at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, joined
from private_rlhf.data.render import prompt_key
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.basis import ALONE, Spread, pair_basis
from private_rlhf.reward_models.linear import LinearFit, fit_linear, ridge_in_units_of
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.ridge import (
    RidgeSelection,
    assign_folds,
    default_ridges,
    ridge_by_evidence,
    select_ridge,
)

ALWAYS_LEARNT = -1


@dataclass(frozen=True)
class PairFeatures:
    """Features (m, d) float32 of the responses that z prefers and of the others, for the pairs that this process holds.
    numbers (m,) int64, rising: their numbers among all pairs; None where they are all. spread: the other processes."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    numbers: torch.Tensor | None = None
    spread: Spread = ALONE

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(chosen, rejected)."""
        return self.chosen, self.rejected

    def rows(self, subset: torch.Tensor) -> PairFeatures:
        """The pairs of a `subset`, by their rising numbers (int64), as all the pairs there are."""
        if self.numbers is None:
            return PairFeatures(self.chosen[subset], self.rejected[subset])
        held = torch.isin(self.numbers, subset)
        numbers = torch.searchsorted(subset, self.numbers[held])
        return PairFeatures(self.chosen[held], self.rejected[held], numbers, self.spread)


def fit_head(
    features: PairFeatures,
    noise: LabelNoise | LevelledNoise,
    settings: RewardConfig,
    *,
    prompts: Sequence[Any] | None = None,
    seed: int = 0,
) -> tuple[LinearFit, RidgeSelection]:
    """The private MLE on frozen features; settings.ridge, unless given, is chosen by cross-validation over prompts, or
    is that of the largest evidence.

    settings: loss, reward_bound, num_components, ridge and pooling are read. prompts: one for each of all pairs; None:
    all differ. seed: of the folds. UserError: prompts are of another number, or fewer than two.
    """
    total = int(features.spread.sum(torch.tensor(len(features))))
    groups: list[Any] = list(range(total)) if prompts is None else [prompt_key(prompt) for prompt in prompts]
    if len(groups) != total:
        raise UserError(f"prompts must be one for each of {total} pairs, got {len(groups)}: repeat a prompt of several")
    count = len(set(groups))
    if count < 2:
        raise UserError(f"pairs must be on 2 prompts or more, since folds are by prompt, got {count}: give others too")
    folds = torch.from_numpy(assign_folds(groups, min(5, count), seed))
    folds = folds if features.numbers is None else folds[features.numbers]
    return _fit(features, features, folds, settings.ridge, noise, noise, settings)


def refit_head(
    features: PairFeatures,
    held_out: PairFeatures,
    noise: LabelNoise | LevelledNoise,
    settings: RewardConfig,
    held_out_noise: LabelNoise | LevelledNoise = PUBLIC,
) -> tuple[LinearFit, RidgeSelection]:
    """The private MLE on `features` trained on the same pairs; settings.refit_ridge, unless given, is chosen by the
    private log-likelihood of `held_out` pairs. held_out_noise: of theirs, where each label has an ε of its own."""
    chosen, rejected = (torch.cat(pair) for pair in zip(features.sides, held_out.sides, strict=True))
    both = PairFeatures(chosen, rejected, spread=features.spread)
    folds = torch.full((len(both),), ALWAYS_LEARNT)
    folds[len(features) :] = 0
    return _fit(features, both, folds, settings.refit_ridge, noise, joined(noise, held_out_noise), settings)


def _fit(
    features: PairFeatures,
    judges: PairFeatures,
    folds: torch.Tensor,
    ridge: float | Literal["evidence"] | None,
    noise: LabelNoise | LevelledNoise,
    noise_of_judges: LabelNoise | LevelledNoise,
    settings: RewardConfig,
) -> tuple[LinearFit, RidgeSelection]:
    """The ridge by the `folds` (m,) of the pairs `judges`, then the fit to `features`."""
    spread, blocks, count = features.spread, settings.feature_blocks, settings.num_components
    basis = pair_basis(*features.sides, num_components=count, whiten=False, blocks=blocks, spread=spread)
    options: dict[str, Any] = {"basis": basis, "reward_bound": settings.reward_bound, "loss": settings.loss}
    options["spread"] = spread
    # The label is +1 throughout: `chosen` is what z prefers.
    ones, loss = torch.ones(len(features), dtype=torch.float64), get_loss(settings.loss)
    if ridge == "evidence":
        one, other = (basis.coordinates(side) for side in features.sides)
        by_likelihood = ridge_by_evidence(one, other, ones, noise, settings.reward_bound, spread=spread)
        ridge = ridge_in_units_of(loss, by_likelihood, noise, spread)
    ridges = [ridge] if ridge is not None else default_ridges(basis.num_components)
    if ridge is None and settings.loss != "uncorrected":
        ridges = [ridge_in_units_of(loss, each, noise, spread) for each in ridges]
    labels = (torch.ones(len(judges)), noise_of_judges)
    selection = select_ridge(*judges.sides, *labels, ridges=ridges, folds=folds, **options)
    return fit_linear(*features.sides, ones, noise, ridge=selection.ridge, **options), selection
