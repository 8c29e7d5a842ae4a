"""Sections `rloo` and `grpo` of the recipe."""

from __future__ import annotations

from typing import Any

from private_rlhf.recipe.shared_settings import STRICT, LoraSettings
from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupConfig:
    """RLOO or GRPO on r̂ (TRL's RLOOTrainer and GRPOTrainer), for `aligner: rloo` or `grpo`. From section ppo they take
    what makes the task: kl_coef, temperature, top_p, missing_eos_penalty, max_prompts and reference_samples."""

    iterations: int = Field(default=500, gt=0)
    rollouts: int = Field(default=16, gt=0)
    """Global number of sampled responses per iteration."""
    samples_per_prompt: int = Field(default=4, gt=1)
    """Responses to each prompt, which are each other's baseline; divides rollouts."""
    epochs: int = Field(default=1, gt=0)
    """Passes over an iteration's responses."""
    batch_size: int = Field(default=16, gt=0)
    """Global number of responses per optimiser step; divides rollouts. With batch_size: rollouts and one epoch every
    step is on responses of the policy as it is; the others are clipped."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Responses per forward pass and process; default: batch_size / processes."""
    generate_batch_size: int = Field(default=128, gt=0)
    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    clip_range: float = Field(default=0.2, gt=0)
    """Of π/π_old: of a whole response (rloo) or of a token (grpo)."""
    kl_coef: float | None = Field(default=None, gt=0)
    """Of the KL that is learnt from; null: ppo.kl_coef, so that all aligners aim at the same objective."""
    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    """null: full fine-tuning with a frozen reference copy."""
    save_every: int = Field(default=10, gt=0)
    """Iterations between checkpoints."""
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to trl.RLOOConfig or GRPOConfig, checked against its fields."""

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "batch_size"):
            if self.rollouts % getattr(self, name):
                raise ValueError(f"{name} {getattr(self, name)} must divide rollouts {self.rollouts}")

    @property
    def max_steps(self) -> int:
        """Optimiser steps of all iterations."""
        return self.iterations * self._steps

    @property
    def save_steps(self) -> int:
        """Optimiser steps between checkpoints: whole iterations."""
        return self.save_every * self._steps

    @property
    def _steps(self) -> int:
        return self.epochs * self.rollouts // self.batch_size
