"""The declaration of a stage: facts and checks before it runs. `private_rlhf.stages.declarations` has all of them."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data.inputs import input_digest
from private_rlhf.recipe import Recipe
from private_rlhf.stages.checks import check_first_rows


class Stage:
    """One step of a recipe. Nothing here imports torch: the stage's module does, whose `run` does the work.

    Attributes:
        name: of the stage, of its folder in a run, and of the command that starts it.
        help: of that command.
        reads: the stages whose results it reads.
        sections: of the recipe, those that change its result; `section.key` for a single key.
        texts: keys of `data` that name the label-free texts it reads.
        launched: several processes may share it, under `private-rlhf launch`.
        any_world: its resume state suits any number of processes with whole weights.
        releases: it reads raw labels and releases them anew.
        measures: its results are in metrics.json.
        prints: it changes no result.
        extras: of the installation, that it needs.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[tuple[str, ...]] = ()
    texts: ClassVar[tuple[str, ...]] = ()
    launched: ClassVar[bool] = True
    any_world: ClassVar[bool] = False
    releases: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    prints: ClassVar[bool] = False
    extras: ClassVar[tuple[str, ...]] = ("train",)

    @property
    def module_name(self) -> str:
        """The module of `run(context)`."""
        return f"private_rlhf.stages.{self.name}"

    def belongs(self, recipe: Recipe) -> bool:
        """True where the recipe has this stage."""
        return self.name not in recipe.absent_stages

    def upstream(self, recipe: Recipe) -> tuple[str, ...]:
        """The stages that it reads under this recipe."""
        return tuple(name for name in self.reads if name not in recipe.absent_stages)

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        """Digests of the label-free inputs that it reads by path. Raw preferences are never among them."""
        return {str(getattr(recipe.data, key)): input_digest(key, recipe.data) for key in self.texts}

    def check_batches(self, recipe: Recipe, world: World) -> None:
        """Every global batch is a whole number of micro-batches per process. Raises: UserError."""

    def check(self, recipe: Recipe, world: World) -> None:
        """Checks of the recipe that take a second or two, before any stage starts. Raises: UserError."""
        check_first_rows(recipe.data, self.texts)

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        """Checks of the data. new_release: labels are about to be released. Raises: UserError."""

    def check_read(self, recipe: Recipe, run: RunDir) -> None:
        """Check what the complete stages that it reads have measured. RunStopped: it must not start."""

    def changed(self, recipe: Recipe, run: RunDir) -> str | None:
        """The reason why a complete result is not up to date, beyond recipe and inputs; None where it is."""
        return None

    def load(self) -> Any:
        """The stage's module."""
        return importlib.import_module(self.module_name)
