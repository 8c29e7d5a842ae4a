"""Section `ppo` of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT
from private_rlhf.recipe.training_sections import LoraSettings, OptimizerName
from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExtraRewardSettings:
    """One more reward that PPO adds to r̂: a checkpoint folder or a Python function."""

    path: Path | None = None
    """Checkpoint folder of a sequence-classification model with one output; its tokenizer may be another."""
    callable: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`: function(prompts, responses) gives one number per response; prompts as in the data
    (texts or messages), responses as texts."""
    weight: float = Field(default=1.0)
    """What it is multiplied by before it is added; any sign, not 0."""
    public: bool = False
    """`path`: declares that its training labels are public; needed where the folder has no reward_metadata.json."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.callable is None):
            raise ValueError("extra_rewards must have either path or callable: give one of them")
        if self.weight == 0:
            raise ValueError("weight must not be 0: remove the entry, or give it a weight")
        if self.public and self.path is None:
            raise ValueError("public must go with a path, whose training labels it declares: remove it from a callable")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PpoConfig:
    """KL-regularised PPO on r̂ = r̄ − Γ."""

    iterations: int = Field(default=500, gt=0)
    rollouts: int = Field(default=16, gt=0)
    """Global number of sampled responses per iteration."""
    samples_per_prompt: int = Field(default=1, gt=0)
    """Responses to each prompt in an iteration; divides rollouts. Those of one prompt share its computation."""
    ppo_epochs: int = Field(default=3, gt=0)
    minibatch_size: int = Field(default=4, gt=0)
    """Global number of responses per optimiser step; divides rollouts."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Responses per forward/backward pass and process; default: the process's share of a minibatch."""
    generate_batch_size: int = Field(default=128, gt=0)
    gradient_checkpointing: bool = False
    """Keep only what enters each layer for the backward pass, and compute the rest again there: less memory, slower."""
    gather_once: bool = True
    """Under FSDP2: keep weights whole during a rollout; false: gather them per token, for less memory and more time."""
    learning_rate: float = Field(default=1e-6, gt=0)
    value_learning_rate: float = Field(default=5e-6, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: both learning rates fall to 0 over the iterations."""
    warmup_iterations: int = Field(default=0, ge=0)
    """Iterations in which only the value head learns."""
    kl_coef: float = Field(default=0.1, gt=0)
    """Coefficient of KL(π‖π_ref) in J; where the adaptive controller starts. J is always evaluated at this one."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats per response; switches the adaptive controller on. It changes the penalty that PPO learns from, never J."""
    kl_horizon: int = Field(default=1000, gt=0)
    """Responses over which the adaptive controller reacts."""
    kl_coef_min: float = Field(default=1e-4, gt=0)
    """With kl_target: the adaptive controller goes no lower."""
    kl_coef_max: float = Field(default=1e3, gt=0)
    """With kl_target: the adaptive controller goes no higher."""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """In the per-token reward. k1 is unbiased in reward; k3 is a low-variance alternative with its own bias."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    value_clip_range: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    value_coef: float = Field(default=0.5, ge=0)
    entropy_coef: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    whiten_advantages: bool = True
    temperature: float = Field(default=1.0, gt=0)
    """π is softmax(logits / temperature) wherever a stage draws from it or measures it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of every draw. Below 1 the sampler differs from π_θ: KL and J are then those of π_θ along what was
    drawn, and no Gibbs yardstick exists (evaluate.gibbs_candidates: 0)."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from r̂ when a response is cut at the cap."""
    extra_rewards: list[ExtraRewardSettings] = Field(default_factory=list)
    """Their weighted sum is added to r̂ only for PPO: r̄ of the evaluation and the Gibbs yardstick stay those of the
    private reward model."""
    max_kl: float = Field(default=100.0, gt=0, allow_inf_nan=True)
    """Stop the run when the mean KL per response of an iteration (nats) exceeds this, before it learns from it."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Use this many of the training prompts, evenly spaced; null: all."""
    baseline: bool = True
    """Learning subtracts the mean r̄ of π_ref's completions of the prompt, whatever reward.kappa is. false: it does not;
    with kappa 0 none are drawn then."""
    reference_samples: int = Field(default=8, gt=1)
    """K completions of π_ref per prompt, for the baseline and to centre Γ."""
    reference_rollouts: bool = False
    """The first iteration learns from the K reference completions of every prompt: nothing was learnt before it, so
    they are exact samples of the policy, drawn as all rollouts are, and a large first batch costs no sampling of its
    own. Needs baseline, or kappa > 0."""
    warm_start: Annotated[Literal["regression"] | None, IF_SET] = None
    """The first iteration is the regression of section gvpo on the K reference completions of every prompt; then PPO
    goes on from there. Takes the place of reference_rollouts."""
    polish: Annotated[Literal["regression"] | None, IF_SET] = None
    """After the last iteration, the regression of section gvpo on every answer that this stage has drawn."""
    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    """null: full fine-tuning with a frozen reference copy."""
    quantize: Literal["4bit"] | None = None
    """With lora: keep the frozen sft model in 4 bits (QLoRA). π_ref is then that 4-bit model, here and in the
    evaluation; policy and π_ref are saved as ordinary checkpoints of their dequantised weights. Small models lose
    much in 4 bits. Needs bitsandbytes."""
    optimizer: OptimizerName | None = None
    """null: fused AdamW, as `adamw`. The 8-bit ones need bitsandbytes, the paged one a GPU."""
    save_every: int = Field(default=10, gt=0)
    """Iterations between checkpoints."""
    sample_every: Annotated[int, NO_EFFECT] = Field(default=0, ge=0)
    """Iterations between samples in ppo/samples.jsonl, one of which is shown as well; 0: none."""
    sample_count: Annotated[int, NO_EFFECT] = Field(default=4, gt=0)
    """Responses of such an iteration that are written, evenly spaced."""
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio", "mlflow"]], NO_EFFECT] = Field(
        default_factory=list
    )
    """Trackers that get the numbers of each iteration, here and of each step in the stages that train with TRL. They
    stay on this machine unless their own variables say otherwise (WANDB_MODE=online, MLFLOW_TRACKING_URI), and get the
    privacy card at the end."""
    report_samples: Annotated[bool, NO_EFFECT] = False
    """Trackers also get the sample that is shown (not MLflow), and the report. Without it no prompt and no response
    reaches them."""

    def __post_init__(self) -> None:
        if self.quantize and self.lora is None:
            raise ValueError("lora must not be null with quantize, which trains an adapter: give it its settings")
        if self.report_samples and not (self.report_to and self.sample_every):
            raise ValueError("report_samples must go with report_to and sample_every > 0: set them, or remove it")
        if self.warm_start and self.reference_rollouts:
            raise ValueError("warm_start learns from the reference completions: set reference_rollouts: false")
        if self.rollouts % self.minibatch_size:
            raise ValueError(f"minibatch_size {self.minibatch_size} must divide rollouts {self.rollouts}")
        if self.rollouts % self.samples_per_prompt:
            raise ValueError(f"samples_per_prompt {self.samples_per_prompt} must divide rollouts {self.rollouts}")
        if self.kl_target is not None and not self.kl_coef_min <= self.kl_coef <= self.kl_coef_max:
            raise ValueError(
                f"kl_coef {self.kl_coef:g} must lie between kl_coef_min {self.kl_coef_min:g} and "
                f"kl_coef_max {self.kl_coef_max:g}: the adaptive controller starts there"
            )

    @property
    def batch_size(self) -> int:
        """minibatch_size, as the other trainers' sections call it."""
        return self.minibatch_size

    @property
    def epochs(self) -> int:
        """ppo_epochs, as the other trainers' sections call it."""
        return self.ppo_epochs
