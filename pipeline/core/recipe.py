"""The typed recipe: one frozen dataclass per section, every key with its unit, range and default.

Required keys have no default. Cross-section rules are checked in `Recipe.__post_init__`, before any work starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from private_rlhf.core.config import IF_SET, NO_EFFECT
from private_rlhf.core.noise import is_public
from private_rlhf.core.person_budget import split_budget
from private_rlhf.core.recipe_aligners import ALIGNERS, DpoConfig, GroupConfig
from private_rlhf.core.recipe_inputs import BUILT_IN, DataConfig, ModelConfig
from private_rlhf.core.recipe_online import OnlineConfig
from private_rlhf.core.recipe_parts import (
    SMOOTHING,
    STRICT,
    EarlyStoppingSettings,
    EvaluateConfig,
    ExternalRewardSettings,
    ExtraRewardSettings,
    LoraSettings,
    OptimizerName,
    UncertaintySettings,
    refuse_smoothing,
)
from private_rlhf.core.recipe_privatize import PrivatizeConfig
from pydantic import BeforeValidator, Field
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
    (--accept-reward). false: the run stops before ppo, rloo or grpo, and says how many labels it would need."""
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
                raise ValueError("micro_batch_size is for mode lora or full: mode head has feature_batch_size")
            for name in ("optimizer", "group_by_length", "early_stopping", "refit_ridge"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for mode lora or full: remove it, or change the mode")
        if self.quantize and self.mode != "lora":
            raise ValueError(f"quantize trains an adapter on a frozen 4-bit backbone: set mode lora, not {self.mode}")
        if self.pooling and (self.mode != "head" or self.uncertainty.kind == "mc_dropout"):
            raise ValueError("pooling last_sum is for mode head, and for another uncertainty.kind than mc_dropout")
        if self.uncertainty.kind == "elliptical" and self.reward_bound is None:
            raise ValueError("uncertainty.kind elliptical needs a reward_bound: its constant is e^(B/2)")
        for name, own in (("optim", self.optimizer), ("train_sampling_strategy", self.group_by_length)):
            if own and name in self.trainer_args:
                raise ValueError(f"trainer_args.{name} and a key of this section say the same thing: keep one")
        if self.trainer_args.get("label_smoothing_factor"):
            raise ValueError(f"trainer_args.label_smoothing_factor is refused: {SMOOTHING}")


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
    """π is softmax(logits / temperature), in rollouts, reference completions and evaluation, drawn and measured."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of every draw. Below 1 the sampler differs from π_θ: KL and J are then those of π_θ along what was
    drawn, and no Gibbs yardstick exists (evaluate.gibbs_candidates: 0)."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from r̂ when a response is cut at the cap."""
    extra_rewards: list[ExtraRewardSettings] = Field(default_factory=list)
    """Their weighted sum is added to r̂ for PPO alone: r̄ of the evaluation and the Gibbs yardstick stay those of the
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
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], NO_EFFECT] = Field(default_factory=list)
    """Trackers that get the numbers of each iteration, from the main process; none by default. They stay on this
    machine unless their own environment variables say otherwise (WANDB_MODE=online)."""
    report_samples: Annotated[bool, NO_EFFECT] = False
    """Trackers also get the sample that is shown. Without it no prompt and no response ever reaches them."""

    def __post_init__(self) -> None:
        if self.quantize and self.lora is None:
            raise ValueError("quantize trains an adapter on a frozen 4-bit model: give lora its settings, not null")
        if self.report_samples and not (self.report_to and self.sample_every):
            raise ValueError("report_samples needs report_to and sample_every > 0: there is else nothing to report")
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """One experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(default=0, ge=0)
    evaluation_labels: Literal["public", "private", "laplace"]
    """`public`: test labels are declared public and read raw; `private`: only privatised test labels are used;
    `laplace`: the evaluation also asks for noisy counts of the true ones, each question at privatize.count_epsilon."""
    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    privatize: PrivatizeConfig
    online: Annotated[OnlineConfig | None, IF_SET] = None
    """Ask about answers of π_ref round by round, instead of reading data.preferences."""
    sft: SftConfig = Field(default_factory=SftConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    aligner: Literal["ppo", "dpo", "rloo", "grpo"] = "ppo"
    """What makes the policy: PPO, RLOO or GRPO on r̂, or the DPO baseline. ppo.kl_coef is the coefficient of J in
    all."""
    ppo: PpoConfig = Field(default_factory=PpoConfig)
    dpo: DpoConfig = Field(default_factory=DpoConfig)
    rloo: GroupConfig = Field(default_factory=GroupConfig)
    grpo: GroupConfig = Field(default_factory=GroupConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        if is_public(self.privatize.epsilon) and not self.data.public_labels:
            raise ValueError("privatize.epsilon .inf needs data.public_labels: true (labels declared public)")
        if self.evaluation_labels == "public" and not self.data.public_labels:
            raise ValueError("evaluation_labels: public needs data.public_labels: true; else use private")
        if self.evaluation_labels == "laplace":
            self._check_counts()
        own = self.privatize
        if own.person_budget is not None and self.online is None and own.labeler_column is None:
            raise ValueError("privatize.person_budget needs labeler_column, the column that names who gave the label")
        if own.by_holder:
            self._check_holder()
        if self.online is not None:
            self._check_online(self.online)
        if self.aligner in ("rloo", "grpo") and (self.ppo.extra_rewards or self.ppo.quantize):
            raise ValueError(f"ppo.extra_rewards and ppo.quantize are for aligner ppo: remove them for {self.aligner}")
        if self.ppo.reference_rollouts and not self.draws_references:
            raise ValueError("ppo.reference_rollouts needs ppo.baseline or reward.kappa > 0: else none are drawn")
        if self.ppo.top_p < 1 and self.evaluate.gibbs_candidates:
            raise ValueError(
                f"ppo.top_p {self.ppo.top_p:g} draws from the top of π_ref alone, and the Gibbs yardstick needs "
                "draws of π_ref itself: set evaluate.gibbs_candidates: 0, or ppo.top_p: 1"
            )
        if self.ppo.temperature != 1 and self.aligner == "dpo":
            raise ValueError("aligner dpo learns at temperature 1, and is evaluated so: set ppo.temperature: 1")

    def _check_online(self, online: OnlineConfig) -> None:
        if self.evaluation_labels != "private":
            raise ValueError("online asks for private answers alone: set evaluation_labels: private")
        if is_public(self.privatize.epsilon):
            raise ValueError("online needs a finite privatize.epsilon, that of each answer")
        if online.simulated and not self.data.public_labels:
            raise ValueError(f"online.labeller: {online.labeller} is this program's own: set data.public_labels: true")
        if not self.data.without_pairs:
            raise ValueError("data.preferences are not read by online: leave them out")
        if from_pairs := [key for key in BUILT_IN if self.data.from_release(key)]:
            raise ValueError(f"data.{from_pairs[0]}: there are no pairs before online asks; name a file or `embedded`")
        if self.privatize.person_budget is not None:
            labels, _ = split_budget(self.privatize.person_budget, self.privatize.person_questions)
            if online.labeller not in ("crowd", "page"):
                raise ValueError(f"person_budget: {online.labeller} knows no persons: set labeller crowd or page")
            if online.crowd is not None and online.crowd.most > labels:
                raise ValueError(f"privatize.person_budget: a person answers {labels}: lower online.crowd.most")
        if online.after is not None and (self.aligner != "ppo" or self.ppo.quantize):
            raise ValueError("online.after goes on from PPO's policy: set aligner: ppo, and no ppo.quantize")
        # Runs of earlier versions state it so, and need not ask again.
        object.__setattr__(self, "data", replace(self.data, preferences="embedded"))
        if self.data.limit is not None:
            raise ValueError("data.limit is of brought preferences: set online.rounds and online.questions")

    def _check_counts(self) -> None:
        own = self.privatize
        if own.count_epsilon is None:
            raise ValueError("evaluation_labels: laplace needs privatize.count_epsilon, the cost of its counts")
        if not self.private:
            raise ValueError("evaluation_labels: laplace needs a finite epsilon and no insecure_seed; else use public")
        if own.person_budget is not None:
            raise ValueError("privatize.person_budget is spent on labels alone: set evaluation_labels: private")
        if own.budget is not None and own.budget_per == "event" and own.epsilon + own.count_epsilon > own.budget:
            raise ValueError(
                f"privatize.epsilon {own.epsilon:g} and count_epsilon {own.count_epsilon:g} add up to more than "
                f"privatize.budget {own.budget:g}; lower one of them"
            )

    def _check_holder(self) -> None:
        """With privatize.trust: holder the release holds no training label: what needs one is refused."""
        own, wants, reward = self.privatize, "privatize.trust: holder releases no training label", self.reward
        if self.online is not None:
            raise ValueError(f"{wants}, and online learns from answers one by one: leave one of them out")
        if self.aligner == "dpo":
            raise ValueError(f"{wants}, and DPO learns from labels: set aligner ppo, rloo or grpo")
        if self.data.demonstrations == "release_preferred":
            raise ValueError(f"{wants}, so none is preferred: set data.demonstrations: release")
        if reward.external is not None or reward.mode != "head" or reward.loss != "private_likelihood":
            raise ValueError(f"{wants}: its sum is fitted by reward.mode head; leave reward.external and loss out")
        if reward.uncertainty.kind != "fisher":
            raise ValueError(f"{wants}: reward.uncertainty.kind must be fisher, not {reward.uncertainty.kind}")
        events = 0.0 if self.evaluation_labels == "public" else own.epsilon
        counts = own.count_epsilon or 0.0 if self.evaluation_labels == "laplace" else 0.0
        total = events + own.epsilon + counts
        if own.budget is not None and total > own.budget:
            raise ValueError(
                f"privatize.budget {own.budget:g}: with trust: holder the ledger adds the sum's epsilon to that of"
                f" evaluation labels and counts, {total:g} in all: lower epsilon, or set evaluation_labels: public"
            )

    @property
    def absent_stages(self) -> dict[str, str]:
        """Stage -> what to do about it, of those that this recipe does not have."""
        absent = {name: f"set aligner={name}, or run {self.aligner}" for name in ALIGNERS if name != self.aligner}
        if self.evaluation_labels != "laplace":
            absent["count"] = "it is for evaluation_labels=laplace"
        if not self.privatize.by_holder:
            absent["statistic"] = "it is for privatize.trust=holder"
        if self.online is None:
            absent["online"] = "it is for recipes with a section online"
        else:
            absent["privatize"] = "section online asks for labels instead: run online"
        return absent

    @property
    def draws_references(self) -> bool:
        """Whether the aligner draws completions of π_ref for its prompts."""
        return self.reward.kappa > 0 or (self.aligner == "ppo" and self.ppo.baseline)

    @property
    def private(self) -> bool:
        """Whether labels go through a randomiser with a secret key."""
        return self.privatize.private

    @property
    def override(self) -> str | None:
        """Why nothing is private in this run whatever its randomiser does; None unless its holder overruled a guard."""
        if self.data.allow_label_overlap:
            return "data.allow_label_overlap overrules the guard that keeps raw labels out of SFT and prompts"
        return None
