"""Settings that several sections of the recipe share."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", use_enum_values=True, allow_inf_nan=False)
"""A number is finite unless its own field says that .inf switches something off."""
OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraSettings:
    """A low-rank adapter (peft); its tensors are float32."""

    rank: int = Field(default=16, gt=0)
    scale: float = Field(default=2.0, gt=0)
    """lora_alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    last_layers: int | None = Field(default=None, gt=0)
    """Adapt only the last layers; the backward pass then stops below them. null: all."""

    def __post_init__(self) -> None:
        if self.last_layers is not None and isinstance(self.target_modules, str):
            raise ValueError("last_layers needs target_modules as a list of names, e.g. [q_proj, v_proj]")
