"""The optimiser of PPO and its learning rates."""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.recipe import PpoConfig


def make_optimizer(model: PolicyWithValue, config: PpoConfig) -> torch.optim.Optimizer:
    """The recipe's optimiser over the trainable tensors, the value head with its own learning rate; no weight decay.

    Adam's ε is 1e-8: PPO code's 1e-5 is as large as a policy's gradients can be, and would shorten its steps. The 8-bit
    ones keep the moments of tensors of 4096 numbers and more in 8 bits.
    """
    groups: list[dict[str, Any]] = [
        {"params": [each for each in model.policy.parameters() if each.requires_grad], "lr": config.learning_rate},
        {"params": list(model.value_head.parameters()), "lr": config.value_learning_rate},
    ]
    if config.optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

        kind = AdamW8bit if config.optimizer == "adamw_8bit" else PagedAdamW8bit
        return kind(groups, weight_decay=0.0)
    if config.optimizer == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups, scale_parameter=False, relative_step=False)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups)
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, config: PpoConfig, iteration: int) -> None:
    """Sets the learning rates of an iteration; a pure function of it, so that resuming needs no state."""
    scale = 1.0 - iteration / config.iterations if config.lr_schedule == "linear" else 1.0
    for group, rate in zip(optimizer.param_groups, (config.learning_rate, config.value_learning_rate), strict=True):
        group["lr"] = rate * scale
