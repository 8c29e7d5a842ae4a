"""The optimiser of PPO and its learning rates."""

from __future__ import annotations

import torch

from pipeline.core.recipe import PpoConfig
from pipeline.lm.logprobs import PolicyWithValue


def make_optimizer(model: PolicyWithValue, config: PpoConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable tensors, the value head with its own learning rate; ε = 1e-5 as PPO code uses."""
    policy = [parameter for parameter in model.policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": policy, "lr": config.learning_rate},
            {"params": list(model.value_head.parameters()), "lr": config.value_learning_rate},
        ],
        eps=1e-5,
        weight_decay=0.0,
        fused=True,
    )


def set_rates(optimizer: torch.optim.Optimizer, config: PpoConfig, iteration: int) -> None:
    """Sets the learning rates of an iteration; a pure function of it, so that resuming needs no state."""
    scale = 1.0 - iteration / config.iterations if config.lr_schedule == "linear" else 1.0
    for group, rate in zip(optimizer.param_groups, (config.learning_rate, config.value_learning_rate), strict=True):
        group["lr"] = rate * scale
