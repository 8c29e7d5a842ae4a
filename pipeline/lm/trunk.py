"""The frozen layers below a LoRA adapter: computed once for a token, then left out.

An adapter on the last layers alone leaves what enters them a function of the text. PPO reads each response under the
policy, under π_ref and again in every epoch: the states that enter the first adapted layer are kept from the first
reading, and the others start there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from private_rlhf.lm.kernels import runs
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import sharing_of
from torch import Tensor, nn

SCALES_EMBEDDINGS = frozenset({"gemma"})
"""Families that do something to what stands in for embeddings, and would do it to the states."""


def frozen_layers(model: Any) -> int:
    """How many layers from the bottom up learn nothing, embeddings included; 0 where the kernel does not fit."""
    inner: Any = unwrap(model)
    if sharing_of(model) is None or not runs("trunk", inner.device.type) or not hasattr(inner.get_decoder(), "layers"):
        return 0
    if inner.config.model_type in SCALES_EMBEDDINGS or _learns(inner.get_input_embeddings()):
        return 0
    layers = list(inner.get_decoder().layers)
    return next((number for number, layer in enumerate(layers) if _learns(layer)), 0)


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextlib.contextmanager
def recorded(model: Any, layers: int) -> Iterator[list[Tensor]]:
    """Within, each forward pass adds the states (R, T, d) that enter the layer above the bottom `layers`.

    Nothing is recorded for 0 layers.
    """
    states: list[Tensor] = []
    if not layers:
        yield states
        return

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        states.append(arguments[0].detach())

    inner: Any = unwrap(model)
    handle = inner.get_decoder().layers[layers].register_forward_pre_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


@contextlib.contextmanager
def left_out(model: Any, layers: int) -> Iterator[None]:
    """Within, the model has no bottom `layers`: it takes the states that enter the next one as `inputs_embeds`."""
    inner: Any = unwrap(model)
    decoder = inner.get_decoder()
    whole = decoder.layers
    decoder.layers = nn.ModuleList(list(whole)[layers:])
    try:
        yield
    finally:
        decoder.layers = whole
