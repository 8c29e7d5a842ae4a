"""Rewards from outside a run: a finished model in place of a fitted one, and what PPO adds to r̂, with their checks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError, one_line
from private_rlhf.data.render import Prompt, Renderer, make_renderer, preview
from private_rlhf.lm.model_card import Provenance, write_beside
from private_rlhf.lm.model_folders import check_function
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.privacy.guarantee import external_reward
from private_rlhf.recipe import ExternalRewardSettings, ExtraRewardSettings, ModelConfig
from private_rlhf.reward_models.checkpoint import (
    METADATA_FILE,
    RewardCheckpoint,
    RewardMetadata,
    load_reward_checkpoint,
    reward_text,
    save_reward_checkpoint,
)
from private_rlhf.reward_models.scorer import RewardScorer
from safetensors import SafetensorError

Score = Callable[[Sequence[Prompt], Sequence[str]], torch.Tensor]
NO_RESULTS = (
    "None: this run held out no label to check it on. Compare scores of answers to one prompt only; what a difference"
    " means as a probability is not known here."
)
UNREAD = "This model is {}. No label of this run was read for it; the statement on its labels was not checked here."
ROOM = 4  # another tokenizer may need this many times the tokens of the policy's


def key_names(key: str) -> tuple[str, str]:
    """Names in messages of the folder and the declaration of a recipe's section `key` that has `path` and `public`."""
    return f"{key}.path", f"{key}.public=true"


def check_folder(folder: Path, public: bool, name: str, declaration: str) -> None:
    """Check by its files that the reward model in `folder` may be used. public: its training labels are declared
    public. name, declaration: of folder and declaration in messages (`key_names`).

    UserError: not a checkpoint folder, or its labels are neither stated in it nor declared public.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} must be a checkpoint folder, got {folder}: it has no config.json")
    if not (folder / METADATA_FILE).is_file() and not public:
        raise UserError(
            f"{name} {folder} has no {METADATA_FILE}, so it is unknown which labels it learned from: set "
            f"{declaration} if they are public, or give a checkpoint of this package"
        )


def load_external(
    folder: Path, public: bool, name: str, declaration: str, **how: Any
) -> tuple[RewardCheckpoint, RewardMetadata, dict[str, Any]]:
    """A reward model from outside this run, its metadata with the folder's name, and its facts for the privacy card.

    Arguments and errors as in `check_folder`. UserError also for a model that is not a reward model with one output, or
    metadata that contradict the recipe. how: of `load_reward_checkpoint`.
    """
    check_folder(folder, public, name, declaration)
    try:
        checkpoint = load_reward_checkpoint(folder, declared_public=public, **how)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = one_line(str(error), 400)
        raise UserError(f"{name} must be a reward checkpoint, got {folder} ({cause}): give another") from None
    metadata = checkpoint.metadata
    assert metadata is not None
    if public and not metadata.public:
        raise UserError(f"{name} {folder} learned from private labels by its own metadata: remove {declaration}")
    parts = folder.resolve().parts
    source = "/".join(parts[-3:]) if parts[-2:] == ("reward", "model") else parts[-1]  # of a run: with the run's name
    facts = {
        "mode": "external",
        "source": source,
        "fitted_by": "this package" if (folder / METADATA_FILE).is_file() else "others",
        "labels": "declared public" if metadata.public else "private",
        "epsilon": metadata.to_json()["epsilon"],
    }
    return checkpoint, replace(metadata, data={**(metadata.data or {}), "external": source}), facts


def use_external(
    settings: ExternalRewardSettings, kappa: float, limits: ModelConfig, target: Path, main_process: bool, run: str
) -> dict[str, Any]:
    """Put an external reward model into `target`/model with metadata and card; the report of the stage. UserError: see
    `load_external`, or a kappa > 0 of Γ for a model without its statistics.

    limits: of the texts of this run, for the tokenizer that is saved beside the model. run: name of the recipe. The
    card has no base model but the folder's own.
    """
    checkpoint, metadata, facts = load_external(settings.path, settings.public, *key_names("reward.external"))
    if kappa > 0 and checkpoint.bonus is None:
        raise UserError(f"reward.external.path {settings.path} has no bonus statistics for Γ: set reward.kappa=0")
    metadata = replace(metadata, kappa=None if checkpoint.bonus is None else kappa)
    record = metadata.to_json()
    facts |= {name: record[name] for name in ("loss", "reward_bound", "kappa", "num_layers")}
    facts["held_out_labels"] = "none were read"
    if main_process:
        model, tokenizer = cast(Any, checkpoint.model.model), load_tokenizer(settings.path, plain_template=False)
        # Pooling goes by the mask; plain transformers goes by the pad id, which must not end a text.
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        model.config.get_text_config().update(ids)
        renderer = make_renderer(limits, tokenizer)
        trained = tokenizer_as_trained(renderer, "right")  # how this run reads its scores
        bonus = None if checkpoint.bonus is None or kappa == 0 else replace(checkpoint.bonus, kappa=kappa)
        save_reward_checkpoint(target / "model", model, metadata, bonus=bonus, tokenizer=trained, overwrite=True)
        origin = Provenance("reward", run, replace(limits, source=str(settings.path)), None)
        said = str(external_reward(facts))
        text = reward_text(f"labels from outside this run ({said})", NO_RESULTS, model, metadata.reward_bound)
        write_beside(target / "model", origin, renderer, None, replace(text, unread=UNREAD.format(said)))
        atomic.write_json(target / "fit.json", facts)
    return {**facts, "losses": [], "summary": f"external reward model {facts['source']}, labels {facts['labels']}"}


@dataclass(frozen=True)
class ExtraReward:
    """One reward beside r̂: a unique `name`, the `weight` that its numbers are multiplied by, `score` (prompts,
    responses) -> (B,) float32 on the CPU, JSON `facts` for the card, and the renderer of a model's tokenizer, None for
    a function."""

    name: str
    weight: float
    score: Score
    facts: dict[str, Any] = field(default_factory=dict)
    renderer: Renderer | None = None


def load_extra_rewards(
    entries: Sequence[ExtraRewardSettings], limits: ModelConfig, device: torch.device
) -> list[ExtraReward]:
    """The rewards of ppo.extra_rewards, in their order. limits: of the policy's texts. UserError: see `load_external`
    and `import_function`.
    """
    rewards: list[ExtraReward] = []
    for place, settings in enumerate(entries):
        key = f"ppo.extra_rewards.{place}"
        plain = settings.callable or settings.path.resolve().name  # type: ignore[union-attr]
        name = f"{plain} ({place})" if plain in {reward.name for reward in rewards} else plain
        if settings.callable:
            facts: dict[str, Any] = {"mode": "callable", "source": settings.callable, "weight": settings.weight}
            rewards.append(ExtraReward(name, settings.weight, score_by(settings.callable, key), facts))
        else:
            path = cast(Path, settings.path)
            scorer, about = external_scorer(path, settings.public, key_names(key), limits, device)
            facts = {**about, "weight": settings.weight}
            rewards.append(ExtraReward(name, settings.weight, mean_reward(scorer), facts, scorer.renderer))
    return rewards


def mean_reward(scorer: RewardScorer) -> Score:
    """(prompts, responses) -> r̄ (B,) float32 on the CPU."""
    return lambda prompts, responses: scorer.score(prompts, responses).reward


def import_function(name: str, key: str) -> Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]:
    """The function that `package.module:function` names; `key` of the recipe that says so is for messages. UserError:
    see `check_function`; it cannot be imported or called.
    """
    module_name, _, attribute = name.partition(":")
    check_function(name, key)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever it does when it is imported
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{key}.callable {name}: cannot be imported ({cause}): fix it") from None
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{key}.callable {name}: {module_name} has no function {attribute}: name one that it has")
    return function


def checked(values: Any, responses: Sequence[str], where: str) -> torch.Tensor:
    """The values of a function as (B,) float32. UserError unless they are one finite number per response."""
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise UserError(f"{where} must give numbers, got {type(values).__name__}: return a list of floats") from None
    if len(numbers) != len(responses):
        raise UserError(f"{where} must give {len(responses)} numbers, got {len(numbers)}: return one for each")
    for number, response in zip(numbers, responses, strict=True):
        if not math.isfinite(number):
            raise UserError(f"{where} must give finite numbers, got {number} for {preview(response)}: return such")
    return torch.tensor(numbers, dtype=torch.float32)


def score_by(name: str, key: str) -> Score:
    """The score of a recipe's function; what it raises becomes a RuntimeError that names `key`."""
    function, where = import_function(name, key), f"{key}.callable {name}"

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> torch.Tensor:
        try:
            values = function(list(prompts), list(responses))
        except Exception as error:
            raise RuntimeError(f"{where} failed: {type(error).__name__}: {error}") from error
        return checked(values, responses, where)

    return score


def external_scorer(
    folder: Path, public: bool, names: tuple[str, str], limits: ModelConfig | Renderer, device: torch.device, **how: Any
) -> tuple[RewardScorer, dict[str, Any]]:
    """Scores by a reward model from outside this run, without Γ, and its facts for the card.

    public, names: see `check_folder`. limits: of the policy's texts. how: of `load_reward_checkpoint`.
    """
    checkpoint, _, facts = load_external(folder, public, *names, **how)
    checkpoint.model.model.to(device)
    positions = getattr(checkpoint.model.config.get_text_config(), "max_position_embeddings", None)
    renderer = wide_renderer(limits, load_tokenizer(folder, plain_template=False), positions)
    return RewardScorer(checkpoint, renderer, use_bonus=False), facts


def wide_renderer(limits: ModelConfig | Renderer, tokenizer: Any, context: int | None) -> Renderer:
    """A renderer for another tokenizer with limits, in its tokens, that refuse nothing the policy's limits let pass.

    limits: of the policy. context: tokens that the model takes; a prompt may have what its longest response leaves.
    """
    prompt, response = ROOM * limits.max_prompt_tokens, ROOM * limits.max_response_tokens
    if context is not None:
        response = min(response, max(context // 2, 2))
        prompt = min(prompt, context - response)
    return Renderer(tokenizer, prompt, response, limits.system_prompt, limits.chat_template_kwargs)
