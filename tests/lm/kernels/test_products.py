"""Float32 products by oneDNN against PyTorch's own: values, gradients, what is left alone, and when it is chosen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.lm.kernels import Processor, linear_layers, processor
from private_rlhf.lm.kernels.linear_layers import LoraLinear, OneDnnLinear, product, speed_up, speed_up_products
from torch import nn


@pytest.fixture
def onednn(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is not Intel's, whatever this one is."""
    if not processor().onednn:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr("private_rlhf.lm.kernels.processor", lambda: Processor(False, "", onednn=True, slow_mkl=True))


def networks(bias: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Tanh(), nn.Linear(40, 8, bias=bias))
    return plain, speed_up_products(copy.deepcopy(plain))


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of x and of every trained tensor."""
    x = x.clone().requires_grad_(True)
    output = model(x)
    output.square().sum().backward()
    return [output, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (24,), (1, 300, 24)])
def test_outputs_and_gradients_are_pytorchs(shape: tuple[int, ...], bias: bool) -> None:
    plain, ours = networks(bias)
    assert [type(layer) for layer in ours] == [OneDnnLinear, nn.Tanh, OneDnnLinear]
    x = torch.randn(shape)
    found, expected = results(ours, x), results(plain, x)
    assert len(found) == len(expected) == (6 if bias else 4)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), expected[0], atol=1e-5, rtol=1e-5)
    strided = torch.randn(24, 5).t()
    torch.testing.assert_close(ours(strided), plain(strided), atol=1e-5, rtol=1e-5)
    assert ours(torch.empty(0, 24)).shape == (0, 8)


@pytest.mark.usefixtures("onednn")
def test_frozen_weights_get_no_gradient_and_other_dtypes_are_left_alone() -> None:
    plain, ours = networks(True)
    for model in (plain, ours):
        model[0].requires_grad_(False)
    x = torch.randn(3, 24)
    for mine, other in zip(results(ours, x), results(plain, x), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert ours[0].weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    assert torch.equal(ours.double()(x.double()), plain.double()(x.double()))
    low = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    assert type(speed_up_products(low)[0]) is nn.Linear  # packed when decoding instead


@pytest.mark.usefixtures("onednn")
def test_under_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = networks(True)
    settings = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    adapted = []
    for model in (plain, ours):
        torch.manual_seed(1)
        adapted.append(speed_up(get_peft_model(model, settings)))
    assert all(type(adapted[1].base_model.model[i]) is LoraLinear for i in (0, 2))
    called = []
    original = linear_layers._fit
    monkeypatch.setattr(linear_layers, "_fit", lambda *tensors: called.append(original(*tensors)) or called[-1])
    x = torch.randn(5, 24)
    found = results(adapted[1], x)
    assert called
    assert all(called)
    monkeypatch.setattr(linear_layers, "_fit", lambda *_: False)
    for mine, other in zip(found, results(adapted[0], x), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_intel_s_processors_keep_mkl(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_rlhf.lm.kernels.processor", lambda: Processor(False, "", onednn=True, slow_mkl=False))
    plain = nn.Sequential(nn.Linear(2, 2))
    assert type(speed_up_products(plain)[0]) is nn.Linear
    x = torch.randn(3, 2)
    assert torch.equal(product(x, plain[0].weight, plain[0].bias), plain(x))
