"""Log-probabilities against one row at a time; KL against enumeration; the value head."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from private_rlhf.lm.kernels.token_terms import token_kl, token_logprobs
from private_rlhf.lm.logprobs import PolicyWithValue, response_forward, token_batch
from private_rlhf.lm.rows import Sharing
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

CPU = torch.device("cpu")
ALWAYS = Sharing(price=10**9, columns=0)
PROMPTS = [[3, 4], [5], [2, 6, 7, 3, 4, 0], [7, 7, 7]]
RESPONSES = [[5, 1], [0, 0, 6, 1], [1], [2, 3, 4, 5, 6]]


@torch.no_grad()
def alone(model: Any, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """No padding, no position ids, no `logits_to_keep`: the plain model on one row."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(response)), torch.tensor(response)]


def absolute() -> GPT2LMHeadModel:
    """A model with learned positions: unlike Llama's rotary ones, they do not forgive a shift by left padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
        return GPT2LMHeadModel(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "rotary"), [(1.0, True), (0.7, True), (1.0, False)])
def test_padding_and_batch_composition_do_not_change_logprobs(small: Any, temperature: float, rotary: bool) -> None:
    small = small if rotary else absolute()
    for picked in ([0, 1, 2, 3], [2, 0], [3], [1, 3, 1]):
        batch = token_batch([PROMPTS[i] for i in picked], [RESPONSES[i] for i in picked], 0, CPU)
        logits, states = response_forward(small, batch)
        assert len(logits) == len(states) == sum(len(RESPONSES[i]) for i in picked)
        found = batch.spread(token_logprobs(logits, batch.tokens, temperature))
        assert found.dtype == torch.float32
        for row, index in enumerate(picked):
            length = len(RESPONSES[index])
            expected = alone(small, PROMPTS[index], RESPONSES[index], temperature)
            torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=0)
            assert not found[row, length:].any()
            assert batch.response_mask[row].tolist() == [1] * length + [0] * (found.shape[1] - length)


@pytest.mark.parametrize("rotary", [True, False])
def test_responses_that_share_rows_change_nothing(small: Any, rotary: bool) -> None:
    model = (small if rotary else absolute()).requires_grad_(True)
    picked = [(0, 1), (0, 3), (0, 2), (2, 0), (2, 1), (1, 3)]
    prompts, responses = [PROMPTS[p] for p, _ in picked], [RESPONSES[r] for _, r in picked]
    batch = token_batch(prompts, responses, 0, CPU, sharing=ALWAYS)
    assert batch.rows.input_ids.numel() < sum(map(len, prompts + responses))
    assert len(token_batch(prompts, responses, 0, CPU).rows.input_ids) == 6
    logits, states = response_forward(model, batch)
    found = batch.spread(token_logprobs(logits, batch.tokens))
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        torch.testing.assert_close(found[row, : len(response)], alone(model, prompt, response, 1.0), atol=1e-5, rtol=0)
    found.sum().backward()
    shared = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    each = states.split([len(response) for response in responses])
    for row in range(len(picked)):
        single = token_batch(prompts[row : row + 1], responses[row : row + 1], 0, CPU)
        logits, alone_states = response_forward(model, single)
        torch.testing.assert_close(each[row], alone_states, atol=1e-5, rtol=0)
        token_logprobs(logits, single.tokens).sum().backward()
    plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(plain) == len(shared) > 5
    for ours, theirs in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    model.requires_grad_(False)


def test_rows_are_as_wide_as_the_longest_prompt_with_its_response() -> None:
    batch = token_batch([[3] * 6, [4]], [[5], [6] * 6], 0, CPU)
    assert batch.rows.input_ids.shape == (2, 7)
    assert batch.rows.input_ids.tolist()[1] == [4, *[6] * 6]
    with pytest.raises(ValueError, match="must have tokens"):
        token_batch([[]], [[5]], 0, CPU)


@torch.no_grad()
def test_a_response_without_tokens_has_log_probability_0(small: Any) -> None:
    for prompts in ([[3, 4], [5, 6]], [[3, 4], [3, 4]]):
        batch = token_batch(prompts, [[], [5, 1]], 0, CPU, sharing=ALWAYS)
        found = batch.spread(token_logprobs(response_forward(small, batch)[0], batch.tokens))
        assert found[0].tolist() == [0, 0]
        torch.testing.assert_close(found[1], alone(small, prompts[1], [5, 1], 1.0), atol=1e-5, rtol=0)


SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.3), Gemma2ForCausalLM),
        (CohereConfig(**SIZES, logit_scale=0.25), CohereForCausalLM),
        (GraniteConfig(**SIZES, logits_scaling=4.0), GraniteForCausalLM),
        (
            FalconH1Config(**SIZES, num_key_value_heads=1, head_dim=8, lm_head_multiplier=0.04, mamba_d_ssm=16,
                           mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8),
            FalconH1ForCausalLM,
        ),
    ],
)  # fmt: skip
def test_what_a_model_does_to_its_logits_is_done(config: Any, model_class: Any) -> None:
    torch.manual_seed(0)
    config.pad_token_id = 0
    model = model_class(config).eval()
    batch = token_batch([PROMPTS[0]], [RESPONSES[1]], 0, CPU)
    expected = model(batch.rows.input_ids).logits[0, 1:-1]
    torch.testing.assert_close(response_forward(model, batch)[0], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_token_kl_summed_over_enumerated_responses_is_the_sequence_kl(small: Any) -> None:
    """E_π Σ_t KL_t = Σ π log(π/π_ref), over all responses of two tokens."""
    other = type(small)(small.config).eval()
    rows = [list(pair) for pair in itertools.product(range(8), repeat=2)]
    batch = token_batch([[3, 4]] * len(rows), rows, 0, CPU)
    logits, _ = response_forward(small, batch)
    reference, _ = response_forward(other, batch)
    policy = batch.spread(token_logprobs(logits, batch.tokens)).double().sum(1)
    base = batch.spread(token_logprobs(reference, batch.tokens)).double().sum(1)
    exact = (policy.exp() * (policy - base)).sum()
    per_token = token_kl(logits, reference)
    assert (per_token >= -1e-6).all()
    assert float((policy.exp() * batch.spread(per_token).double().sum(1)).sum()) == pytest.approx(
        float(exact), rel=1e-4
    )
    assert float(exact) > 0.05
    assert not token_kl(logits, logits).any()


def test_the_value_head_starts_at_zero_and_does_not_reach_the_policy(small: Any) -> None:
    model = PolicyWithValue(small, 64)
    batch = token_batch(PROMPTS, RESPONSES, 0, CPU)
    logprobs, values, entropy = model(batch)
    assert logprobs.shape == values.shape == batch.response_ids.shape
    assert not values.any()
    assert entropy is None
    assert model(batch, 1.0, entropy=True)[2].shape == values.shape
    (values - 1).square().sum().backward()
    assert model.value_head.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in small.parameters())


@torch.no_grad()
def test_values_are_those_of_the_state_before_each_token(small: Any) -> None:
    """V_t may know the prompt and the tokens before t, never token t."""
    model = PolicyWithValue(small, 64)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    values = [model(token_batch([[3, 4]], [[5, last]], 0, CPU))[1] for last in (2, 6)]
    assert torch.equal(values[0], values[1])
    changed = model(token_batch([[3, 4]], [[6, 2]], 0, CPU))[1]
    assert changed[0, 0] == values[0][0, 0]
    assert changed[0, 1] != values[0][0, 1]
