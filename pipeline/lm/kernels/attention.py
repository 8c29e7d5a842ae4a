"""Attention on CPUs with grouped queries, each key and value read once.

Most decoders have fewer keys and values than queries (SmolLM2: 3 for 9). transformers copies each for every query that
reads it; PyTorch's fused attention is slow on CPUs for a single query (decoding) and for bfloat16 gradients. Here the
queries of a group become further rows of one product: the same sums, softmax in float32 as in transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.core.world import device_type
from private_rlhf.lm.kernels import runs
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

NAME = "grouped"
LONG = 1024
"""Keys from which on the fused attention is taken, whose memory does not grow with their square."""


def use_grouped_attention(model: Any) -> Any:
    """Gives a model this attention where the kernel runs and the model is fit for it; returns it."""
    device = device_type()  # of the run: models are loaded on the CPU and moved later
    if isinstance(model, PreTrainedModel) and runs("attention", device) and _fit(model):
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)
    return model


def _fit(model: PreTrainedModel) -> bool:
    """Ordinary attention: what SDPA can do for a model, this can, and a cap on scores or a sink neither."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return all(part._supports_sdpa and part._supports_attention_backend for part in parts)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H, T, d), key (B, G, S, d), value (B, G, S, e), G dividing H; mask (B, 1, T, S) that is added, or None.

    Returns (B, T, H, e), in the dtype of the query. A bias by position, dropout and long rows go to SDPA.
    """
    if key.shape[2] > LONG or dropout or kwargs.get("position_bias") is not None or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, heads, width, size = query.shape
    groups, seen = key.shape[1], key.shape[2]
    # The scale goes to the queries, of which there are fewer than scores.
    rows = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, groups, -1, size)
    scores = (rows @ key.transpose(2, 3)).view(batch, groups, -1, width, seen) + attention_mask[:, :, None]
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    mixed = weights.view(batch, groups, -1, seen) @ value
    return mixed.view(batch, heads, width, -1).transpose(1, 2), None
