"""Attention on CPUs with grouped queries, each key and value read once, and a cache whose memory is taken once.

Most decoders have fewer keys and values than queries (SmolLM2: 3 for 9). transformers copies each for every query that
reads it; PyTorch's fused attention is slow on CPUs for a single query (decoding) and for bfloat16 gradients. Here the
queries of a group become further rows of one product: the same sums, softmax in float32 as in transformers' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from private_rlhf.core.world import device_type
from private_rlhf.lm.kernels import runs
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

NAME = "grouped"
LONG = 1024
"""Keys from which on the fused attention is taken, whose memory does not grow with their square."""


def use_grouped_attention(model: Any) -> Any:
    """Gives a model this attention where the kernel runs and the model is fit for it; returns it."""
    device = device_type()  # of the run: models are loaded on the CPU and moved later
    if isinstance(model, PreTrainedModel) and runs("attention", device) and _fit(model):
        _register()
        model.set_attn_implementation(NAME)
    return model


def _register() -> None:
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, eager_mask)


@contextlib.contextmanager
def grouped_queries(config: Any) -> Iterator[None]:
    """Within, the model of `config` has this attention, on any device: fused attention copies keys for a mask."""
    _register()
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before


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
    long = key.shape[2] > LONG and query.shape[2] > 1
    if long or dropout or kwargs.get("position_bias") is not None or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, heads, width, size = query.shape
    groups, length = key.shape[1], key.shape[2]
    # The scale goes to the queries, of which there are fewer than scores.
    rows = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, groups, -1, size)
    scores = (rows @ key.transpose(2, 3)).view(batch, groups, -1, width, length) + attention_mask[:, :, None]
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    mixed = weights.view(batch, groups, -1, length) @ value
    return mixed.view(batch, heads, width, -1).transpose(1, 2), None


class RoomyLayer(DynamicLayer):
    """One layer's keys and values (B, G, S, d), of which the first `length` are known and the rest 0.

    transformers' dynamic cache is copied into new memory at every token. Here attention sees the whole memory, and the
    mask hides what is still to come. column: (1,) int64, where the next token goes, if the device counts.
    """

    column: Tensor | None = None

    def __init__(self, keys: Tensor, values: Tensor, room: int) -> None:
        """keys, values: (B, G, L, d) so far, which are copied; room: tokens still to come."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        shape = (*keys.shape[:2], keys.shape[2] + room)
        self.keys, self.values = keys.new_zeros(*shape, keys.shape[3]), values.new_zeros(*shape, values.shape[3])
        self.length = 0
        self.update(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds the states of the next tokens (B, G, T, d); returns the whole memory."""
        if self.column is not None:
            for memory, states in ((self.keys, key_states), (self.values, value_states)):
                memory.index_copy_(2, self.column, states)  # type: ignore[union-attr]
            return self.keys, self.values  # type: ignore[return-value]
        new = slice(self.length, self.length + key_states.shape[2])
        self.keys[:, :, new], self.values[:, :, new] = key_states, value_states  # type: ignore[index]
        self.length = new.stop
        return self.keys, self.values  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention sees, from which on."""
        return self.keys.shape[2], 0  # type: ignore[union-attr]


def with_room(cache: Any, paths: Tensor, room: int) -> Any:
    """The cache of rows (R, G, T, d) as one of sequences (B, G, L, d), whose columns, counted over all R·T, are `paths`
    (B, L); in place. room: tokens still to come.
    """

    def of_sequences(states: Tensor) -> Tensor:
        return states.transpose(1, 2).flatten(0, 1)[paths].transpose(1, 2)

    for number, layer in enumerate(cache.layers):
        cache.layers[number] = RoomyLayer(of_sequences(layer.keys), of_sequences(layer.values), room)
    return cache
