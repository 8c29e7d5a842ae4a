"""Both texts of a pair in one row: the tokens that they begin with alike, the prompt above all, are computed once.

A row holds the shared beginning, the rest of the chosen text and the rest of the rejected one, padded on the right.
Each rest sees the beginning and itself, at the positions it would have alone, so scores and gradients are those of two
rows. What is shared is found in the token ids: texts that begin differently share nothing and still get a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from reward_models.model import score_layer, unwrap

FAMILIES = frozenset({"gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""`model_type` of rotary decoders in which tokens meet in causal attention alone, by test."""
PAD, SHARED, CHOSEN, REJECTED = -1, 0, 1, 2
SHORT = 192
"""Columns up to which unfused attention is the faster one on CPUs, with its backward pass."""


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both texts begin with, less what leaves each its own last token."""
    pairs = zip(first[:-1], second[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def row_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens of the row of a pair."""
    return len(first) + len(second) - shared_length(first, second)


def join_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Rows of (chosen, rejected) token ids.

    Returns:
        `input_ids`, `attention_mask` (0/1), `position_ids` and `segments` (what a token belongs to), each (B, T) int64,
        and `last` (B, 2) int64: the columns of the chosen and the rejected text's last tokens.
    """
    shape = (len(pairs), max(row_length(*pair) for pair in pairs))
    ids, positions = torch.full(shape, pad_token_id), torch.zeros(shape, dtype=torch.long)
    segments, last = torch.full(shape, PAD), torch.zeros(len(pairs), 2, dtype=torch.long)
    for row, (chosen, rejected) in enumerate(pairs):
        shared = shared_length(chosen, rejected)
        whole = len(row_ids := [*chosen, *rejected[shared:]])
        ids[row, :whole] = torch.tensor(row_ids)
        positions[row, :whole] = torch.tensor([*range(len(chosen)), *range(shared, len(rejected))])
        segments[row, :shared], segments[row, shared : len(chosen)] = SHARED, CHOSEN
        segments[row, len(chosen) : whole] = REJECTED
        last[row] = torch.tensor([len(chosen) - 1, whole - 1])
    mask = (segments != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "segments": segments, "last": last}


def added_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) -> (B, 1, T, T): 0 where a token sees another, the lowest number elsewhere; what attention scores add."""
    width = segments.shape[1]
    own, other = segments[:, :, None], segments[:, None, :]
    seen = (own == other) | ((other == SHARED) & (own != PAD))
    seen &= torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def can_share(model: nn.Module) -> bool:
    """Whether a row of this model can hold texts that do not see each other: a known family without windows, and an
    attention kernel that takes a mask of its own.
    """
    inner: Any = unwrap(model)
    config = inner.config.get_text_config()
    return (
        config.model_type in FAMILIES
        and config._attn_implementation in ("eager", "sdpa")
        and getattr(config, "sliding_window", None) is None
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and "position_ids" in inspect.signature(inner.forward).parameters
    )


def pair_scores(model: nn.Module, plain: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Raw scores (2, B) float32 of chosen and rejected texts, and the model's output with them as logits (2B, 1).

    Args:
        model: what is called, maybe wrapped for several processes.
        plain: the model within the wrapper.
        batch: of `join_pairs`.
    """
    inner: Any = unwrap(plain)
    with _every_score(plain) as seen:
        output = model(
            input_ids=batch["input_ids"],
            attention_mask=added_mask(batch["segments"], inner.dtype),
            position_ids=batch["position_ids"],
            use_cache=False,
        )
    scores = seen[0].squeeze(-1).float().gather(1, batch["last"]).T
    output.logits = scores.reshape(-1, 1)
    return scores, output


@contextmanager
def _every_score(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the score layer says of every token (B, T, 1), one entry a forward pass; models return one token a row."""
    seen: list[Tensor] = []
    handle = score_layer(model).register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def pick_attention(model: nn.Module, width: int) -> None:
    """Sets the faster attention of a CPU for rows of `width` tokens: unfused for short ones that are trained on."""
    inner: Any = unwrap(model)
    name = "eager" if width <= SHORT and torch.is_grad_enabled() else "sdpa"
    if inner.config._attn_implementation != name:
        inner.set_attn_implementation(name)
