"""Two checkpoints against each other on a file of prompts, outside any run: `private-rlhf evaluate` and `sample`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending, read_rows
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import share_text
from private_rlhf.core.world import World, barrier, declared_world, device_type, join_world
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_prompts
from private_rlhf.data.release import MESSAGE_KEYS
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.evaluation.judges import judged_pairs, judged_rates, make_judge, truth_judge
from private_rlhf.evaluation.rates import NOT_AT_EQUAL_LENGTH
from private_rlhf.lm.distributed import make_accelerator, split_frozen
from private_rlhf.lm.drawing import TransformersEngine
from private_rlhf.lm.generate import Sampling, sample_key
from private_rlhf.lm.model_card import read_rendering
from private_rlhf.lm.model_folders import check_checkpoint, weights_digest
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.lm.numerics import affordable
from private_rlhf.recipe import EvaluateConfig, JudgeSettings
from tqdm import tqdm

MAX_PROMPT_TOKENS = 1024
ANSWERS, VERDICTS = "answers-*.jsonl", "verdicts.jsonl"
BATCH = 32
"""Answers decoded, and kept, together: what a kill may cost a process."""
Connect = Callable[[Any, Renderer], Callable[..., list[list[int]]]]
"""Model and renderer to `Engine.draw` of the servers that serve it."""


def compare(
    policy: str,
    reference: str,
    prompts: str,
    judge: JudgeSettings | None,
    *,
    output: Path | None,
    seed: int,
    limit: int | None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_response_tokens: int | None = None,
    temperature: float = 1.0,
    system_prompt: str | None = None,
) -> str:
    """Samples one answer per prompt from both, has them judged, and returns the line to print.

    Each process samples its share; the main one judges, writes and has a line. With `output`, answers and replies are
    kept in `OUTPUT.partial` until the result stands: the same command goes on where one failed or was killed.

    policy, reference: checkpoint folders or hub ids. prompts: a file, or `embedded`; `limit`: the first ones only.
    judge: see `parse_judge`; None is the known truth. output: the JSON file of the result. max_prompt_tokens: longer
    prompts are left out and counted. max_response_tokens, system_prompt: None is the checkpoint's own. UserError: a
    checkpoint, prompt file or judge that cannot be used. RunStopped: a chat judge stopped answering.
    """
    world = join_world()
    policy, reference = check_checkpoint(policy, "--policy"), check_checkpoint(reference, "--reference")
    partial = None if output is None else check_output(output)
    every_prompt, both = load_prompts(prompts)[:limit], (policy, reference)
    max_response_tokens = max_response_tokens or read_rendering(policy).max_response_tokens
    renderers = [renderer_of(path, max_response_tokens, system_prompt, max_prompt_tokens) for path in both]
    log = None if partial is None else partial / VERDICTS
    names = ("--judge rm:", "--judge-public")
    referee = make_judge(judge, renderers[0], torch.device(device_type()), names, log=log, own_host=True)
    fitting = fitting_both(every_prompt, renderers)
    description = {
        "policy": identity(policy),
        "reference": identity(reference),
        "seed": seed,
        "temperature": temperature,
        "max_response_tokens": max_response_tokens,
        "system_prompts": [renderer.system_prompt for renderer in renderers],
    }
    answers, references = (
        shared_answers(path, fitting, renderer, purpose, {**description, "prompts": fitting}, partial, world)
        for path, renderer, purpose in zip(both, renderers, ("policy", "reference"), strict=True)
    )
    if not world.main:
        return ""
    rows = referee.compare(fitting, answers, references)
    longer = [len(a.split()) - len(b.split()) for a, b in zip(answers, references, strict=True)]
    truth = truth_judge().compare(fitting, answers, references) if prompts == "embedded" and judge is not None else None
    rates = judged_rates(rows, longer, seed, None if truth is None else np.array([row["outcome"] for row in truth]))
    if output is not None and partial is not None:
        result = {
            "judge": referee.facts,
            **rates,
            "prompts": len(fitting),
            "dropped_long_prompts": len(every_prompt) - len(fitting),
            **description,
            "pairs": judged_pairs(fitting, answers, references, rows),
        }
        atomic.write_json(output, result)
        with suppress(OSError):
            for path in (partial / VERDICTS, *partial.glob(ANSWERS)):
                path.unlink(missing_ok=True)
            partial.rmdir()
    return rates_line(rates, len(rows))


def fitting_both(prompts: Sequence[Prompt], renderers: Sequence[Renderer]) -> list[Prompt]:
    """The prompts within the limit of every renderer: tokenizers and system messages may differ. UserError if none."""
    fitting = [prompt for prompt in prompts if all(renderer.fits(prompt) for renderer in renderers)]
    if not fitting:
        limit = renderers[0].max_prompt_tokens
        raise UserError(f"--prompts must hold one within {limit} tokens for both, got none: raise --max-prompt-tokens")
    return fitting


def rates_line(rates: dict[str, Any], pairs: int) -> str:
    """`judged_rates` in one line."""
    unclear = f"{rates['unclear_pairs']} of {pairs} pairs left out, their verdicts were unclear"
    if rates["win_rate"] is None:
        return f"no win rate: {unclear}"
    controlled = rates["length_controlled_win_rate"]
    at_equal_length = f"length-controlled: {share_text(controlled)}" if controlled else NOT_AT_EQUAL_LENGTH
    line = f"{share_text(rates['win_rate'])}; {at_equal_length}"
    if rates["agreement"]:
        line += f"; agrees with the truth on {share_text(rates['agreement'])}"
    return f"{line}; {unclear}" if rates["unclear_pairs"] else line


def identity(checkpoint: str) -> dict[str, Any]:
    """Identity of a checkpoint: a folder with the SHA-256 of its weights, or a hub id with its revision here."""
    if Path(checkpoint).is_dir():
        return {"path": checkpoint, "sha256": weights_digest(Path(checkpoint))}
    return {"path": checkpoint, "revision": getattr(config_of(checkpoint), "_commit_hash", None)}


def shared_answers(
    path: str,
    prompts: Sequence[Prompt],
    renderer: Renderer,
    purpose: str,
    description: dict[str, Any],
    partial: Path | None,
    world: World,
) -> list[str]:
    """One answer of a policy to each prompt, in their order, on every process.

    Batches depend on nothing but the prompts, so answers are the same for any number of processes. With `partial` each
    batch is on the disk once it is made, and what an earlier run of the same description left there is taken.
    """
    sizes = [(len(ids), ids) for ids in map(renderer.prompt_ids, prompts)]
    order = sorted(range(len(prompts)), key=sizes.__getitem__)  # pads little
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    of = hashlib.sha256(json.dumps([description, purpose, device_type()], sort_keys=True).encode()).hexdigest()
    earlier = {} if partial is None else kept_answers(partial, of)
    missing = [batch for batch in batches if not earlier.keys() >= set(batch)]
    missing += [[]] * (-len(missing) % world.size)  # where weights are split, each pass needs every process
    barrier(world)  # all have read what is there before one adds to it
    new: dict[int, str] = {}
    mine = missing[world.rank :: world.size]
    log = nullcontext(None) if partial is None else appending(partial / f"answers-{world.rank}.jsonl")
    with log as keep:
        sample = load_sampler(path, renderer, description["temperature"]) if mine else None
        for batch in tqdm(mine, desc=f"answers of the {purpose}", unit="batch", disable=not mine, leave=False):
            assert sample is not None
            keys = [sample_key(description["seed"], "compare", purpose, index) for index in batch]
            for index, answer in zip(batch, sample([prompts[index] for index in batch], keys), strict=True):
                new[index] = answer
                if keep is not None:
                    keep({"of": of, "prompt": index, "answer": answer})
    answers = earlier | dict(gather_object(list(new.items())))
    return [answers[index] for index in range(len(prompts))]


def kept_answers(partial: Path, of: str) -> dict[int, str]:
    """By the number of its prompt, each answer of this description that lies in a folder."""
    rows = (row for path in partial.glob(ANSWERS) for row in read_rows(path))
    return {row["prompt"]: row["answer"] for row in rows if row.get("of") == of}


def renderer_of(
    checkpoint: str,
    max_response_tokens: int | None,
    system_prompt: str | None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
) -> Renderer:
    """The renderer of a checkpoint; None means what the checkpoint states."""
    rendering = read_rendering(checkpoint)
    system = rendering.system_prompt if system_prompt is None else system_prompt
    limit = max_response_tokens or rendering.max_response_tokens
    return Renderer(load_tokenizer(checkpoint), max_prompt_tokens, limit, system, rendering.chat_template_kwargs)


def check_output(path: Path) -> Path:
    """The folder of an output file's answers and replies. UserError, before the work rather than after it, for a file
    that could not be written and for a folder that holds other files."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output must be a file that can be written, got {path}: choose another")
    partial = path.with_name(f"{path.name}.partial")
    if others := [each.name for each in partial.glob("[!.]*") if each.name != VERDICTS and not each.match(ANSWERS)]:
        raise UserError(f"{partial} must hold answers and verdicts only, got {others[0]}: choose another --output")
    return partial


def load_prompts(source: str) -> list[Prompt]:
    """Prompts of a file, or the embedded held-out ones."""
    if source == "embedded":
        from private_rlhf.embedded.task import load_prompts as load_embedded

        return list(load_embedded("eval"))
    prompts: list[Prompt] = list(read_prompts(source, None, Options(message_keys=tuple(MESSAGE_KEYS))))
    if not prompts:
        raise UserError(f"--prompts must hold prompts, got {source}: give a file with a `prompt` column")
    return prompts


def load_sampler(
    path: str, renderer: Renderer, temperature: float = 1.0, connect: Connect | None = None
) -> Callable[[Sequence[Prompt], Sequence[int]], list[str]]:
    """A function that samples one answer to each prompt, with the noise of its key (`sample_key`). connect: gives the
    drawing function of servers, from the model and the renderer; None: the model draws."""
    whole = load_causal_lm(path, stored_dtype(path, device_type()))
    model = split_frozen(make_accelerator(declared_world()), whole)
    sampling = Sampling(renderer.max_response_tokens, temperature)
    own = TransformersEngine(None, renderer.tokenizer, EvaluateConfig().batch_size)
    draw = own.draw if connect is None else connect(model, renderer)

    def sample(prompts: Sequence[Prompt], keys: Sequence[int]) -> list[str]:
        return [renderer.text(row) for row in draw(model, list(map(renderer.prompt_ids, prompts)), keys, sampling)]

    return sample


def stored_dtype(path: str, device: str) -> str:
    """The dtype a checkpoint was saved in, as far as this project runs it and the device does so fast."""
    return "bfloat16" if config_of(path).dtype == torch.bfloat16 == affordable(torch.bfloat16, device) else "float32"


def config_of(path: str) -> Any:
    """The transformers configuration of a checkpoint. UserError where there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        raise UserError(f"{path} holds no checkpoint that transformers can load: check the path") from None


def sample_text(
    policy: str,
    prompts: Sequence[str],
    count: int,
    seed: int,
    max_response_tokens: int | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    connect: Connect | None = None,
) -> list[list[str]]:
    """`count` sampled answers to each prompt. connect: see `load_sampler`. UserError for a prompt that is too long."""
    policy = check_checkpoint(policy, "--policy")
    renderer = renderer_of(policy, max_response_tokens, system_prompt, max_prompt_tokens)
    if (longest := max(map(renderer.prompt_size, prompts))) > max_prompt_tokens:
        raise UserError(f"PROMPT must be within {max_prompt_tokens} tokens, got one of {longest}: shorten it")
    sample = load_sampler(policy, renderer, connect=connect)
    keys = [[sample_key(seed, "compare", prompt, index) for index in range(count)] for prompt in prompts]
    return [sample([prompt] * count, each) for prompt, each in zip(prompts, keys, strict=True)]
