"""Section `dpo` of the recipe."""

from __future__ import annotations

from typing import Any, Literal

from private_rlhf.recipe.shared_settings import STRICT, LoraSettings
from pydantic import Field
from pydantic.dataclasses import dataclass

TRL_LOSS = frozenset(
    {
        "loss_type",
        "loss_weights",
        "label_smoothing",
        "beta",
        "ld_alpha",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "use_weighting",
        "discopop_tau",
    }
)
"""What shapes TRL's own losses of DPO, none of which is computed."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DpoConfig:
    """DPO on the released pairs (TRL DPOTrainer): the baseline without a reward model, for `aligner: dpo`."""

    loss: Literal["private_likelihood", "debiased", "uncorrected"] = "private_likelihood"
    kl_coef: float | None = Field(default=None, gt=0)
    """Of DPO's margin (TRL's beta); null: ppo.kl_coef, so that both aim at the same objective."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int = -1
    """Overrides epochs when positive."""
    batch_size: int = Field(default=16, gt=0)
    """Global, in pairs."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Pairs per forward pass and process; default: batch_size / processes."""
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    """null: full fine-tuning with a frozen reference copy."""
    save_steps: int = Field(default=50, gt=0)
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to trl.DPOConfig, checked against its fields; none that shapes TRL's own losses."""

    def __post_init__(self) -> None:
        for name in sorted(TRL_LOSS & self.trainer_args.keys()):
            raise ValueError(f"trainer_args.{name} shapes a loss of TRL's that is not computed: set loss and kl_coef")
