"""Recipes on pairs of a test's own, for twin runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from private_rlhf import runner
from private_rlhf.audit.twins import Verdict, verify
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

from support.pipeline_runs import TINY, Workspace

OWN = ("data.public_labels=false", "evaluation_labels=private", "data.demonstrations=release",
       "data.prompts=release", "data.evaluation_prompts=evaluation", "model.dtype=float32")  # fmt: skip
SHORT = ("sft.max_steps=2", "sft.batch_size=4", "sft.save_steps=2", "ppo.iterations=1", "ppo.reference_samples=2",
         "ppo.rollouts=4", "evaluate.gibbs_candidates=2", "evaluate.num_prompts=4",
         "evaluate.shown_samples=1")  # fmt: skip


def write_pairs(path: Path, count: int, **columns: Callable[[int], Any]) -> Path:
    """Pairs whose chosen response is the longer one of the two in most rows."""
    dice = random.Random(count)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            pair = [f"Answer {number} is short.", f"Answer {number} takes a few words more than that."]
            if dice.random() < 0.7:
                pair.reverse()
            row = {"prompt": f"Say something about the number {number}.", "chosen": pair[0], "rejected": pair[1]}
            file.write(json.dumps(row | {name: value(number) for name, value in columns.items()}) + "\n")
    return path


def own_recipe(data: Path, workspace: Workspace, *overrides: str) -> Recipe:
    settings = (f"data.preferences={data}", f"model.cache_dir={workspace.root / 'cache'}", "privatize.epsilon=0.5")
    return load_recipe(Recipe, TINY, [*OWN, *settings, *overrides])


def run_all(recipe: Recipe, run: RunDir) -> None:
    runner.execute(recipe, run, runner.Selection())


def stages(*names: str) -> Callable[[Recipe, RunDir], None]:
    def execute(recipe: Recipe, run: RunDir) -> None:
        for name in names:
            runner.execute(recipe, run, runner.Selection(only=name))

    return execute


def verdict_of(recipe: Recipe, folder: Path, *names: str) -> Verdict:
    found = verify(recipe, folder, stages(*names) if names else run_all, runner.NAMES)
    assert found is not None
    assert not folder.exists()
    return found
