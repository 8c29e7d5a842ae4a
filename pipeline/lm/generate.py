"""Sampling responses with noise that is keyed per response, so that samples do not depend on batching or sharding.

The sampler inverts the distribution function of each next-token distribution at a uniform number; the numbers of
response i come from a generator seeded by its own key.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.lm.packed import packed_linears
from reward_models.model import unwrap

STRIDE = 8  # tokens; shorter strides free ended rows sooner, and copy the cache more often


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature > 0; top_p in (0, 1], below 1 the sampler differs from π_θ."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


def sample_key(*parts: int | str) -> int:
    """A 63-bit generator seed from an injective encoding of `parts`, e.g. (seed, "rollout", iteration, index)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class KeyedSampler(LogitsProcessor):
    """Draws each row's next token by inverting its distribution function at the row's own uniform number.

    The token drawn gets score 0 and every other −∞, which turns greedy decoding into exact sampling. Row i uses the
    numbers of a generator seeded with keys[i], one a step.
    """

    def __init__(self, keys: Sequence[int], steps: int) -> None:
        rows = [torch.rand(steps, generator=torch.Generator().manual_seed(key), dtype=torch.float64) for key in keys]
        self.uniform = torch.stack(rows).float().clamp_max(1 - 2**-24)
        self.step = 0

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows (int64) alone."""
        self.uniform = self.uniform[rows]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores (B, V) -> (B, V) float32, 0 at the drawn token and −∞ elsewhere."""
        mass = torch.softmax(scores.float(), dim=-1).cumsum(dim=-1)
        target = self.uniform[:, self.step : self.step + 1].to(mass.device) * mass[:, -1:]
        # The first index whose cumulative mass exceeds the target: never a token of probability 0.
        drawn = torch.searchsorted(mass, target, right=True).clamp_max(scores.shape[-1] - 1)
        self.step += 1
        return torch.full_like(mass, float("-inf")).scatter_(1, drawn, 0.0)  # type: ignore[return-value]


@torch.no_grad()
def sample_responses(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    sampling: Sampling,
    *,
    pad_token_id: int,
    eos_token_id: int,
    batch_size: int,
    progress: str | None = None,
) -> list[list[int]]:
    """One response per prompt.

    Where the weights are split over processes (`sharded`), each forward pass needs all of them: every process calls
    this, with as many prompts as it has, none included, and goes on until the last one is done.

    Args:
        model: causal LM (or PEFT model) in evaluation mode.
        prompts: token ids, one sequence per response.
        keys: noise key of each response (`sample_key`); equal keys on equal prompts give equal responses.
        sampling: temperature, top_p and the cap.
        pad_token_id, eos_token_id: padding is masked by length, never by id.
        batch_size: responses decoded together.
        progress: label of a progress bar, or None for none.

    Returns:
        Token ids of each response, ending with `eos_token_id` unless cut at the cap.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding per batch
    responses: list[list[int]] = [[] for _ in prompts]
    bar = tqdm(total=len(prompts), desc=progress, unit="sample", disable=progress is None or not prompts, leave=False)
    together, device = sharded(model), next(model.parameters()).device
    starts = range(0, len(order), batch_size)
    for number in range(largest(len(starts), device) if together else len(starts)):
        indices = order[number * batch_size : (number + 1) * batch_size]
        mine, noise = [prompts[i] for i in indices] or [[eos_token_id]], [keys[i] for i in indices] or [0]
        packed = contextlib.nullcontext() if together else packed_linears(model, len(mine))
        with fused_attention(model), packed:
            rows = _decode(model, mine, noise, sampling, pad_token_id, eos_token_id, together)
        for index, row in zip(indices, rows if indices else [], strict=True):
            responses[index] = row
        bar.update(len(indices))
    bar.close()
    return responses


def sharded(model: Any) -> bool:
    """Whether the weights are split over processes, by torch's fully_shard or DeepSpeed ZeRO-3."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def largest(number: int, device: torch.device) -> int:
    """The largest of the numbers that the processes give; every one of them calls it."""
    held = torch.tensor(number, device=device)
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX)
    return int(held)


@contextlib.contextmanager
def fused_attention(model: Any) -> Iterator[None]:
    """Decodes with PyTorch's fused attention, which is the faster one without a backward pass; then as before."""
    base: Any = unwrap(model)
    before = base.config._attn_implementation
    if before != "eager":
        yield
        return
    base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    sampling: Sampling,
    pad_token_id: int,
    eos_token_id: int,
    together: bool,
) -> list[list[int]]:
    """Decodes one left-padded batch; every `STRIDE` tokens the responses that have ended leave it.

    together: weights are split over processes. One that has no response left decodes a stand-in until all are done.
    """
    device = next(model.parameters()).device
    input_ids, attention_mask = pad_left(prompts, pad_token_id, device)
    sampler = KeyedSampler(keys, sampling.max_new_tokens)
    processors = LogitsProcessorList()
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(sampler)
    responses: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    cache: dict[str, Any] = {}
    for done in range(0, sampling.max_new_tokens, STRIDE):
        if not (largest(len(going), device) if together else going):
            break
        config = GenerationConfig(
            max_new_tokens=min(STRIDE, sampling.max_new_tokens - done),
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
        )
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            logits_processor=processors if going else None,
            synced_gpus=together,
            **cache,
        )
        if not going:
            continue
        new = output.sequences[:, input_ids.shape[1] :]
        for place, row in zip(going, new.tolist(), strict=True):
            responses[place] += cut_after(row, eos_token_id)
        rows = [row for row, place in enumerate(going) if responses[place][-1] != eos_token_id]
        going = [going[row] for row in rows]
        kept = torch.tensor(rows, dtype=torch.long, device=device)
        input_ids = output.sequences[kept]
        attention_mask = torch.cat([attention_mask, torch.ones_like(new)], dim=1)[kept]
        if len(rows) < len(new):
            output.past_key_values.batch_select_indices(kept)
            sampler.keep(kept.cpu())
        cache = {"past_key_values": output.past_key_values}
        if not going:  # its cache went on with the other processes
            input_ids, attention_mask = pad_left([[eos_token_id]], pad_token_id, device)
            cache = {}
    return responses


def cut_after(ids: Sequence[int], eos_token_id: int) -> list[int]:
    """`ids` up to and including the first end-of-turn token; all of them when there is none."""
    ids = list(ids)
    return ids[: ids.index(eos_token_id) + 1] if eos_token_id in ids else ids


def pad_left(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), each (B, T) int64, rows aligned at their ends."""
    return _pad(rows, pad_token_id, device, left=True)


def pad_right(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), each (B, T) int64, rows aligned at their starts."""
    return _pad(rows, pad_token_id, device, left=False)


def _pad(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device, *, left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        start = width - len(row) if left else 0
        ids[index, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
        mask[index, start : start + len(row)] = 1
    return ids.to(device), mask.to(device)
