"""Origin of a stage's checkpoint, from the recipe."""

from __future__ import annotations

from private_rlhf.core.recipe import Recipe
from private_rlhf.lm.model_card import Provenance


def provenance(recipe: Recipe, stage: str) -> Provenance:
    """The facts that the card of a checkpoint made by `stage` takes from the recipe."""
    return Provenance(stage, recipe.name, recipe.model, recipe.data, recipe.override)
