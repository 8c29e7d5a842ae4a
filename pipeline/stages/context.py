"""The argument of a stage's `run`, and the finished run that a recipe goes on from (`online.after`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data.release import Release, read_release
from private_rlhf.privacy.guarantee import external_reward
from private_rlhf.recipe import Recipe

if TYPE_CHECKING:
    from private_rlhf.lm.hf_trainer import Tracking


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
        """The folder of the stage's results."""
        return self.run.stage(self.name)

    @property
    def checkpoints(self) -> Path:
        """The folder of the stage's resume state."""
        return self.run.checkpoints(self.name)

    @property
    def reference(self) -> Path:
        """The checkpoint of π_ref."""
        return self.run.stage("sft") / "model"

    @property
    def reward_model(self) -> Path:
        """The checkpoint of the reward model."""
        return self.run.stage("reward") / "model"

    @property
    def track(self) -> Tracking:
        """Reports of a trainer's steps to ppo.report_to, beside the settings of the stage's section."""
        from private_rlhf.rl.tracking import track_trainer

        settings = getattr(self.recipe, self.name)
        return partial(track_trainer, self.recipe.ppo.report_to, self.recipe.name, settings, self.folder / "tracking")

    @property
    def outside_reward(self) -> dict[str, str]:
        """The row of a policy's card about a reward model that this run did not fit; empty where it fitted one."""
        said = external_reward(json.loads((self.run.stage("reward") / "fit.json").read_text(encoding="utf-8")))
        return {} if said is None else {"external_reward_model": said}


@dataclass(frozen=True)
class PreviousRun:
    """A finished run. count: runs of the chain up to it."""

    run: RunDir
    count: int

    @property
    def policy(self) -> Path:
        """Checkpoint of its PPO policy."""
        return self.run.stage("ppo") / "model"

    def answers(self, part: str) -> Release:
        """Its answers: `release` or `evaluation`."""
        return read_release(self.run.stage("online") / part)


def previous_run(recipe: Recipe) -> PreviousRun | None:
    """The run that the recipe goes on from, if any. UserError where it is not finished, or its ε or labeller differ."""
    if recipe.online is None or recipe.online.after is None:
        return None
    run = RunDir(recipe.online.after.expanduser())
    run.require("ppo")
    facts = run.require("online")["report"]
    for name, value in {"epsilon": recipe.privatize.epsilon, "labeller": recipe.online.labeller}.items():
        if facts.get(name) != value:
            raise UserError(f"{name} must be {facts.get(name)} to go on from {run.root}, got {value}: keep that")
    return PreviousRun(run, int(facts.get("runs", 1)))
