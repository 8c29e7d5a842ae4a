"""Float32 linear layers by oneDNN, on processors where PyTorch's own are slow.

PyTorch hands float32 products to MKL, which keeps its AVX-512 kernels for Intel's processors; on others it runs at half
of their speed or less. oneDNN, which PyTorch has on board, goes by what a processor can do. Nothing is rounded
differently but the order of additions.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

SWITCH = "PRIVATE_RLHF_FP32_PRODUCTS"
"""Environment variable: `onednn` or `torch`; without it, what the processor is decides."""


@functools.cache
def prefers_onednn() -> bool:
    """Whether float32 products of this process go to oneDNN. Decided once, by no measurement: results repeat.

    Raises:
        ValueError: the environment variable has another value.
    """
    chosen = os.environ.get(SWITCH, "")
    if chosen not in ("", "onednn", "torch"):
        raise ValueError(f"{SWITCH} is 'onednn' or 'torch', not {chosen!r}")
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return chosen == "onednn" if chosen else torch.backends.mkl.is_available() and mkl_is_slow(_processor())


def mkl_is_slow(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo tells of AVX-512 that MKL will not use."""
    facts = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    return named.get("vendor_id", "GenuineIntel") != "GenuineIntel" and "avx512f" in named.get("flags", "").split()


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return ""


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
    return plain and prefers_onednn() and type(weight.data) is Tensor and x.numel() > 0


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
    if prefers_onednn():
        for module in model.modules():
            if type(module) is nn.Linear and module.weight.dtype == torch.float32:
                module.__class__ = OneDnnLinear
    return model
