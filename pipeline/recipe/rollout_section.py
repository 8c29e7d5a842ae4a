"""Section `rollout` of the recipe: who draws responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from private_rlhf.recipe.load import NO_EFFECT, STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass

MAX_RANK = 512
"""Of an adapter that vLLM serves."""
UNSERVED_MODULES = frozenset({"embed_tokens", "lm_head", "embed_in", "embed_out", "wte"})
"""Modules whose adapters vLLM leaves out."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """The sampler of online, ppo, gvpo, rloo, grpo, evaluate and `private-rlhf sample --config`."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """`transformers`: the policy's own forward passes, exactly reproducible. `vllm`: servers of sft/model, which get
    each adapter that is to draw (docs/how-to/several-gpus.md)."""
    urls: Annotated[list[str], NO_EFFECT] = Field(default_factory=list)
    """Of `vllm`: address of each replica, such as http://127.0.0.1:8000. They see prompts, responses and adapters."""
    folder: Annotated[Path | None, NO_EFFECT] = None
    """Of `vllm`: adapters are published here, which every server must see under the same path; null: beside the
    checkpoints in the run directory."""
    tolerance: Annotated[float | None, NO_EFFECT] = Field(default=None, gt=0)
    """Nats that the engine's log-probabilities of sampled tokens may differ from the trainer's on average, before the
    run stops; null: 1e-4 in float32, 0.1 in bfloat16."""
    largest: Annotated[float | None, NO_EFFECT] = Field(default=None, gt=0)
    """The same of a single token; null: 2e-3 in float32, 3 in bfloat16."""
    patience: Annotated[float, NO_EFFECT] = Field(default=600.0, gt=0)
    """Seconds to wait for a server that does not answer, before the run stops."""

    def __post_init__(self) -> None:
        if (self.engine == "vllm") != bool(self.urls):
            raise ValueError("urls must go with engine: vllm: give the address of each server, or remove them")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
                raise ValueError(f"urls must be http(s)://HOST:PORT without a password, got {url}: correct it")

    def bounds(self, dtype: str) -> tuple[float, float]:
        """Nats that log-probabilities may differ by, of a base model in `dtype`: on average, and of a token."""
        mean, largest = (1e-4, 2e-3) if dtype == "float32" else (0.1, 3.0)
        return self.tolerance or mean, self.largest or largest
