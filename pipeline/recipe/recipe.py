"""The recipe: its sections, the rules between them, and the copy that a run directory keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from private_rlhf.core.noise import is_public
from private_rlhf.privacy.person import split_budget
from private_rlhf.recipe.data_section import BUILT_IN, DataConfig, ModelConfig, bare_name
from private_rlhf.recipe.evaluate_section import EvaluateConfig
from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT, dump_yaml, effective, to_tree
from private_rlhf.recipe.online_section import OnlineConfig
from private_rlhf.recipe.ppo_section import PpoConfig
from private_rlhf.recipe.privatize_section import PrivatizeConfig
from private_rlhf.recipe.reward_section import RewardConfig
from private_rlhf.recipe.rollout_section import MAX_RANK, UNSERVED_MODULES, RolloutConfig
from private_rlhf.recipe.training_sections import DpoConfig, GroupConfig, GvpoConfig, LoraSettings, SftConfig
from pydantic import Field
from pydantic.dataclasses import dataclass

ALIGNERS = ("ppo", "dpo", "rloo", "grpo", "gvpo")
"""Methods that make a policy; each is a section of the recipe and a stage, and a recipe has one of them."""
ON_TRL = ("rloo", "grpo")
"""Those that TRL trains on responses to data.prompts."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """One experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(default=0, ge=0)
    effort: Annotated[Literal["minutes", "hours", "full"] | None, NO_EFFECT] = None
    """Numbers of steps, prompts and answers that a recipe does not state (efforts.yaml); null: defaults of the keys."""
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
    aligner: Literal["ppo", "dpo", "rloo", "grpo", "gvpo"] = "ppo"
    """The method that makes the policy: PPO, RLOO, GRPO or GVPO on r̂, or the DPO baseline. ppo.kl_coef is the
    coefficient of J in all."""
    rollout: Annotated[RolloutConfig | None, IF_SET] = None
    """The engine that draws responses to learn from, candidates and answers; null: transformers."""
    ppo: PpoConfig = Field(default_factory=PpoConfig)
    dpo: DpoConfig = Field(default_factory=DpoConfig)
    rloo: GroupConfig = Field(default_factory=GroupConfig)
    grpo: GroupConfig = Field(default_factory=GroupConfig)
    gvpo: GvpoConfig = Field(default_factory=GvpoConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        if is_public(self.privatize.epsilon) and not self.data.public_labels:
            raise ValueError("data.public_labels must be true where privatize.epsilon is .inf: set either")
        if self.evaluation_labels == "public" and not self.data.public_labels:
            raise ValueError("data.public_labels must be true for evaluation_labels: public: set it, or take private")
        if self.evaluation_labels == "laplace":
            self._check_counts()
        privatize, online = self.privatize, self.online
        if privatize.person_budget is not None and self.online is None and privatize.labeler_column is None:
            raise ValueError("privatize.labeler_column must be given with person_budget: name that column")
        if privatize.epsilon_levels and not (privatize.epsilon_column or (online and online.labeller == "terminal")):
            raise ValueError("privatize.epsilon_levels must go with epsilon_column: give both, or remove it")
        if self.online is not None:
            self._check_online(self.online)
        if self.aligner in ON_TRL and (self.ppo.extra_rewards or self.ppo.quantize):
            raise ValueError(f"ppo.extra_rewards and ppo.quantize are for aligner ppo: remove them for {self.aligner}")
        if self.aligner == "gvpo" and self.ppo.quantize:
            raise ValueError("ppo.quantize is for aligner ppo: remove it for gvpo")
        if (self.ppo.reference_rollouts or self.ppo.warm_start) and not self.draws_references:
            key = "warm_start" if self.ppo.warm_start else "reference_rollouts"
            raise ValueError(f"ppo.{key} requires ppo.baseline or reward.kappa > 0: set one of them")
        if self.ppo.top_p < 1 and self.evaluate.gibbs_candidates:
            raise ValueError(
                f"ppo.top_p {self.ppo.top_p:g} draws only from the top of π_ref, and the Gibbs yardstick needs "
                "draws of π_ref itself: set evaluate.gibbs_candidates: 0, or ppo.top_p: 1"
            )
        if self.ppo.temperature != 1 and self.aligner == "dpo":
            raise ValueError(f"ppo.temperature must be 1 for aligner dpo, got {self.ppo.temperature:g}: set it")
        if self.rollout is not None:
            self._check_rollout(self.rollout)

    def _check_rollout(self, rollout: RolloutConfig) -> None:
        """Refuse what vLLM cannot serve as an adapter on sft/model."""
        if rollout.engine == "transformers":  # as without the section: nothing runs again for it
            object.__setattr__(self, "rollout", None)
            return
        rule = "with rollout.engine: vllm"
        lora = getattr(self, self.aligner).lora
        if lora is None:
            raise ValueError(f"{self.aligner}.lora must not be null {rule}, which serves adapters: set it")
        if lora.rank > MAX_RANK:
            raise ValueError(f"{self.aligner}.lora.rank must be at most {MAX_RANK} {rule}, got {lora.rank}: lower it")
        targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
        if outside := [name for name in targets if name in UNSERVED_MODULES]:
            raise ValueError(f"{self.aligner}.lora.target_modules must not have {outside[0]} {rule}: leave it out")
        if self.ppo.quantize:
            raise ValueError(f"ppo.quantize must be null {rule}: servers have the weights of sft/model, not in 4 bits")
        if self.ppo.top_p < 1:
            raise ValueError(f"ppo.top_p must be 1 {rule}: below it log-probabilities are not those of the policy")
        if self.online is not None and self.online.after is not None:
            raise ValueError(f"online.after must be null {rule}: servers have one base model, sft/model")

    def _check_online(self, online: OnlineConfig) -> None:
        if self.evaluation_labels != "private":
            raise ValueError("evaluation_labels must be private with online: set it")
        if is_public(self.privatize.epsilon):
            raise ValueError("privatize.epsilon must be finite with online: set that of each answer")
        if self.privatize.epsilon_column is not None:
            raise ValueError("privatize.epsilon_column goes without online, which reads no column: remove it")
        for key in ("budget", "max_events_per_person"):
            if (cap := getattr(self.privatize, key)) is not None:
                raise ValueError(f"privatize.{key} must be null with online, got {cap}: set person_budget only")
        if online.simulated and not self.data.public_labels:
            raise ValueError(f"online.labeller {online.labeller} is simulated: set data.public_labels: true")
        if not self.data.without_pairs:
            raise ValueError("data.preferences must be left out with online, which asks instead: remove it")
        if self.data.message_keys:
            raise ValueError("data.message_keys must be null with online, which asks about texts: remove it")
        if from_pairs := [key for key in BUILT_IN if self.data.from_release(key)]:
            raise ValueError(f"data.{from_pairs[0]}: there are no pairs before online asks; name a file or `embedded`")
        if self.privatize.person_budget is not None:
            labels, _ = split_budget(self.privatize.person_budget, self.privatize.person_questions)
            if online.labeller not in ("crowd", "page"):
                raise ValueError(f"person_budget: {online.labeller} does not know persons: set labeller crowd or page")
            if online.crowd is not None and online.crowd.most > labels:
                raise ValueError(f"privatize.person_budget: a person answers {labels}: lower online.crowd.most")
        if online.after is not None and (self.aligner != "ppo" or self.ppo.quantize):
            raise ValueError("online.after must go with aligner: ppo and without ppo.quantize: set them so")
        # Runs of earlier versions state `embedded`, and must not ask again.
        object.__setattr__(self, "data", replace(self.data, preferences="embedded"))
        if self.data.limit is not None:
            raise ValueError("data.limit must be null with online: set online.rounds and online.questions")

    def _check_counts(self) -> None:
        privatize = self.privatize
        if privatize.count_epsilon is None:
            raise ValueError("privatize.count_epsilon must be given for evaluation_labels: laplace: set the cost")
        if not self.private:
            raise ValueError("evaluation_labels must not be laplace without a finite epsilon and a key: take public")
        if privatize.person_budget is not None:
            raise ValueError("evaluation_labels must be private with privatize.person_budget, for labels only: set it")
        total = privatize.epsilon + privatize.count_epsilon
        if privatize.budget is not None and privatize.budget_per == "event" and total > privatize.budget:
            raise ValueError(
                f"privatize.epsilon + count_epsilon must be at most privatize.budget {privatize.budget:g}, got "
                f"{total:g}: lower one of them"
            )

    @property
    def absent_stages(self) -> dict[str, str]:
        """Stage -> remedy, of the stages that this recipe does not have."""
        absent = {name: f"set aligner={name}, or run {self.aligner}" for name in ALIGNERS if name != self.aligner}
        if self.evaluation_labels != "laplace":
            absent["count"] = "it is for evaluation_labels=laplace"
        if self.online is None:
            absent["online"] = "it is for recipes with a section online"
        else:
            absent["privatize"] = "section online asks for labels instead: run online"
        return absent

    @property
    def draws_references(self) -> bool:
        """True where the aligner draws completions of π_ref for its prompts."""
        return self.reward.kappa > 0 or self.aligner == "gvpo" or (self.aligner == "ppo" and self.ppo.baseline)

    @property
    def private(self) -> bool:
        """True if labels go through a randomiser with a secret key."""
        return self.privatize.private

    @property
    def adapters(self) -> dict[str, LoraSettings | None]:
        """LoRA settings by key, of the stages that train the base model; None: full fine-tuning."""
        adapters = {"sft.lora": self.sft.lora, f"{self.aligner}.lora": getattr(self, self.aligner).lora}
        return adapters | ({"reward.lora": self.reward.lora} if self.reward.mode == "lora" else {})

    @property
    def four_bit(self) -> bool:
        """A stage trains on a base model in 4 bits."""
        return bool(self.ppo.quantize or self.reward.quantize)

    @property
    def override(self) -> str | None:
        """The reason why this run is not private: its holder overruled a guard. None otherwise."""
        reason = "data.allow_label_overlap overrules the guard that keeps raw labels out of SFT and prompts"
        return reason if self.data.allow_label_overlap else None


OWN_FILES = ("preferences", "demonstrations", "prompts", "evaluation_prompts")  # of section data


def shareable_yaml(recipe: Recipe) -> str:
    """The YAML text of `shareable`."""
    return dump_yaml(shareable(recipe))


def changed_keys(recipe: Recipe, saved: Mapping[str, Any]) -> list[str]:
    """The keys (`section.key`) with an effect that differ from those of a saved recipe; none if that is empty."""
    if not saved:
        return []
    return sorted(_differences(*(effective(Recipe, tree) for tree in (saved, to_tree(shareable(recipe))))))


def shareable(recipe: Recipe) -> Recipe:
    """The recipe with only the last part of each path to a file of its holder: folder names may be confidential."""
    privatize, model, online, rollout = recipe.privatize, recipe.model, recipe.online, recipe.rollout
    names: dict[str, Any] = {name: bare_name(str(getattr(recipe.data, name))) for name in OWN_FILES}
    privatize = replace(privatize, key_file=_name_of(privatize.key_file))
    if model.cache_dir != ModelConfig.cache_dir:
        model = replace(model, cache_dir=Path(model.cache_dir.name))
    if online is not None:
        online = replace(online, folder=_name_of(online.folder), after=_name_of(online.after))
    if rollout is not None:
        rollout = replace(rollout, folder=_name_of(rollout.folder))
    data = replace(recipe.data, **names)
    return replace(recipe, data=data, privatize=privatize, model=model, online=online, rollout=rollout)


def _name_of(path: Path | None) -> Path | None:
    return None if path is None else Path(path.name)


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Dotted paths at which two trees differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = before.keys() | after.keys()
        differences = [_differences(before.get(name), after.get(name), f"{path}.{name}".lstrip(".")) for name in names]
        return [one for some in differences for one in some]
    return [path] if before != after else []
