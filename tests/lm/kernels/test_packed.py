"""Packed linear layers against plain ones, and that nothing stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.kernels import Processor, processor
from private_rlhf.lm.kernels.linear_layers import packed_linears, speed_up, speed_up_products
from private_rlhf.lm.kernels.token_terms import token_logprobs
from torch import nn

BOTH = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not processor().bfloat16, reason=processor().why)),
        torch.float32,
    ],
)


@pytest.fixture(autouse=True)
def _packs_both(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that packs float32 weights as well, whatever this one is."""
    if not processor().onednn:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr("private_rlhf.lm.kernels.processor", lambda: Processor(processor().bfloat16, "", True, True))


@torch.no_grad()
@BOTH
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_packed_layers_compute_the_same_and_are_plain_again_afterwards(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 32, bias=False)).to(dtype)
    speed_up_products(model)
    x = torch.randn(rows, 3, 48).to(dtype)
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
@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_layers_under_lora_compute_the_same_in_one_product(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96, bias=bias), nn.Tanh(), nn.Linear(96, 32, bias=bias)).to(dtype)
    speed_up_products(model)
    peft = speed_up(get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)))
    x = torch.randn(5, 1, 48).to(dtype)
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


def test_other_layers_and_an_error_within_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with packed_linears(model, 1):
        assert ["forward" in layer.__dict__ for layer in model] == [True, False]
    with pytest.raises(RuntimeError), packed_linears(model, 1):
        model(torch.zeros(2, 5))
    assert "forward" not in model[0].__dict__
    for slow in (Processor(True, "", True, False), Processor(False, "", True, False), Processor(True, "", False, True)):
        monkeypatch.setattr("private_rlhf.lm.kernels.processor", lambda slow=slow: slow)
        with packed_linears(model, 1):
            assert not any("forward" in layer.__dict__ for layer in model)


@BOTH
def test_responses_are_likely_under_the_model(small: Any, dtype: torch.dtype) -> None:
    """Sampling with packed weights draws from the model itself: nearly greedy draws are its most likely tokens."""
    model = speed_up_products(copy.deepcopy(small).to(dtype).eval())
    prompt = [3, 4]
    rows = sample_responses(
        model, [prompt] * 4, [0, 1, 2, 3], Sampling(5, temperature=1e-4), pad_token_id=0, eos_token_id=1, batch_size=4
    )
    for row in rows:
        for length in range(len(row)):
            logits = model(torch.tensor([[*prompt, *row[:length]]])).logits[:, -1]
            best = token_logprobs(logits, logits.argmax(-1))
            assert token_logprobs(logits, torch.tensor([row[length]])) >= best - 0.05
