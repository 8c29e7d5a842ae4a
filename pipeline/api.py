"""Recipes in a program of yours: load one and run it, as the command line does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from private_rlhf.recipe import Recipe


def load_recipe(path: str | Path, overrides: str | Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, with overrides such as `ppo.kl_coef=0.2`. UserError: a key or value is invalid."""
    from private_rlhf.recipe import Recipe, load

    return load.load_recipe(Recipe, Path(path), [overrides] if isinstance(overrides, str) else overrides)


def run(recipe: Recipe, folder: str | Path | None = None, *, start: str | None = None, only: str | None = None) -> Path:
    """Run the stages of a recipe that are not up to date, in this process; returns the run directory.

    Args:
        recipe: see `load_recipe`.
        folder: run directory; default runs/NAME of the recipe.
        start: run this stage and all after it again.
        only: run this stage and no other.

    Raises:
        UserError: wrong input. RunStopped: a stage must not go on. RunWaits: answers of people are not there yet.
    """
    from private_rlhf import runner
    from private_rlhf.core.errors import UserError
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.recipe import Recipe

    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe must be what load_recipe returns, got {type(recipe).__name__}: load the file first")
    directory = RunDir(Path(folder) if folder is not None else Path("runs") / recipe.name)
    runner.execute(recipe, directory, runner.Selection(start=start, only=only))
    return directory.root
