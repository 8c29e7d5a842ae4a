"""Linear layers: LoRA in the dtype of its base, and weights packed for decoding.

LoRA: peft casts each input to float32, multiplies there, adds to the base's output and casts back: on bfloat16 weights
that costs more than the base layer. Here A and B are rounded to the base's dtype on use, as under autocast, and their
gradients are float32 again. First derivatives only.

Packing (CPUs): a step of decoding multiplies a few rows by every weight, and laying a weight out for the processor at
each call can take longer than the product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from private_rlhf.lm.kernels import runs
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional


class _AddLora(torch.autograd.Function):
    """x Wᵀ + bias + s·(x Aᵀ) Bᵀ, with gradients for x, A and B; W and the bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """x (..., n), weight (m, n), lora_a (r, n), lora_b (m, r) -> (..., m)."""
        low, high = lora_a.to(x.dtype), (scale * lora_b).to(x.dtype)
        inner = x.reshape(-1, x.shape[-1]) @ low.t()
        ctx.save_for_backward(x, weight, low, high, inner)
        ctx.scale, ctx.dtypes = scale, (lora_a.dtype, lora_b.dtype)
        return _with(functional.linear(x, weight, bias), inner, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, A and B."""
        saved: Any = ctx
        x, weight, low, high, inner = saved.saved_tensors
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        through = flat @ high
        needed = saved.needs_input_grad
        grad_x = (flat @ weight).addmm_(through, low).view_as(x) if needed[0] else None
        grad_a = (through.t() @ rows).to(saved.dtypes[0]) if needed[3] else None
        grad_b = (flat.t() @ inner).to(saved.dtypes[1]) * saved.scale if needed[4] else None
        return grad_x, None, None, grad_a, grad_b, None


def _with(result: torch.Tensor, inner: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`result` (..., m) with inner (n, r) @ highᵀ (r, m) added in place."""
    result.view(-1, result.shape[-1]).addmm_(inner, high.t())
    return result


class LoraLinear(PeftLinear):
    """peft's layer with the forward pass of this module; made by `speed_up`, never built."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As peft's; anything but one plain adapter on a frozen base goes to peft's."""
        base: Any = self.get_base_layer()
        name = None if args or kwargs else self._plain_adapter(x.device.type)
        if name is None or base.weight.dtype != x.dtype:
            return super().forward(x, *args, **kwargs)
        low, high, scale = self._matrices(name)
        if torch.is_grad_enabled():
            result: torch.Tensor = _AddLora.apply(x, base.weight, base.bias, low, high, scale)
            return result
        inner = x.reshape(-1, x.shape[-1]) @ low.to(x.dtype).t()
        return _with(base(x), inner, (scale * high).to(x.dtype))

    def rounded_adapter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A (r, n) and s·B (m, r) as `forward` uses them, in the dtype of the base; None where it goes to peft's."""
        base: Any = self.get_base_layer()
        name = self._plain_adapter(base.weight.device.type)
        if name is None:
            return None
        low, high, scale = self._matrices(name)
        return low.detach().to(base.weight.dtype), (scale * high.detach()).to(base.weight.dtype)

    def _matrices(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        adapter: Any = self.lora_A[name], self.lora_B[name]
        return adapter[0].weight, adapter[1].weight, self.scaling[name]

    def _plain_adapter(self, device: str) -> str | None:
        """The name of the one adapter that is at work here, if it is a plain one."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        at_work = not self.disable_adapters and not self.merged and len(active) == 1
        return active[0] if at_work and _plain(self, active[0], device) else None


def _plain(layer: PeftLinear, name: str, device: str) -> bool:
    """True if adapter `name` is ordinary LoRA on frozen weights, all of them whole and here."""
    base = layer.get_base_layer()
    rank = layer.r[name]
    shapes = {layer.lora_A[name]: (rank, base.in_features), layer.lora_B[name]: (base.out_features, rank)}
    shapes[base] = (base.out_features, base.in_features)
    if any(not isinstance(part, nn.Linear) or part.weight.shape != shape for part, shape in shapes.items()):
        return False  # wrapped or split over processes
    frozen = not any(parameter.requires_grad for parameter in base.parameters())
    dropping = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    special = name in layer.lora_variant or layer.lora_bias[name] or layer.fan_in_fan_out
    return frozen and not dropping and not special and not torch.is_autocast_enabled(device)


def speed_up(model: Any) -> Any:
    """`model` with this module's forward pass in its LoRA layers, in place; those on other than linear layers stay."""
    for module in model.modules() if runs("lora") else ():
        if type(module) is PeftLinear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = LoraLinear
    return model


@contextlib.contextmanager
def packed_linears(model: Any, rows: int) -> Iterator[None]:
    """Within, the linear layers of `model` on a CPU use packed copies of their weights; no gradients.

    A layer under a LoRA adapter has A packed below its weight, so that one product reads the input for both. The copies
    take as much memory as the weights on entry: nothing may learn within, and the model cannot be copied.
    rows: of most products, e.g. responses decoded together.
    """
    layers: list[nn.Module] = []
    try:
        for layer, forward in _packed_forwards(model, rows):
            layer.forward = forward
            layers.append(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packed_forwards(model: Any, rows: int) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    """The layers that can be packed, each with its forward pass."""
    bases = set()
    for module in model.modules():
        adapter = module.rounded_adapter() if isinstance(module, LoraLinear) else None
        base: Any = module.get_base_layer() if adapter else module
        if base in bases:
            continue
        if adapter is not None:
            bases.add(base)
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
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def _packable(module: nn.Module) -> bool:
    """True if `module` is an ordinary bfloat16 linear layer, which this processor runs faster packed."""
    if type(module) is not nn.Linear or module.weight.dtype != torch.bfloat16:
        return False
    weight = module.weight
    whole = type(weight.data) is torch.Tensor and weight.shape == (module.out_features, module.in_features)
    return whole and runs("packed", weight.device.type) and not torch.is_autocast_enabled("cpu")


def _forward(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _adapted_forward(
    weight: torch.Tensor, bias: torch.Tensor | None, high: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """x (..., n), packed weight (m + r, n) with A below, high (r, m) -> (..., m)."""
    both = _forward(weight, bias, x).view(-1, len(high) + high.shape[1])
    result, inner = both.split((high.shape[1], len(high)), dim=1)
    return torch.addmm(result, inner, high).view(*x.shape[:-1], -1)
