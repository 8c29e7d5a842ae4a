"""What a stage gets when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.recipe import Recipe


@dataclass(frozen=True)
class StageContext:
    """The argument of a stage's `run`. name: of the stage. stages: all of the recipe, in order."""

    recipe: Recipe
    run: RunDir
    world: World
    name: str
    stages: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the stage releases its results."""
        return self.run.stage(self.name)

    @property
    def checkpoints(self) -> Path:
        """Where the stage keeps resume state."""
        return self.run.checkpoints(self.name)
