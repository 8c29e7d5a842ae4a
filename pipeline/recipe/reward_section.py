"""Section `reward` of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT
from private_rlhf.recipe.training_sections import LoraSettings, OptimizerName
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

SMOOTHING = "smoothing labels that randomised response has already flipped shrinks every margin a second time"


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


def refuse_smoothing(loss: Any) -> Any:
    """Label smoothing by any name is refused with the reason, before the list of losses is."""
    if isinstance(loss, str) and "smooth" in loss:
        raise ValueError(SMOOTHING)
    return loss


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """Private reward estimation (PPKL Eq. 8–9) and its uncertainty Γ."""

    external: ExternalRewardSettings | None = None
    """Use this reward model and fit none; the other keys of this section but kappa are then not read."""
    mode: Literal["head", "lora", "full"] = "head"
    """`head`: frozen features and a linear head by Fisher scoring; `lora`/`full`: TRL RewardTrainer."""
    quantize: Literal["4bit"] | None = None
    """`lora`: keep the frozen backbone in 4 bits (QLoRA); the checkpoint is ordinary. Needs bitsandbytes."""
    loss: Annotated[
        Literal["private_likelihood", "private_least_squares", "debiased", "uncorrected"],
        BeforeValidator(refuse_smoothing),
    ] = "private_likelihood"
    reward_bound: float | None = Field(default=8.0, gt=0)
    """B: rewards lie in [−B/2, B/2] by (B/2)·tanh(2u/B); null: unbounded."""
    max_pairs: Annotated[int | None, IF_SET] = Field(default=None, gt=2)
    """Learn from at most this many released pairs, at even distances, the held-out ones included; null: all."""
    num_layers: int | None = Field(default=None, gt=0)
    """Keep the first layers of the backbone only; null: all."""
    pooling: Annotated[Literal["last_sum"] | None, IF_SET] = None
    """`head`: what the head reads; null: the last token's state; last_sum: the sum of all tokens' states beside it,
    which knows length and words (docs/results/bound.md). Plain transformers does not score such a checkpoint."""
    num_components: int | None = Field(default=None, gt=0)
    """Principal components of the pair differences that a linear head is fitted in; null: all."""
    ridge: Annotated[float, Field(gt=0)] | Literal["evidence"] | None = None
    """λ of the linear head on frozen features: r̄ and Γ of `head`, the warm start of `lora`/`full`. null: chosen by
    cross-validated private log-likelihood. evidence: by the marginal likelihood of all labels, which does better where
    they are few, noisy or about little (docs/results/benchmark.md)."""
    refit_ridge: float | None = Field(default=None, gt=0)
    """`lora`/`full`: λ of the head that is fitted again on the trained features, r̄'s own; null: chosen by the
    private log-likelihood of the pairs held out."""
    accept_coin: Annotated[bool, NO_EFFECT] = False
    """Train the policy also on a reward whose held-out accuracy has an interval that reaches down to 1/2
    (--accept-reward). false: the run stops before ppo, gvpo, rloo or grpo, and says how many labels it would need."""
    kappa: float = Field(default=1.0, ge=0)
    """Γ = κ·√(g̃ᵀH⁻¹g̃), or κ times another kind of uncertainty; 0 switches pessimism off."""
    uncertainty: UncertaintySettings = Field(default_factory=UncertaintySettings)
    head_warmup: bool = True
    """`lora`/`full`: start from the `head` fit."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int = -1
    batch_size: int = Field(default=16, gt=0)
    """Global, in pairs."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """`lora`/`full`: pairs per forward pass and process; default: batch_size / processes."""
    feature_batch_size: int = Field(default=64, gt=0)
    """Texts per forward pass and process wherever nothing is learnt from it: features here, scores in ppo and
    evaluate."""
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    optimizer: OptimizerName | None = None
    """`lora`/`full`; null: TRL's default. The 8-bit ones need bitsandbytes, the paged one a GPU."""
    group_by_length: bool = False
    """`lora`/`full`: batches of pairs of similar length, which pad less."""
    early_stopping: EarlyStoppingSettings | None = None
    """`lora`/`full`; null: train to the end."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    save_steps: int = Field(default=50, gt=0)
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    """Of the released pairs, by record id: held out for the checks, for early stopping and for refit_ridge."""
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to trl.RewardConfig, checked against its fields."""

    @property
    def feature_blocks(self) -> int:
        """Blocks of features, each in a unit of its own: the last token's state, and with pooling the sum."""
        return 2 if self.pooling else 1

    def __post_init__(self) -> None:
        if self.mode == "head":
            if self.micro_batch_size is not None:
                raise ValueError("micro_batch_size must go with mode lora or full: set feature_batch_size")
            for name in ("optimizer", "group_by_length", "early_stopping", "refit_ridge"):
                if getattr(self, name):
                    raise ValueError(f"{name} must go with mode lora or full: remove it, or change the mode")
        if self.quantize and self.mode != "lora":
            raise ValueError(f"quantize trains an adapter on a frozen 4-bit backbone: set mode lora, not {self.mode}")
        if self.pooling and (self.mode != "head" or self.uncertainty.kind == "mc_dropout"):
            raise ValueError("pooling last_sum must go with mode head, without uncertainty.kind mc_dropout: remove one")
        if self.uncertainty.kind == "elliptical" and self.reward_bound is None:
            raise ValueError("reward_bound must be a number for uncertainty.kind elliptical, for e^(B/2): set one")
        for name, value in (("optim", self.optimizer), ("train_sampling_strategy", self.group_by_length)):
            if value and name in self.trainer_args:
                raise ValueError(f"trainer_args.{name} and a key of this section say the same thing: keep one")
        if self.trainer_args.get("label_smoothing_factor"):
            raise ValueError(f"trainer_args.label_smoothing_factor is refused: {SMOOTHING}")
