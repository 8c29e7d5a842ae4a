"""Sampling responses with noise that is keyed per response, so that samples do not depend on batching or sharding.

The sampler inverts each next-token distribution function at a uniform number from a generator seeded by the response's
key. Prompts are read in rows that share what they begin with.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from private_rlhf.core.errors import RunStopped
from private_rlhf.lm.distributed import is_sharded, largest, turns
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.kernels.attention import grouped_queries, with_room
from private_rlhf.lm.kernels.linear_layers import packed_linears
from private_rlhf.lm.kernels.recorded_step import recorded
from private_rlhf.lm.kernels.token_terms import row_chunks
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import make_rows, sharing_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, TopPLogitsWarper

BLOCK = 256
"""Tokens of the vocabulary whose probabilities are added up before the sums are: fewer passes, less rounding."""
LOOK = {"cpu": 1}
"""Tokens, by type of device (16 on any other), between two looks at which responses have ended: it waits for a GPU."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler. max_new_tokens >= 1; temperature > 0; top_p in (0, 1], below 1 the sampler differs from
    π_θ. ValueError otherwise."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not 0 < self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ValueError(f"max_new_tokens must be at least 1, temperature above 0 and top_p in (0, 1], got {self}")


def sample_key(*parts: int | str) -> int:
    """A 63-bit generator seed from an encoding of `parts`, e.g. (seed, "rollout", iteration, index). It is injective
    for whole numbers and texts without U+001F."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def noise_of(keys: Sequence[int], steps: int) -> Tensor:
    """(B, steps) float32 uniform numbers in [0, 1): row i of a generator seeded with keys[i]."""
    rows = [torch.rand(steps, generator=torch.Generator().manual_seed(key), dtype=torch.float64) for key in keys]
    return torch.stack(rows).float().clamp_max(1 - 2**-24)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """One token (B,) int64 of each next-token distribution, logits (B, V), by inverting it at uniform (B,)."""
    return torch.cat([_draw(logits[rows], uniform[rows], sampling) for rows in row_chunks(logits)])


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    logits = logits.float() / sampling.temperature if sampling.temperature != 1.0 else logits.float()
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    mass = torch.nn.functional.pad(mass, (0, -mass.shape[-1] % BLOCK)).view(len(mass), -1, BLOCK)
    ends = mass.sum(dim=-1).cumsum(dim=-1)
    total = ends[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first block, and in it the first token, whose cumulative mass exceeds the target: never one of probability 0.
    block = torch.searchsorted(ends, target, right=True)
    within = mass[torch.arange(len(mass), device=mass.device), block[:, 0]]
    rest = (target - ends.gather(1, block) + within.sum(dim=-1, keepdim=True)).clamp_min(0)
    place = torch.searchsorted(within.cumsum(dim=-1), rest, right=True)
    last = ((within > 0) * torch.arange(BLOCK, device=mass.device)).amax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(place, last))[:, 0]


@torch.no_grad()
def sample_responses(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    sampling: Sampling,
    *,
    pad_token_id: int,
    eos_token_id: int | Collection[int],
    batch_size: int,
    progress: str | None = None,
) -> list[list[int]]:
    """One response per prompt: its token ids, ending with an `eos_token_id` unless cut at the cap.

    Where weights are split over processes (`is_sharded`), every process calls this, also without prompts, and goes on
    until the last one is done.

    model: causal LM (or PEFT model) in evaluation mode, or a `PolicyWithValue`. keys: noise key of each response
    (`sample_key`). eos_token_id: one or several (`end_ids`). batch_size: responses decoded together. progress: label of
    a bar, or None. ValueError: other numbers of prompts and keys, or a batch_size below 1. RunStopped: the weights give
    logits that are not finite, on a CPU.
    """
    if len(keys) != len(prompts) or batch_size < 1:
        numbers = f"{len(keys)} keys for {len(prompts)} prompts and batch_size {batch_size}"
        raise ValueError(f"keys must be one for each prompt and batch_size at least 1, got {numbers}")
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), tuple(prompts[index])))  # pads little
    responses: list[list[int]] = [[] for _ in prompts]
    ends = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
    bar = tqdm(total=len(prompts), desc=progress, unit="sample", disable=progress is None or not prompts, leave=False)
    together, device = is_sharded(model), next(model.parameters()).device
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for indices in turns(groups, device, together):
        mine, noise = [prompts[i] for i in indices] or [[pad_token_id]], [keys[i] for i in indices] or [0]
        with contextlib.nullcontext() if together else packed_linears(model, len(mine)):
            rows = _decode(model, mine, noise, sampling, pad_token_id, ends, together)
        for index, row in zip(indices, rows if indices else [], strict=True):
            responses[index] = row
        bar.update(len(indices))
    bar.close()
    return responses


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    sampling: Sampling,
    pad_token_id: int,
    ends: frozenset[int],
    together: bool,
) -> list[list[int]]:
    """Decodes one batch; responses that have ended leave it, several at a time.

    together: weights are split over processes. One that has no response left reads on until all are done.
    """
    logits, cache, mask = _read_prompts(model, prompts, pad_token_id, sampling.max_new_tokens)
    if mask.device.type in LOOK and not torch.isfinite(logits.amax(dim=-1)).all():  # another device would be waited for
        raise RunStopped("logits must be finite, got others: take an earlier checkpoint, or model.dtype=float32")
    device, room = mask.device, sampling.max_new_tokens
    noise, last = noise_of(keys, room).to(device), torch.tensor(sorted(ends), device=device)
    replayed = not together and replays(model)
    steps = ReplayedSteps(model, cache, mask, sampling) if replayed else Steps(model, cache, mask, sampling)
    drawn = torch.full((len(prompts), room), -1, device=device)
    places = torch.arange(len(prompts), device=device)  # which response a row of the batch is
    going = torch.ones_like(places, dtype=torch.bool)
    tokens = draw(logits, noise[:, 0], sampling)
    for step in range(1, room + 1):
        drawn[places, step - 1] = torch.where(going, tokens, -1)
        going = going & torch.isin(tokens, last, invert=True)
        if step == room:
            break
        if step % LOOK.get(device.type, 16) == 0:
            left = int(going.sum())
            if not (largest(left, device) if together else left):
                break
            if 0 < left <= (1 - steps.ended) * len(going):
                rows = going.nonzero()[:, 0]
                steps.keep(rows)
                tokens, noise, places, going = (each[rows] for each in (tokens, noise, places, going))
        tokens = steps.take(tokens, noise[:, step])
    return [[token for token in row if token >= 0] for row in drawn.tolist()]


class Steps:
    """The next token of every row of a batch, by a forward pass each."""

    ended = 0.15
    """Share of the rows that has ended before they leave: leaving copies the cache of the others."""

    def __init__(self, model: Any, cache: Any, mask: Tensor, sampling: Sampling) -> None:
        """cache: of the rows so far, whose real tokens `mask` (B, L) shows."""
        self.model, self.cache, self.mask, self.sampling = model, cache, mask, sampling
        self.positions = mask.sum(dim=1)
        self.read = _reader(model)

    def take(self, tokens: Tensor, uniform: Tensor) -> Tensor:
        """The tokens (B,) that follow `tokens` (B,), drawn at uniform (B,)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        where = {"past_key_values": self.cache, **_positioned(self.model, self.positions[:, None])}
        self.positions = self.positions + 1
        output = self.read(input_ids=tokens[:, None], attention_mask=self.mask, use_cache=True, **where)
        return draw(output.logits[:, -1], uniform, self.sampling)

    def keep(self, rows: Tensor) -> None:
        """Drops the rows that are not named."""
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]


class ReplayedSteps(Steps):
    """The same on memory of fixed shape, with a step recorded once and replayed (`kernels.recorded_step`)."""

    ended = 0.5
    """Steps of fewer rows are recorded anew."""

    def __init__(self, model: Any, cache: Any, mask: Tensor, sampling: Sampling) -> None:
        """cache: has room for all tokens of a response (`with_room`)."""
        super().__init__(model, cache, mask, sampling)
        inner: Any = unwrap(model)
        self.config, width = inner.config.get_text_config(), mask.shape[1]
        shape = (len(mask), 1, 1, cache.layers[0].keys.shape[2])
        self.hidden = torch.full(shape, torch.finfo(inner.dtype).min, dtype=inner.dtype, device=mask.device)
        self.hidden[:, 0, 0, :width].masked_fill_(mask.bool(), 0.0)
        self.column = torch.tensor([width], device=mask.device)
        for layer in cache.layers:
            layer.column = self.column
        self.replay: Callable[[], Tensor] | None = None

    def take(self, tokens: Tensor, uniform: Tensor) -> Tensor:
        """See `Steps`."""
        if self.replay is None:
            self.tokens, self.uniform = tokens.clone(), uniform.clone()
            self.replay = recorded(self._step)
        self.tokens.copy_(tokens)
        self.uniform.copy_(uniform)
        following = self.replay()
        self.column += 1
        self.positions += 1
        return following

    def keep(self, rows: Tensor) -> None:
        """See `Steps`."""
        super().keep(rows)
        self.hidden, self.replay = self.hidden[rows], None

    def _step(self) -> Tensor:
        self.hidden.index_fill_(3, self.column, 0.0)
        with grouped_queries(self.config):
            output = self.read(
                input_ids=self.tokens[:, None],
                attention_mask=self.hidden,
                position_ids=self.positions[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
        return draw(output.logits[:, -1], self.uniform, self.sampling)


def replays(model: Any) -> bool:
    """True if the steps of `model` can be recorded: nothing in them waits for the host."""
    inner: Any = unwrap(model)
    device, config = next(inner.parameters()).device.type, inner.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        runs("replay", device)
        and sharing_of(model) is not None
        and rope.get("rope_type") not in ("dynamic", "longrope")  # the host looks at the positions
        and getattr(inner, "quantization_method", None) is None
        and not torch.is_autocast_enabled(device)
    )


def _reader(model: Any) -> Any:
    """The reader of tokens: a PolicyWithValue reads through itself, where split weights are gathered."""
    return getattr(model, "read", model)


def _read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], pad_token_id: int, room: int
) -> tuple[Tensor, Any, Tensor]:
    """Next-token logits (B, V), the cache of the prompts, aligned at their ends, and its mask (B, L).

    room: tokens still to come.
    """
    device, read = next(model.parameters()).device, _reader(model)
    ids, mask = pad_rows(prompts, pad_token_id, device, left=True)
    sharing = sharing_of(model)
    if sharing is None:
        extra = _positioned(model, (mask.cumsum(dim=1) - 1).clamp_min(0))
        output = read(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **extra)
        return output.logits[:, -1], output.past_key_values, mask
    rows = make_rows(prompts, pad_token_id, device, sharing)
    head = unwrap(model).get_output_embeddings()  # type: ignore[operator]
    last = rows.last
    handle = head.register_forward_pre_hook(lambda _, extra: (extra[0].flatten(0, 1)[last][None], *extra[1:]))
    cache = DynamicCache(config=unwrap(model).config)  # type: ignore[arg-type]
    try:
        output = read(
            input_ids=rows.input_ids,
            attention_mask=rows.attention(unwrap(model).dtype),  # type: ignore[arg-type]
            position_ids=rows.position_ids,
            past_key_values=cache,
            use_cache=True,
        )
    finally:
        handle.remove()
    width = ids.shape[1]
    paths = torch.tensor([[path[0]] * (width - len(path)) + path for path in rows.paths], device=device)
    return output.logits[0], with_room(cache, paths, room), mask


def _positioned(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """The positions, for models that take any; others go by the mask."""
    takes = inspect.signature(unwrap(model).forward).parameters
    return {"position_ids": positions} if "position_ids" in takes else {}


def pad_rows(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """(ids, mask), each (B, T) int64, rows aligned at their starts, or at their ends with `left`."""
    texts, side = [torch.as_tensor(row, dtype=torch.long) for row in rows], "left" if left else "right"
    ids = pad_sequence(texts, batch_first=True, padding_value=pad_token_id, padding_side=side)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)
