"""Gradient checkpointing: a layer keeps what enters it alone, and computes the rest again in the backward pass.

transformers' own switch acts on layers in training mode alone; PPO's policy stays in evaluation mode, dropout off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: Any) -> None:
    """Lets every layer of `model` that transformers would checkpoint do so wherever gradients are taken; in place.

    Raises:
        UserError: the model has no such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"ppo.gradient_checkpointing: {type(model).__name__} has no layers to checkpoint: set it false")
    for layer in layers:
        layer.forward = functools.partial(_forward, layer.forward)


def _forward(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing is random here
