"""Float32 linear layers by oneDNN, on x86 processors that are not Intel's.

PyTorch hands float32 products to MKL, which keeps its fastest kernels for Intel's processors. oneDNN, which PyTorch has
on board, goes by what a processor can do: with AVX2 alone it is level or a tenth faster, with AVX-512 up to twice as
fast. Nothing is rounded differently but the order of additions.
"""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.core.world import device_type
from private_rlhf.lm.kernels import runs
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., n), weight (m, n), bias (m,) -> x Wᵀ + bias, (..., m); by oneDNN where that is fit and preferred.

    Without derivatives where it goes to oneDNN: for use within a `torch.autograd.Function` or without gradients.
    """
    if not _fit(x, weight):
        return functional.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def product_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient (k, m), weight (m, n) -> gradient W, (k, n), as `product` does it."""
    return product(gradient, weight.t()) if _fit(gradient, weight) else gradient @ weight


def _fit(x: Tensor, weight: Tensor) -> bool:
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    return plain and runs("products") and type(weight.data) is Tensor and x.numel() > 0


class _Linear(torch.autograd.Function):
    """x Wᵀ + bias with all three products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., n), weight (m, n) -> (..., m)."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, W and the bias."""
        x, weight = ctx.saved_tensors
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        needed = ctx.needs_input_grad
        grad_x = product_back(flat, weight).view_as(x) if needed[0] else None
        grad_weight = product(flat.t(), rows.t()) if needed[1] else None
        return grad_x, grad_weight, flat.sum(dim=0) if needed[2] else None


class OneDnnLinear(nn.Linear):
    """`nn.Linear` with its float32 products by oneDNN; made by `speed_up_products`, never built."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`; under autocast, on other devices and in other dtypes that one's own."""
        if torch.is_autocast_enabled(input.device.type) or not _fit(input, self.weight):
            return super().forward(input)
        if not torch.is_grad_enabled():
            return product(input, self.weight, self.bias)
        result: Tensor = _Linear.apply(input, self.weight, self.bias)
        return result


def speed_up_products(model: Any) -> Any:
    """Gives the ordinary linear layers of `model` the float32 products of this module where those are preferred, in
    place; returns it. First derivatives only.
    """
    if runs("products", device_type()):
        for module in model.modules():
            if type(module) is nn.Linear and module.weight.dtype == torch.float32:
                module.__class__ = OneDnnLinear
    return model
