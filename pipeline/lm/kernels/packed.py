"""Linear layers whose weights oneDNN has packed beforehand, for decoding on CPUs.

A step of decoding multiplies a few rows by every weight. Without this each weight is laid out anew for the processor's
vector or matrix units at every call, which can take longer than the product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.kernels.cpu import processor
from private_rlhf.lm.kernels.lora import LoraLinear
from private_rlhf.lm.kernels.products import OneDnnLinear
from torch import nn


@contextlib.contextmanager
def packed_linears(model: Any, rows: int) -> Iterator[None]:
    """Within, the linear layers of `model` on a CPU use packed copies of their weights; no gradients.

    A layer under a LoRA adapter has A packed below its weight, so that one product reads the input for both, and casts
    its adapter once instead of at every call.

    The copies take as much memory as those weights, and are of the weights on entry: nothing may learn within, and the
    model cannot be copied.

    Args:
        model: whose layers; those that the kernel does not fit stay as they are.
        rows: rows of most products, e.g. responses decoded together.
    """
    replaced: list[nn.Module] = []
    try:
        for layer, forward in _packed_forwards(model, rows):
            layer.forward = forward
            replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)


def _packed_forwards(model: Any, rows: int) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    """The layers that can be packed, each with its forward pass."""
    adapted = set()
    for module in model.modules():
        adapter = module.rounded_adapter() if isinstance(module, LoraLinear) else None
        base: Any = module.get_base_layer() if adapter else module
        if base in adapted:
            continue
        if adapter is not None:
            adapted.add(base)
        if "forward" in module.__dict__ or not _packable(base):
            continue
        if adapter is None:
            yield module, functools.partial(_forward, _packed(base.weight, rows), base.bias)
            continue
        low, high = adapter
        weight = _packed(torch.cat([base.weight, low]), rows)
        bias = None if base.bias is None else torch.cat([base.bias, base.bias.new_zeros(len(low))])
        yield module, functools.partial(_adapted_forward, weight, bias, high.t().contiguous())


def _packed(weight: torch.Tensor, rows: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return packed


def _packable(module: nn.Module) -> bool:
    """Whether `module` is an ordinary linear layer that this processor runs faster packed."""
    if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, OneDnnLinear):
        return False
    weight = module.weight
    whole = type(weight.data) is torch.Tensor and weight.shape == (module.out_features, module.in_features)
    fast = {torch.bfloat16: processor().bfloat16, torch.float32: runs("products")}.get(weight.dtype, False)
    return whole and fast and runs("packed", weight.device.type) and not torch.is_autocast_enabled("cpu")


def _forward(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _adapted_forward(
    weight: torch.Tensor, bias: torch.Tensor | None, high: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """x (..., n), packed weight (m + r, n) with A below, high (r, m) -> (..., m)."""
    both = _forward(weight, bias, x).view(-1, len(high) + high.shape[1])
    result, inner = both.split((high.shape[1], len(high)), dim=1)
    return torch.addmm(result, inner, high).view(*x.shape[:-1], -1)
