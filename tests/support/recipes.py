"""The smallest valid recipe, for tests of what one section does."""

from __future__ import annotations

from typing import Any

from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import parse

SMALLEST: dict[str, Any] = {
    "name": "x",
    "evaluation_labels": "private",
    "model": {"source": "tiny"},
    "privatize": {"epsilon": 1.0},
}


def recipe_of(**sections: Any) -> Recipe:
    """The smallest recipe with sections added or replaced."""
    return parse(Recipe, {**SMALLEST, **sections}, "r")
