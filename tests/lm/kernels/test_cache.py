"""Keys and values in memory that is taken once: what decoding reads is what the growing cache holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_rlhf.lm.kernels.attention import RoomyLayer, use_grouped_attention, with_room
from transformers import DynamicCache


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("grouped", [False, True])
@torch.no_grad()
def test_decoding_is_that_of_the_growing_cache(small: Any, grouped: bool) -> None:
    model = use_grouped_attention(small) if grouped else small
    prompts, mask = torch.tensor([[3, 4, 5], [0, 6, 2]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    growing, filled = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for cache in (growing, filled):
        model(prompts, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    paths = torch.tensor([[0, 1, 2], [3, 4, 5]])
    with_room(filled, paths, room=4)
    assert all(isinstance(layer, RoomyLayer) for layer in filled.layers)
    assert filled.get_seq_length() == 3
    for step in range(4):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], dim=1)
        tokens, positions = torch.tensor([[2 + step], [5]])[: len(mask)], positions[:, -1:] + 1
        how = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        found, expected = (model(tokens, past_key_values=cache, **how).logits for cache in (filled, growing))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        if step == 1:  # the first response has ended
            kept = torch.tensor([1])
            mask, positions = mask[kept], positions[kept]
            for cache in (filled, growing):
                cache.batch_select_indices(kept)
    assert filled.get_seq_length() == growing.get_seq_length() == 7


def test_sequences_take_their_columns_from_shared_rows() -> None:
    cache = DynamicCache()
    states = torch.arange(2 * 3 * 4.0).view(1, 2, 4, 3)
    cache.update(states, -states, 0)
    with_room(cache, torch.tensor([[0, 1], [0, 3]]), room=2)
    layer = cache.layers[0]
    assert layer.keys.shape == (2, 2, 4, 3)
    assert torch.equal(layer.keys[1, :, :2], states[0][:, [0, 3]])
    assert torch.equal(layer.values, -layer.keys)
    assert not layer.keys[:, :, 2:].any()
