"""Hours from a short measurement: the recipe's own model decodes, reads and learns a few batches on this device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.world import World
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.logprobs import response_forward, token_batch, token_logprobs
from private_rlhf.lm.models import add_lora, base_checkpoint, load_causal_lm
from private_rlhf.lm.rows import sharing_of
from private_rlhf.planning.memory import trains_with
from private_rlhf.planning.model import config_of, shape_of, skeleton
from private_rlhf.planning.plan import Plan, StagePlan
from private_rlhf.recipe import ON_PROMPTS, LoraSettings, Recipe

FEW, MORE = 2, 8
"""Tokens that are decoded in each of two runs; their difference leaves out what is done once per batch."""


@dataclass(frozen=True)
class Rates:
    """Seconds per token of one process: decoded, read without gradients, learnt from (by stage); per sampled response
    what a batch costs once (its prompt, packing)."""

    decode: float
    response: float
    read: float
    learn: dict[str, float]


def with_hours(plan: Plan, model_config: Path | None) -> tuple[Plan, str | None]:
    """The plan with hours, or why there are none. A minute on two cores for a model of 135M parameters."""
    source = base_checkpoint(plan.recipe.model)
    if model_config is not None or not Path(source).is_dir():
        return plan, "unknown here (the model's weights are not on this machine)"
    processes, share = plan.machine.processes, _share(plan.recipe)
    rates = measured(plan.recipe, source, processes)
    stages = [replace(stage, hours=hours(stage, rates, share, processes)) for stage in plan.stages]
    return replace(plan, stages=stages), None


def hours(stage: StagePlan, rates: Rates, share: float, processes: int) -> float | None:
    """Of one stage, its tokens spread evenly over the processes; None where their number is unknown.

    share: of the language model's layers that the reward model has.
    """
    work = stage.work
    if work.sampled is None or work.read is None or work.scored is None or work.trained is None:
        return None
    seconds = work.sampled * rates.decode + work.responses * rates.response + work.read * rates.read
    seconds += work.scored * rates.read * share + work.trained * rates.learn.get(stage.name, 0.0)
    return seconds / processes / 3600


def _share(recipe: Recipe) -> float:
    """Of the language model's layers, those that the reward model has: about its share of the time."""
    layers = shape_of(skeleton(config_of(recipe.model))).layers
    return min(1.0, (recipe.reward.num_layers or layers) / layers)


def measured(recipe: Recipe, source: str, processes: int) -> Rates:
    """Times the model in `source` at the recipe's shapes."""
    device = make_accelerator(World(0, 1)).device
    settings, model = recipe.model, load_causal_lm(source, recipe.model.dtype).to(device)
    aligner, on_prompts = getattr(recipe, recipe.aligner), recipe.aligner in ON_PROMPTS
    batch = aligner.generate_batch_size if on_prompts else recipe.evaluate.batch_size
    prompts = _texts(model, max(1, batch // processes), settings.max_prompt_tokens // 3)
    few, more = (_decoding(model, prompts, tokens) for tokens in (FEW, MORE))
    step = max(more - few, 0.0) / (MORE - FEW)
    micro = aligner.micro_batch_size or aligner.batch_size
    texts = _texts(model, max(1, micro // processes), settings.max_prompt_tokens // 3 + settings.max_response_tokens)
    tokens = sum(map(len, texts))
    read = timed(lambda: _read(model, texts, settings.max_response_tokens))
    learn, done = {}, dict[str, float]()
    for stage, lora in trains_with(recipe).items():
        if str(lora) not in done:
            done[str(lora)] = _learning(source, recipe, lora, texts, device) / tokens
        learn[stage] = done[str(lora)]
    return Rates(step / len(prompts), max(few - FEW * step, 0.0) / len(prompts), read / tokens, learn)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the faster of two calls after one that warms up."""
    work()
    found = []
    for _ in range(2):
        started = time.monotonic()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        found.append(time.monotonic() - started)
    return min(found)


def _texts(model: Any, count: int, length: int) -> list[list[int]]:
    """`count` different texts of `length` random tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    draws: list[list[int]] = torch.randint(vocabulary, (count, max(2, length)), generator=torch.Generator()).tolist()
    return draws


def _decoding(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for that many tokens of a response to each prompt; none ends before."""
    special: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": -1, "batch_size": len(prompts)}
    keys = list(range(len(prompts)))
    return timed(lambda: sample_responses(model, prompts, keys, Sampling(tokens), **special))


def _batch(model: Any, texts: list[list[int]], responses: int) -> Any:
    device = next(model.parameters()).device
    cut = max(1, len(texts[0]) - responses)
    prompts, answers = [text[:cut] for text in texts], [text[cut:] for text in texts]
    return token_batch(prompts, answers, 0, device, sharing=sharing_of(model))


@torch.no_grad()
def _read(model: Any, texts: list[list[int]], responses: int) -> None:
    batch = _batch(model, texts, responses)
    token_logprobs(response_forward(model, batch)[0], batch.tokens)


def _learning(
    source: str, recipe: Recipe, lora: LoraSettings | None, texts: list[list[int]], device: torch.device
) -> float:
    """Seconds of one step on `texts`."""
    base = load_causal_lm(source, recipe.model.dtype if lora else "float32").to(device)  # type: ignore[arg-type]
    model = add_lora(base, lora, recipe.seed) if lora else base
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-6, fused=True)

    def step() -> None:
        batch = _batch(model, texts, recipe.model.max_response_tokens)
        token_logprobs(response_forward(model, batch)[0], batch.tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)
