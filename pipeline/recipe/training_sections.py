"""Sections `sft`, `dpo`, `rloo`, `grpo` and `gvpo` of the recipe, and settings that sections share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from private_rlhf.recipe.load import IF_SET, STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass

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
            raise ValueError("target_modules must be a list of names with last_layers, such as [q_proj]: give one")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftConfig:
    """Supervised fine-tuning on demonstrations (TRL SFTTrainer); its result is π_ref."""

    epochs: float = Field(default=1.0, gt=0)
    max_steps: int = -1
    """Overrides epochs when positive."""
    max_demonstrations: Annotated[int | None, IF_SET] = Field(default=None, gt=0)
    """Learn from at most this many, at even distances; null: all."""
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


TRL_LOSS = frozenset({
    "loss_type", "loss_weights", "label_smoothing", "beta", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef",
    "use_weighting", "discopop_tau",
})  # fmt: skip
"""Arguments that shape TRL's losses of DPO, none of which is computed."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DpoConfig:
    """DPO on the released pairs (TRL DPOTrainer): the baseline without a reward model, for `aligner: dpo`."""

    loss: Literal["private_likelihood", "debiased", "uncorrected"] = "private_likelihood"
    kl_coef: float | None = Field(default=None, gt=0)
    """Of DPO's margin (TRL's beta); null: ppo.kl_coef, so that both aim at the same objective."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int = -1
    """Overrides epochs when positive."""
    max_pairs: Annotated[int | None, IF_SET] = Field(default=None, gt=0)
    """Learn from at most this many, at even distances; null: all."""
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupConfig:
    """RLOO or GRPO on r̂ (TRL's RLOOTrainer and GRPOTrainer), for `aligner: rloo` or `grpo`. Section ppo gives kl_coef,
    temperature, top_p, missing_eos_penalty, max_prompts, reference_samples and gather_once."""

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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GvpoConfig:
    """Regression of log(π/π_ref) on r̂/kl_coef over stored answers (GVPO, arXiv 2504.19599): for `aligner: gvpo`,
    ppo.warm_start and ppo.polish. Section ppo has what makes the task (kl_coef, temperature, top_p, reference_samples,
    missing_eos_penalty, extra_rewards) and what saves memory (gradient_checkpointing, gather_once, optimizer)."""

    max_prompts: int | None = Field(default=270, gt=0)
    """Learn from this many of the training prompts, evenly spaced; null: all. Each is answered by π_ref
    ppo.reference_samples times."""
    released_answers: int = Field(default=0, ge=0)
    """Learn from up to this many answers of the released pairs to each prompt too: they are there before any draw."""
    rounds: int = Field(default=0, ge=0)
    """Rounds in which the policy answers every prompt anew; all answers are kept and learnt from again."""
    samples_per_prompt: int = Field(default=8, gt=1)
    """Answers in a group, over which the residual is centred; fresh answers to a prompt in a round."""
    passes: int = Field(default=2, gt=0)
    """Over all answers, in each round."""
    batch_size: int = Field(default=16, gt=0)
    """Global number of answers per optimiser step: whole groups."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Answers per forward pass and process, whole groups; default: batch_size / processes."""
    generate_batch_size: int = Field(default=128, gt=0)
    learning_rate: float = Field(default=1e-4, gt=0)
    """Falls linearly to 0 over all rounds."""
    kl_coef: float | None = Field(default=None, gt=0)
    """Of the KL that is learnt from; null: ppo.kl_coef, so that all aligners aim at the same objective."""
    huber_delta: float | None = Field(default=None, gt=0)
    """Residuals beyond it, nats, count linearly; null: squares."""
    max_age: int | None = Field(default=None, ge=0)
    """Answers that were drawn more rounds (PPO: iterations) ago are weighted by π/π_drawn; null: none."""
    importance_clip: float = Field(default=2.0, gt=0)
    """Largest such weight."""
    held_out_prompts: int = Field(default=16, gt=0)
    """Training prompts that are not learnt from: J of r̂ is estimated on them, and the best step is restored where it
    beats the last by more than the standard error of their difference. No label and no truth is read for it."""
    held_out_samples: int = Field(default=4, gt=0)
    """Answers of the policy to each of them, every time."""
    evaluate_every: int = Field(default=45, gt=0)
    """Optimiser steps between such estimates, and between checkpoints."""
    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    """null: full fine-tuning with a frozen reference copy."""

    def __post_init__(self) -> None:
        if self.batch_size % self.samples_per_prompt:
            raise ValueError(f"samples_per_prompt {self.samples_per_prompt} must divide batch_size {self.batch_size}")
