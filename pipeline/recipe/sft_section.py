"""Section `sft` of the recipe."""

from __future__ import annotations

from typing import Any

from private_rlhf.recipe.shared_settings import STRICT, LoraSettings
from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftConfig:
    """Supervised fine-tuning on demonstrations (TRL SFTTrainer); its result is π_ref."""

    epochs: float = Field(default=1.0, gt=0)
    max_steps: int = -1
    """Overrides epochs when positive."""
    batch_size: int = Field(default=16, gt=0)
    """Global: over all processes and accumulation steps."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Sequences per forward pass and process; default: batch_size / processes."""
    learning_rate: float = Field(default=2e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    """null: full fine-tuning in float32."""
    save_steps: int = Field(default=50, gt=0)
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to trl.SFTConfig, checked against its fields."""
