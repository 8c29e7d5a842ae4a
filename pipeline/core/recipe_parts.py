"""Settings that sections of the recipe nest or share; see `pipeline.core.recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", use_enum_values=True)
OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]
SMOOTHING = "smoothing labels that randomised response has already flipped shrinks every margin a second time"


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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UncertaintySettings:
    """The kind of Γ and what only one kind reads; κ is reward.kappa."""

    kind: Literal["fisher", "elliptical", "ensemble", "mc_dropout"] = "fisher"
    """`fisher`: posterior standard deviation; `elliptical`: PPKL Eq. 10; `ensemble`: spread of bootstrap heads;
    `mc_dropout`: spread over dropout masks, refused where the backbone has no dropout."""
    heads: int = Field(default=8, gt=1)
    """`ensemble`."""
    samples: int = Field(default=10, gt=1)
    """`mc_dropout`: passes per text."""
    c: float = Field(default=1.0, gt=0)
    """`elliptical`: the constant of the bound; √c near 0.1 is a useful size at reward_bound 1."""
    delta: float = Field(default=0.05, gt=0, lt=1)
    """`elliptical`: failure probability of the bound."""
    tau: float | None = Field(default=None, gt=0, lt=1)
    """`elliptical`: radius of the covering; null: 1/n."""
    log_covering: float | None = Field(default=None, ge=0)
    """`elliptical`: log N(τ) of the reward class; null: k·log(1/τ) for k coordinates."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EarlyStoppingSettings:
    """Held-out private log-likelihood as the judge of training length (`lora`/`full`)."""

    every: int = Field(default=50, gt=0)
    """Steps between evaluations; step 0 is evaluated too."""
    patience: int = Field(default=3, gt=0)
    """Evaluations in a row without a gain before training stops."""
    standard_errors: float = Field(default=1.0, ge=0)
    """A gain counts when it exceeds this many paired standard errors."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExternalRewardSettings:
    """A finished reward model in place of one that is fitted to the released labels."""

    path: Path
    """Checkpoint folder of a sequence-classification model with one output."""
    public: bool = False
    """Declares that its training labels are public; needed where the folder has no reward_metadata.json."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExtraRewardSettings:
    """One more reward that PPO adds to r̂: a checkpoint folder or a Python function."""

    path: Path | None = None
    """Checkpoint folder of a sequence-classification model with one output; its tokenizer may be another."""
    callable: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`: function(prompts, responses) gives one number per response; prompts as in the data
    (texts or messages), responses as texts."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What it is multiplied by before it is added; any sign, not 0."""
    public: bool = False
    """`path`: declares that its training labels are public; needed where the folder has no reward_metadata.json."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.callable is None):
            raise ValueError("give either path, a checkpoint folder, or callable, package.module:function")
        if self.weight == 0:
            raise ValueError("weight 0 adds nothing: remove the entry, or give it a weight")
        if self.public and self.path is None:
            raise ValueError("public declares the training labels of a path: remove it from a callable")


def refuse_smoothing(loss: Any) -> Any:
    """Label smoothing by any name is refused with the reason, before the list of losses is."""
    if isinstance(loss, str) and "smooth" in loss:
        raise ValueError(SMOOTHING)
    return loss
