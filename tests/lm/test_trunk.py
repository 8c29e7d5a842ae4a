"""Leaving out the frozen layers below an adapter: same numbers, same gradients, and only where that is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import (
    SCALES_EMBEDDINGS,
    frozen_layers,
    record_states,
    response_forward,
    skip_layers,
    token_batch,
)
from private_rlhf.lm.models import add_lora
from private_rlhf.lm.rows import FAMILIES, sharing_of
from private_rlhf.recipe import LoraSettings
from transformers import AutoConfig, AutoModelForCausalLM

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 7], [5, 9, 7], [5, 8]]
RESPONSES = [[11, 12, 2], [11, 2], [20, 21, 2]]


def adapted(family: str, last: int | None, **more: Any) -> Any:
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"sliding_window": None, **more},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        names = ["o_proj", "down_proj"]
        model = add_lora(base, LoraSettings(rank=2, last_layers=last, target_modules=names), 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", sorted(FAMILIES - SCALES_EMBEDDINGS))
def test_log_probabilities_and_gradients_are_those_of_the_whole_model(family: str) -> None:
    model = adapted(family, last=2)
    layers = frozen_layers(model)
    assert layers == 1
    batch = token_batch(PROMPTS, RESPONSES, 0, CPU, sharing=sharing_of(model))
    with record_states(model, layers) as states:
        whole = token_logprobs(response_forward(model, batch)[0], batch.tokens)
    whole.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(states) == 1
    above = token_logprobs(response_forward(model, batch.above(layers, states[0]))[0], batch.tokens)
    assert torch.equal(above, whole)
    above.sum().backward()
    assert gradients
    for name, gradient in gradients.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name
    assert len(model.get_base_model().get_decoder().layers) == 3


@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_states_go_from_one_make_up_of_rows_to_another() -> None:
    model = adapted("llama", last=1)
    sharing, layers = sharing_of(model), frozen_layers(model)
    together = token_batch(PROMPTS, RESPONSES, 0, CPU, sharing=sharing)
    with record_states(model, layers) as states:
        expected = together.spread(token_logprobs(response_forward(model, together)[0], together.tokens))
    kept = together.states_of(states[0])
    assert [len(part) for part in kept] == [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for picked in ([2, 0], [1], [0, 1, 2]):
        batch = token_batch([PROMPTS[i] for i in picked], [RESPONSES[i] for i in picked], 0, CPU, sharing=sharing)
        batch = batch.above(layers, batch.placed([kept[i] for i in picked]))
        found = batch.spread(token_logprobs(response_forward(model, batch)[0], batch.tokens))
        torch.testing.assert_close(found, expected[picked, : found.shape[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_only_layers_that_learn_nothing_are_left_out() -> None:
    assert frozen_layers(adapted("llama", last=None)) == 0
    assert frozen_layers(adapted("llama", last=3)) == 0
    assert frozen_layers(adapted("llama", last=1)) == 2
    assert frozen_layers(adapted("gemma", last=1)) == 0  # it scales what stands for embeddings
    assert frozen_layers(adapted("mistral", last=1, sliding_window=4)) == 0
    learning = adapted("llama", last=1)
    learning.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    assert frozen_layers(learning) == 0


def test_an_error_within_leaves_the_model_whole() -> None:
    model = adapted("llama", last=1)
    with pytest.raises(RuntimeError), skip_layers(model, 2):
        raise RuntimeError
    with record_states(model, 0) as states:
        model(torch.tensor([[3, 4]]))
    assert not states
    assert len(model.get_base_model().get_decoder().layers) == 3
