"""The time that the rest of a run takes, guessed from its finished stages.

COSTS has what a text takes in a stage, drawn, scored and learnt from, beside one that SFT learns from: read off runs
of the demo on two CPU cores, and rounded. Another machine, one whose pace changes, or long answers can take twice as
long as the guess, or half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe

COSTS = {"sft": 1.0, "reward": 0.1, "ppo": 1.5, "gvpo": 1.3, "evaluate": 0.75}
"""A text's cost by stage. Stages that take seconds are left out."""
BLOCKS = 20  # characters of the bar


def texts(name: str, recipe: Recipe, reports: Mapping[str, Any]) -> float:
    """The number of texts in stage `name`; inf where it is not known. reports: of the finished stages, by name."""
    if name == "sft" and name in reports:
        return float(reports[name].get("steps", math.inf) * recipe.sft.batch_size)
    if name == "reward" and recipe.reward.mode == "head" and "privatize" in reports:
        return min(float(reports["privatize"].get("events", math.inf)), recipe.reward.max_pairs or math.inf)
    if name == "ppo":
        settings, drawn = recipe.ppo, recipe.ppo.iterations * recipe.ppo.rollouts
        prompts = min(settings.max_prompts or math.inf, drawn / settings.samples_per_prompt)
        return drawn + prompts * settings.reference_samples
    if name == "gvpo" and recipe.gvpo.max_prompts is not None:
        answers = recipe.gvpo.max_prompts * recipe.ppo.reference_samples
        return answers * recipe.gvpo.passes * (1 + recipe.gvpo.rounds)
    if name == "evaluate":
        return recipe.evaluate.num_prompts * (2 * recipe.evaluate.samples_per_prompt + recipe.evaluate.gibbs_candidates)
    return math.inf


def rest_of(recipe: Recipe, run: RunDir, names: Sequence[str], name: str) -> str:
    """A bar over the run's stages `names`, and the minutes left as `name` starts; empty where they are not known."""
    place = names.index(name)
    manifests = {each: manifest for each in names[:place] if (manifest := run.manifest(each)) is not None}
    reports = {each: manifest.get("report", {}) for each, manifest in manifests.items()}
    work = {each: texts(each, recipe, reports) * cost for each, cost in COSTS.items() if each in names}
    done = sum(cost for each, cost in work.items() if each in manifests)
    rest = sum(cost for each, cost in work.items() if each in names[place:])
    if not done or not rest or not math.isfinite(done + rest):
        return ""
    minutes = sum(manifests[each]["seconds"] for each in work if each in manifests) * rest / done / 60
    full = round(BLOCKS * done / (done + rest))
    left = f"about {minutes:.0f} minutes" if minutes > 1.5 else "a minute or two"
    return f" [{'#' * full}{'.' * (BLOCKS - full)}] {left} left"
