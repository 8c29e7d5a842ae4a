"""Grouped attention against transformers' own: values, gradients, and what is left to PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_rlhf.lm.kernels import attention
from private_rlhf.lm.kernels.attention import NAME, grouped_attention, use_grouped_attention
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

HEADS, GROUPS, SIZE = 6, 2, 8
LAYER: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False, is_causal=True)


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, queries, SIZE), (2, GROUPS, keys, SIZE), (2, GROUPS, keys, SIZE))
    made = [torch.randn(shape, generator=draw).to(dtype).requires_grad_(True) for shape in shapes]
    hidden = torch.ones(queries, keys).tril(keys - queries) == 0
    mask = torch.zeros(2, 1, queries, keys, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    mask[1, :, :, 0] = torch.finfo(dtype).min if queries == 1 else 0
    return (*made, mask)


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (7, 7), (3, 9)])
@pytest.mark.parametrize("scaling", [SIZE**-0.5, 0.7])
def test_values_and_gradients_are_those_of_transformers(queries: int, keys: int, scaling: float) -> None:
    found, expected = [], []
    for function, results in ((grouped_attention, found), (eager_attention_forward, expected)):
        query, key, value, mask = inputs(queries, keys)
        output = function(LAYER, query, key, value, mask, scaling=scaling)[0]
        assert output.shape == (2, queries, HEADS, SIZE)
        (output * torch.arange(SIZE)).sum().backward()
        results += [output, query.grad, key.grad, value.grad]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_values_may_be_narrower_than_keys() -> None:
    """DeepSeek's are."""
    query, key, value, mask = inputs(3, 9)
    ours, theirs = (
        function(LAYER, query, key, value[..., :5], mask, scaling=0.7)[0]
        for function in (grouped_attention, eager_attention_forward)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    query, key, value, mask = inputs(7, 7, torch.bfloat16)
    exact = eager_attention_forward(LAYER, query.float(), key.float(), value.float(), mask.float(), scaling=0.7)[0]
    theirs = eager_attention_forward(LAYER, query, key, value, mask, scaling=0.7)[0].float()
    ours = grouped_attention(LAYER, query, key, value, mask, scaling=0.7)[0].float()
    assert (ours - exact).abs().max() < 1.5 * (theirs - exact).abs().max()


def test_long_rows_and_dropout_go_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **how: called.append(how) or (None, None))
    query, key, value, mask = inputs(7, 7)
    grouped_attention(LAYER, query, key, value, mask)
    assert not called
    grouped_attention(LAYER, query, key, value, mask, dropout=0.1)
    grouped_attention(LAYER, query, key, value, mask, position_bias=torch.zeros(1))
    monkeypatch.setattr(attention, "LONG", 6)
    grouped_attention(LAYER, query, key, value, mask)
    assert len(called) == 3


@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_a_model_computes_the_same(small: LlamaForCausalLM) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 2], [0, 0, 7, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    before = small(ids, attention_mask=mask).logits
    assert use_grouped_attention(small).config._attn_implementation == NAME
    after = small(ids, attention_mask=mask).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-5, rtol=1e-5)
    assert NAME not in small.config.to_json_string()  # no checkpoint asks others for it


@pytest.mark.usefixtures("kernels")
def test_models_with_another_attention_keep_theirs() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    capped = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    for config in (capped, GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2)):
        model = AutoModelForCausalLM.from_config(config)
        kept = model.config._attn_implementation
        use_grouped_attention(model)
        assert model.config._attn_implementation in (kept, NAME)
        assert (model.config._attn_implementation == NAME) == model._supports_sdpa
    assert not AutoModelForCausalLM.from_config(capped)._supports_sdpa
    plain = torch.nn.Linear(2, 2)
    assert use_grouped_attention(plain) is plain
