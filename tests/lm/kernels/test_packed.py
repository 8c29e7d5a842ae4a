"""Packed linear layers against plain ones, and that nothing stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.kernels import Processor, processor
from private_rlhf.lm.kernels.linear_layers import packed_linears, speed_up
from private_rlhf.lm.kernels.token_terms import token_logprobs
from torch import nn

pytestmark = pytest.mark.usefixtures("kernels")
needs_bfloat16 = pytest.mark.skipif(not processor().bfloat16, reason=processor().why)


@torch.no_grad()
@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_packed_layers_compute_the_same_and_are_plain_again_afterwards(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 32, bias=False)).to(torch.bfloat16)
    x = torch.randn(rows, 3, 48).to(torch.bfloat16)
    plain = model(x)
    with packed_linears(model, 16):
        assert all("forward" in model[i].__dict__ for i in (0, 2))
        packed = model(x)
        with packed_linears(model, 16):  # inside another: packed once
            assert torch.equal(model(x), packed)
        assert "forward" in model[0].__dict__
    torch.testing.assert_close(packed.float(), plain.float(), atol=2e-2, rtol=2e-2)
    model[0].weight.add_(1.0)
    assert not torch.equal(model(x), plain)
    assert not any("forward" in module.__dict__ for module in model.modules())


@torch.no_grad()
@needs_bfloat16
@pytest.mark.parametrize("bias", [True, False])
def test_layers_under_lora_compute_the_same_in_one_product(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96, bias=bias), nn.Tanh(), nn.Linear(96, 32, bias=bias)).to(torch.bfloat16)
    peft = speed_up(get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)))
    x = torch.randn(5, 1, 48).to(torch.bfloat16)
    with peft.disable_adapter():
        plain = peft(x)
        with packed_linears(peft, 5):  # the bare layers
            torch.testing.assert_close(peft(x).float(), plain.float(), atol=2e-2, rtol=2e-2)
    adapted = peft(x)
    assert (adapted - plain).abs().max() > 0.2
    layers = [peft.base_model.model[i] for i in (0, 2)]
    with packed_linears(peft, 5):
        packed = peft(x)
        assert ["forward" in layer.__dict__ for layer in layers] == [True, True]
        assert not any("forward" in layer.base_layer.__dict__ for layer in layers)  # not a second copy
        with packed_linears(peft, 5):  # inside another: packed once
            assert torch.equal(peft(x), packed)
            assert not any("forward" in layer.base_layer.__dict__ for layer in layers)
        assert torch.equal(peft(x), packed)
    torch.testing.assert_close(packed.float(), adapted.float(), atol=2e-2, rtol=2e-2)
    layers[0].lora_B["default"].weight.zero_()
    assert not torch.equal(peft(x), adapted)


@needs_bfloat16
def test_other_layers_and_an_error_within_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4))
    with packed_linears(model, 1):
        assert ["forward" in layer.__dict__ for layer in model] == [True, False]
    with pytest.raises(RuntimeError), packed_linears(model, 1):
        model(torch.zeros(2, 5, dtype=torch.bfloat16))
    assert "forward" not in model[0].__dict__
    monkeypatch.setattr("private_rlhf.lm.kernels.processor", lambda: Processor(False, ""))
    with packed_linears(model, 1):
        assert not any("forward" in layer.__dict__ for layer in model)


@needs_bfloat16
def test_responses_are_likely_under_the_model(small: Any) -> None:
    """Sampling with packed weights draws from the model itself: nearly greedy draws are its most likely tokens."""
    model = copy.deepcopy(small).to(torch.bfloat16).eval()
    prompt = [3, 4]
    rows = sample_responses(
        model, [prompt] * 4, [0, 1, 2, 3], Sampling(5, temperature=1e-4), pad_token_id=0, eos_token_id=1, batch_size=4
    )
    for row in rows:
        for length in range(len(row)):
            logits = model(torch.tensor([[*prompt, *row[:length]]])).logits[:, -1]
            best = token_logprobs(logits, logits.argmax(-1))
            assert token_logprobs(logits, torch.tensor([row[length]])) >= best - 0.05
