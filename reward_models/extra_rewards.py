"""Rewards that PPO adds to r̂: further reward models, with tokenizers of their own, and Python functions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Prompt, Renderer, preview
from private_rlhf.lm.model_folders import check_function
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import ExtraRewardSettings, ModelConfig
from private_rlhf.reward_models.external import key_names, load_external
from private_rlhf.reward_models.scorer import RewardScorer

Function = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]
ROOM = 4  # another tokenizer may need this many times the tokens of the policy's


@dataclass(frozen=True)
class ExtraReward:
    """One reward beside r̂.

    Attributes:
        name: in the history; unique among the extra rewards of a run.
        weight: what its numbers are multiplied by before they are added to r̂.
        score: (prompts, responses) -> (B,) float32 on the CPU, from texts.
        facts: what the card says of it, JSON types.
        renderer: of a model's own tokenizer; None for a function.
    """

    name: str
    weight: float
    score: Callable[[Sequence[Prompt], Sequence[str]], torch.Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    renderer: Renderer | None = None


def load_extra_rewards(
    entries: Sequence[ExtraRewardSettings], limits: ModelConfig, device: torch.device
) -> list[ExtraReward]:
    """The rewards of ppo.extra_rewards, in their order. limits: of the policy's texts.

    Raises:
        UserError: see `private_rlhf.reward_models.external.load_external`, or a function that cannot be imported.
    """
    rewards: list[ExtraReward] = []
    for place, settings in enumerate(entries):
        key = f"ppo.extra_rewards.{place}"
        plain = settings.callable or settings.path.resolve().name  # type: ignore[union-attr]
        name = f"{plain} ({place})" if plain in {reward.name for reward in rewards} else plain
        loaded = _function(settings, name, key) if settings.callable else _model(settings, name, key, limits, device)
        rewards.append(loaded)
    return rewards


def import_function(name: str, key: str) -> Function:
    """The function that `package.module:function` names; `key` of the recipe that says so is for messages.

    Raises:
        UserError: see `check_function`; it cannot be imported or called.
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
        raise UserError(f"{where} gave {type(values).__name__}, not a sequence of numbers: return floats") from None
    if len(numbers) != len(responses):
        raise UserError(f"{where} gave {len(numbers)} numbers for {len(responses)} responses: return one for each")
    for number, response in zip(numbers, responses, strict=True):
        if not math.isfinite(number):
            raise UserError(f"{where} gave {number} for the response {preview(response)}: return finite numbers")
    return torch.tensor(numbers, dtype=torch.float32)


def _function(settings: ExtraRewardSettings, name: str, key: str) -> ExtraReward:
    assert settings.callable is not None
    function, where = import_function(settings.callable, key), f"{key}.callable {settings.callable}"

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> torch.Tensor:
        try:
            values = function(list(prompts), list(responses))
        except Exception as error:
            raise RuntimeError(f"{where} failed: {type(error).__name__}: {error}") from error
        return checked(values, responses, where)

    facts = {"mode": "callable", "source": settings.callable, "weight": settings.weight}
    return ExtraReward(name, settings.weight, score, facts)


def _model(
    settings: ExtraRewardSettings, name: str, key: str, limits: ModelConfig, device: torch.device
) -> ExtraReward:
    assert settings.path is not None
    scorer, facts = external_scorer(settings.path, settings.public, key_names(key), limits, device)

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> torch.Tensor:
        return scorer.score(prompts, responses).reward

    return ExtraReward(name, settings.weight, score, {**facts, "weight": settings.weight}, scorer.renderer)


def external_scorer(
    folder: Path, public: bool, names: tuple[str, str], limits: ModelConfig | Renderer, device: torch.device, **how: Any
) -> tuple[RewardScorer, dict[str, Any]]:
    """Scores by a reward model from outside this run, without Γ, and its facts for the card.

    public, names: see `private_rlhf.reward_models.external.check_folder`. limits: of the policy's texts.
    how: of `private_rlhf.reward_models.checkpoint.load_reward_checkpoint`.
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
