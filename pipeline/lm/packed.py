"""Linear layers whose weights oneDNN has packed beforehand, for decoding on CPUs.

A step of decoding multiplies a few rows by every weight. Without this PyTorch's bfloat16 linear lays each weight out
anew for the processor's matrix units at every call, which takes several times as long as the product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def packed_linears(model: Any, rows: int) -> Iterator[None]:
    """Within, the bfloat16 linear layers of `model` on a CPU use packed copies of their weights; no gradients.

    The copies take as much memory as those weights, and are of the weights on entry: nothing may learn within, and the
    model cannot be copied.

    Args:
        model: whose layers; float32 ones, which gain little, and those on other devices stay as they are.
        rows: rows of most products, e.g. responses decoded together.
    """
    layers = [module for module in model.modules() if _packable(module)]
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
            layer.forward = functools.partial(_forward, weight, layer.bias)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packable(module: nn.Module) -> bool:
    """Whether `module` is an ordinary linear layer that this processor can run packed."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight.data) is torch.Tensor
        and module.weight.shape == (module.out_features, module.in_features)  # whole, not split over processes
        and module.weight.dtype == torch.bfloat16
        and not torch.is_autocast_enabled("cpu")
        and module.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _forward(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
