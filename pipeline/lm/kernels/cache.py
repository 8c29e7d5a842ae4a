"""Keys and values of a known length to come, in memory that is taken once.

transformers' own dynamic cache is copied into new memory at every token that is decoded. Here attention always sees the
whole memory, and the mask hides what is still to come, so that nothing is copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """One layer's keys and values (B, G, S, d), of which the first `length` are known and the rest 0."""

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
