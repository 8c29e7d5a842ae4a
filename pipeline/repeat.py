"""`private-rlhf online`: a recipe that asks, run whole; several times over, each run goes on from the one before."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from private_rlhf import runner
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import barrier
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.shareable import shareable_yaml


def run_policies(recipe: Recipe, root: Path, policies: int, accept_code: bool = False) -> RunDir:
    """Runs the recipe in `root`, or `policies` > 1 times in root/1, root/2, …: a run asks about answers of the policy
    of the one before, learns from the answers to both, and starts PPO from that policy. π_ref is the same in all. What
    is up to date stays; what was interrupted resumes. Returns the last run.

    Raises:
        UserError: the recipe does not ask.
    """
    if recipe.online is None:
        raise UserError("online is for recipes with a section online: `run` takes this one")
    if policies == 1:
        runner.execute(recipe, RunDir(root), runner.Selection(), accept_code)
        return RunDir(root)
    world, before = runner.join_world(), None
    for number in range(1, policies + 1):
        run, run_recipe = RunDir(root / str(number)), recipe
        if before is not None:
            run_recipe = replace(recipe, online=replace(recipe.online, after=before.root))
            if world.main:
                _share_sft(run_recipe, before, run)
            barrier(world)
        runner.execute(run_recipe, run, runner.Selection(), accept_code)
        before = run
    return run


def _share_sft(recipe: Recipe, before: RunDir, run: RunDir) -> None:
    """The reference policy is the one of the run before: the same files under other names, where the disk allows it."""
    if run.manifest("sft") is not None:
        return
    run.claim(recipe.name, shareable_yaml(recipe))
    temporary = run.stage(f".sft.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(before.stage("sft"), temporary, copy_function=_link)
    shutil.rmtree(run.stage("sft"), ignore_errors=True)
    temporary.rename(run.stage("sft"))
    atomic.sync_folder(run.root)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
