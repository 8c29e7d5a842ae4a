"""The LoRA layer against peft's own: outputs, gradients, precision, and what it leaves to peft."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from private_rlhf.lm.kernels.linear_layers import LoraLinear, speed_up
from torch import nn

pytestmark = pytest.mark.usefixtures("kernels")


def pair(dtype: torch.dtype, bias: bool = True, **config: Any) -> tuple[Any, Any]:
    """Two equal models under LoRA with random B: peft's and ours."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias)).to(dtype)
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=["0", "2"], **config)
    peft = get_peft_model(plain, settings, autocast_adapter_dtype=dtype == torch.bfloat16)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return peft, speed_up(copy.deepcopy(peft))


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of x and of every trained tensor."""
    x = x.clone().requires_grad_(True)
    output = model(x)
    output.float().square().sum().backward()
    return [output, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (6,)])
def test_outputs_and_gradients_are_pefts(shape: tuple[int, ...], bias: bool) -> None:
    theirs, ours = pair(torch.float64, bias)
    assert sum(type(module) is LoraLinear for module in ours.modules()) == 2
    x = torch.randn(shape, dtype=torch.float64)
    found, expected = results(ours, x), results(theirs, x)
    assert len(found) == len(expected) == 6
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), expected[0], atol=1e-12, rtol=1e-12)


def test_on_bfloat16_weights_gradients_are_float32_and_near_those_of_float64() -> None:
    _, ours = pair(torch.bfloat16)
    exact = speed_up(copy.deepcopy(ours).double())
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = results(ours, x), results(exact, x.double())
    assert found[0].dtype == torch.bfloat16
    for mine, other in zip(found[2:], expected[2:], strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - other).norm() / other.norm()) < 0.02


def test_adapter_off_and_merged_are_pefts() -> None:
    theirs, ours = pair(torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert torch.equal(ours(x), theirs(x))
    before = ours(x)
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), before)


def test_what_it_cannot_do_is_left_to_peft() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    for config in ({"use_dora": True}, {"lora_bias": True}):
        theirs, ours = pair(torch.float64, **config)
        torch.testing.assert_close(ours(x), theirs(x))
    theirs, ours = pair(torch.float64, lora_dropout=0.5)
    assert not torch.equal(ours.train()(x), ours(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    theirs, ours = pair(torch.float64)
    for model in (theirs, ours):
        model.base_model.model[0].base_layer.weight.requires_grad_(True)
    for mine, other in zip(results(ours, x), results(theirs, x), strict=True):
        torch.testing.assert_close(mine, other)


def test_two_adapters_are_left_to_peft() -> None:
    theirs, ours = pair(torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    for model in (theirs, ours):
        torch.manual_seed(1)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
    assert type(ours.base_model.model[0]) is LoraLinear
    torch.testing.assert_close(ours(x), theirs(x))
    ours.base_model.set_adapter("default")
    assert not torch.allclose(ours(x), theirs(x))
    assert type(theirs.base_model.model[0]) is PeftLinear


def test_gradients_by_finite_differences() -> None:
    _, ours = pair(torch.float64)
    layer = ours.base_model.model[0]
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight

    def output(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"lora_A.default.weight": low, "lora_B.default.weight": high}, (x,))

    assert torch.autograd.gradcheck(output, (x, low.detach().requires_grad_(), high.detach().requires_grad_()))
