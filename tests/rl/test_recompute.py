"""Gradient checkpointing in evaluation mode: layers run again in the backward pass, and gradients are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.logprobs import PolicyWithValue, token_batch
from private_rlhf.lm.models import add_lora, recompute_layers
from private_rlhf.recipe import LoraSettings
from support.ppo_problem import Problem


def policy(problem: Problem, lora: bool) -> PolicyWithValue:
    base = copy.deepcopy(problem.model).requires_grad_(not lora)
    inner = add_lora(base, LoraSettings(rank=4), 0) if lora else base
    for name, parameter in inner.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return PolicyWithValue(inner, base.config.hidden_size).eval()


def learn(model: PolicyWithValue) -> tuple[int, dict[str, torch.Tensor]]:
    """How often the first layer's MLP ran in a forward and backward pass, and the gradients."""
    runs: list[int] = []
    handle = model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    batch = token_batch([[3, 4], [5, 6, 7]], [[2, 1], [6]], 0, torch.device("cpu"))
    logprobs, values, _ = model(batch)
    (logprobs.sum() + (values - 1).square().sum()).backward()
    handle.remove()
    return len(runs), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_layers_run_twice_and_gradients_are_equal(problem: Problem, lora: bool) -> None:
    torch.manual_seed(0)
    plain = policy(problem, lora)
    checkpointed = copy.deepcopy(plain)
    recompute_layers(checkpointed.get_base_model())
    assert not checkpointed.training
    once, expected = learn(plain)
    twice, found = learn(checkpointed)
    assert (once, twice) == (1, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.01


def test_sampling_runs_each_layer_once_and_keeps_its_cache(problem: Problem) -> None:
    plain, checkpointed = policy(problem, False), policy(problem, False)
    recompute_layers(checkpointed.get_base_model())
    given: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "batch_size": 2}
    models = (checkpointed, plain)
    ours, theirs = (sample_responses(model, [[3, 4], [5]], [1, 2], Sampling(6), **given) for model in models)
    assert ours == theirs


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"^ppo\.gradient_checkpointing must be false for Linear"):
        recompute_layers(torch.nn.Linear(1, 1))
