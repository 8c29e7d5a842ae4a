"""Two checkpoints against each other on a file of prompts, outside any run: `private-rlhf evaluate` and `sample`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.core import atomic
from pipeline.core.checkpoints import check_checkpoint
from pipeline.core.errors import UserError
from pipeline.core.stats import bootstrap_mean, length_controlled_win_rate, wilson
from pipeline.core.world import device_type
from pipeline.data.formats import read_prompts
from pipeline.data.render import Prompt, Renderer, keep_fitting
from pipeline.evaluation.judges import make_judge
from pipeline.lm.generate import Sampling, sample_key, sample_responses
from pipeline.lm.models import end_ids, load_causal_lm, load_tokenizer
from pipeline.lm.numerics import affordable
from pipeline.lm.released import read_rendering

MAX_PROMPT_TOKENS = 1024


def compare(
    policy: str,
    reference: str,
    prompts: str,
    judge: str,
    *,
    output: Path | None,
    seed: int,
    limit: int | None,
    max_response_tokens: int | None = None,
    system_prompt: str | None = None,
) -> str:
    """Samples one answer per prompt from both, has them judged, and returns the line to print.

    The cap is the policy's own unless given; the system message is each checkpoint's own unless given.

    Raises:
        UserError: a checkpoint, prompt file or judge that cannot be used.
    """
    policy, reference = check_checkpoint(policy, "--policy"), check_checkpoint(reference, "--reference")
    if output is not None:
        check_output(output)
    chosen = load_prompts(prompts)[:limit]
    max_response_tokens = max_response_tokens or read_rendering(policy).max_response_tokens
    renderer = renderer_of(policy, max_response_tokens, system_prompt)
    referee = make_judge(judge, renderer)
    kept = [chosen[i] for i in keep_fitting(chosen, renderer, "drop")]
    answers = answer_all(policy, kept, renderer, seed, "policy")
    reference_renderer = renderer_of(reference, max_response_tokens, system_prompt)
    references = answer_all(reference, kept, reference_renderer, seed, "reference")
    outcome = referee.compare(kept, answers, references)
    rate = wilson(float(outcome.sum()), len(outcome))
    length = np.array([len(a.split()) - len(b.split()) for a, b in zip(answers, references, strict=True)])
    controlled = length_controlled_win_rate(outcome, np.full(len(outcome), 0.5), length, seed)
    result: dict[str, Any] = {
        "judge": judge,
        "win_rate": rate.as_dict(),
        "length_controlled_win_rate": controlled.as_dict(),
        "prompts": len(kept),
        "dropped_long_prompts": len(chosen) - len(kept),
        "mean_outcome": bootstrap_mean(outcome, seed).as_dict(),
        "seed": seed,
    }
    if output is not None:
        atomic.write_json(output, result)
    return f"win rate by {judge}: {rate}; length-controlled: {controlled}"


def renderer_of(checkpoint: str, max_response_tokens: int | None, system_prompt: str | None) -> Renderer:
    """The renderer of a checkpoint; None means what the checkpoint states."""
    own = read_rendering(checkpoint)
    system = own.system_prompt if system_prompt is None else system_prompt
    return Renderer(
        load_tokenizer(checkpoint), MAX_PROMPT_TOKENS, max_response_tokens or own.max_response_tokens, system
    )


def check_output(path: Path) -> None:
    """Refuses an output file that could not be written, before the work rather than after it."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output {path} cannot be written: choose another file")


def load_prompts(source: str) -> list[Prompt]:
    """Prompts of a file, or the embedded held-out ones."""
    if source == "embedded":
        from pipeline.embedded.task import load_prompts as load_embedded

        return list(load_embedded("eval"))
    prompts: list[Prompt] = list(read_prompts(source))
    if not prompts:
        raise UserError(f"{source} holds no prompts: give a file with a `prompt` column")
    return prompts


def answer_all(path: str, prompts: Sequence[Prompt], renderer: Renderer, seed: int, purpose: str) -> list[str]:
    """One sampled answer per prompt."""
    device = torch.device(device_type())
    model: Any = load_causal_lm(path, stored_dtype(path, device.type))
    model.to(device)
    rows = sample_responses(
        model,
        [renderer.prompt_ids(prompt) for prompt in prompts],
        [sample_key(seed, "compare", purpose, index) for index in range(len(prompts))],
        Sampling(renderer.max_response_tokens),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(model, renderer.tokenizer),
        batch_size=64,
        progress=f"answers of the {purpose}",
    )
    return [renderer.text(row) for row in rows]


def stored_dtype(path: str, device: str) -> str:
    """The dtype a checkpoint was saved in, as far as this project runs it and the device does so fast."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        raise UserError(f"{path} holds no checkpoint that transformers can load: check the path") from None
    return "bfloat16" if config.dtype == torch.bfloat16 == affordable(torch.bfloat16, device) else "float32"


def sample_text(
    policy: str,
    prompts: Sequence[str],
    count: int,
    seed: int,
    max_response_tokens: int | None = None,
    system_prompt: str | None = None,
) -> list[list[str]]:
    """`count` sampled answers to each prompt."""
    policy = check_checkpoint(policy, "--policy")
    renderer = renderer_of(policy, max_response_tokens, system_prompt)
    return [answer_all(policy, [prompt] * count, renderer, seed, prompt) for prompt in prompts]
