"""The ways in which a launcher shares a stage over processes, and the stages that were tested with each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.recipe import Recipe

WHOLE = "whole weights"
"""One process, or several with a copy of all weights each (DDP)."""
FSDP2 = "FSDP2"
STRATEGIES = (WHOLE, FSDP2)
"""Those that ever ran."""
TESTED = ("sft", "reward.mode head", "reward.mode lora", "reward.mode full", "ppo", "dpo", "rloo", "grpo", "gvpo",
          "evaluate")  # fmt: skip
"""Stages that give with each of them what one process gives (tests/benchmarks/stage_strategies.py)."""

PRECISIONS = ("no", "bf16")
"""Of autocast, as the launcher's `mixed_precision` says, with which stages were run."""
SPLITTING = (None, "adamw", "sgd", "adamw_torch", "adamw_torch_fused")
"""Optimisers that take weights which are split over processes."""


def strategy(environment: Mapping[str, str]) -> str:
    """The strategy that accelerate's launcher asks for, by the variables that it sets."""

    def on(name: str) -> bool:
        return environment.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes", "on")

    if on("DEEPSPEED"):
        return f"ZeRO-{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if on("MEGATRON_LM"):
        return "Megatron-LM"
    if on("PARALLELISM_CONFIG"):
        return "a parallelism_config"
    if on("FSDP"):
        return FSDP2 if environment.get("FSDP_VERSION", "1") == "2" else "FSDP1"
    return WHOLE


def check_strategy(recipe: Recipe, stages: Collection[str], environment: Mapping[str, str]) -> None:
    """Every one of `stages` was run with what the launcher asks for, and gave what one process gives.

    Raises:
        UserError: one was not, a key of it is known not to go with weights that are split, or the launcher asks for
            another precision than bf16 autocast or none.
    """
    asked, found = strategy(environment), {row_of(stage, recipe) for stage in stages}
    rows = [row for row in TESTED if row in found]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "").lower() or "no"
    if rows and precision not in PRECISIONS:
        raise UserError(
            f"{rows[0]} cannot run under mixed_precision {precision}, it was never run here: set it to bf16 or no "
            "in the launch file, or in ACCELERATE_MIXED_PRECISION"
        )
    for row in rows:
        if asked not in STRATEGIES:
            files = "launch/ddp.yaml or launch/fsdp2.yaml"
            remedy = ": set fsdp_version: 2" if asked == "FSDP1" else f"; launch it with {files}"
            raise UserError(f"{row} cannot run under {asked}, it was never run here{remedy}")
        if asked == FSDP2:
            _check_split(row, recipe)


def row_of(stage: str, recipe: Recipe) -> str:
    """The row of the table for a stage under this recipe. An external reward is not trained, as in mode `head`."""
    if stage != "reward":
        return stage
    return f"reward.mode {'head' if recipe.reward.external is not None else recipe.reward.mode}"


def _check_split(row: str, recipe: Recipe) -> None:
    """Quantised weights and some optimisers do not go with weights that are split over processes."""
    section = row.partition(".")[0]
    settings: Any = getattr(recipe, section, None)
    own = {name: getattr(settings, name, None) for name in ("quantize", "optimizer")}
    named = {**own, "trainer_args.optim": getattr(settings, "trainer_args", {}).get("optim")}
    for name, value in named.items():
        if value not in SPLITTING:
            raise UserError(f"{section}.{name} {value} cannot run under FSDP2: take launch/ddp.yaml")
