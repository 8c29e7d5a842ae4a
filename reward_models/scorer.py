"""Scores of responses by a reward model: r̄ and the centred uncertainty Γ, from the text that was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from private_rlhf.core.errors import UserError, one_line
from private_rlhf.data.render import Prompt, Renderer, make_renderer, prompt_key
from private_rlhf.lm.distributed import free, is_sharded, split_frozen
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import ModelConfig
from private_rlhf.reward_models.checkpoint import RewardCheckpoint, load_reward_checkpoint
from private_rlhf.reward_models.losses import bounded_reward
from private_rlhf.reward_models.model import score_layer
from safetensors import SafetensorError


@dataclass(frozen=True)
class Scores:
    """(B,) float32 each: r̄, its uncertainty Γ ≥ 0, and the mean r̄ of π_ref's completions; 0 where left out."""

    reward: torch.Tensor
    bonus: torch.Tensor
    baseline: torch.Tensor

    @property
    def pessimistic(self) -> torch.Tensor:
        """r̂ = r̄ − Γ (PPKL Algorithm 1, step 3)."""
        return self.reward - self.bonus


@dataclass
class RewardScorer:
    """A reward checkpoint with the renderer of its tokenizer, which may differ from the policy's.

    use_bonus: compute Γ; use_baseline: the mean r̄ of π_ref's completions. Both need `add_reference` for each prompt.
    together: the weights are split over processes. references: by prompt, (d + 1,) float64, the mean gradient of r̄
    over π_ref's completions, then their mean r̄; (1,) without Γ. UserError: Γ without its statistics.
    """

    checkpoint: RewardCheckpoint
    renderer: Renderer
    batch_size: int = 64
    use_bonus: bool = True
    use_baseline: bool = False
    references: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    together: bool = False

    def __post_init__(self) -> None:
        if self.use_bonus and self.checkpoint.bonus is None:
            raise UserError("use_bonus must be False for a checkpoint without bonus statistics: set it, or fit them")

    def place(self, accelerator: Accelerator) -> None:
        """Put the reward model on the run's device. Where its layers are split over processes, all call `features` and
        `score` when one of them does, even without a text."""
        model = self.checkpoint.model
        score_layer(model.model).to(accelerator.device)
        self.together = is_sharded(split_frozen(accelerator, model.backbone))

    def features(
        self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None
    ) -> torch.Tensor:
        """Last-token features (B, d) float32 of each prompt and response. UserError for texts beyond its positions.

        A response cut at the cap is read with an end of turn, as all texts that r̄ was fitted on
        (`ppo.missing_eos_penalty`).
        """
        model, renderer = self.checkpoint.model, self.renderer
        texts = zip(prompts, responses, strict=True)
        rows = [renderer.prompt_ids(prompt) + renderer.response_ids(response) for prompt, response in texts]
        longest = max(map(len, rows), default=0)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise UserError(
                f"a prompt and a sampled response have {longest} tokens for the reward model, which has {positions} "
                "positions: lower model.max_response_tokens"
            )
        features = extract_features(
            model,
            rows,
            pad_token_id=renderer.tokenizer.pad_token_id,
            batch_size=self.batch_size,
            device=model.weight.device,
            progress=progress,
            together=self.together,
        )
        if self.together:
            free(model.backbone)
        return features

    def has_reference(self, prompt: Prompt) -> bool:
        """True where reference completions of `prompt` are known or not needed."""
        return not (self.use_bonus or self.use_baseline) or prompt_key(prompt) in self.references

    def add_reference(self, prompt: Prompt, features: torch.Tensor) -> None:
        """Centre Γ and the baseline at `prompt` with the features (K, d) of K completions of π_ref."""
        reference = self._reward(features).mean()[None].double()
        if self.use_bonus:
            assert self.checkpoint.bonus is not None
            reference = torch.cat([self.checkpoint.bonus.reference_gradient(features[None])[0], reference])
        self.references[prompt_key(prompt)] = reference

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None) -> Scores:
        """r̄ and Γ of each response; `add_reference` comes first for each prompt without `has_reference`."""
        return self.score_features(prompts, self.features(prompts, responses, progress))

    def score_features(self, prompts: Sequence[Prompt], features: torch.Tensor) -> Scores:
        """As `score`, from features (B, d)."""
        bonus = baseline = torch.zeros(len(features))
        if not prompts:  # a process may have none
            return Scores(bonus, bonus, baseline)
        if self.use_bonus or self.use_baseline:
            references = torch.stack([self.references[prompt_key(prompt)] for prompt in prompts])
        if self.use_baseline:
            baseline = references[:, -1].float()
        if not self.use_bonus:
            return Scores(self._reward(features), bonus, baseline)
        assert self.checkpoint.bonus is not None
        return Scores(*self.checkpoint.bonus.score_centred(features, references[:, :-1]), baseline)

    def _reward(self, features: torch.Tensor) -> torch.Tensor:
        """r̄ (B,) float32 on the CPU, where features and the statistics of Γ are, wherever the model is. Rewards under
        dropout may follow the features."""
        weight = self._weight
        return bounded_reward(features[..., : len(weight)].float() @ weight, self.checkpoint.model.reward_bound)

    @cached_property
    def _weight(self) -> torch.Tensor:
        """w (f,) float32 on the CPU, which waits for the device once and not for every prompt."""
        return self.checkpoint.model.weight.detach().float().cpu()


def load_scorer(
    path: Path, limits: ModelConfig, batch_size: int = 64, *, use_bonus: bool, use_baseline: bool = False
) -> RewardScorer:
    """The scorer of a reward checkpoint of this pipeline. limits: of the texts. UserError: incomplete checkpoint, no
    metadata, or Γ asked of a checkpoint without its statistics."""
    try:
        checkpoint = load_reward_checkpoint(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = one_line(str(error), 400)
        raise UserError(f"{path} must be a whole reward checkpoint ({cause}): run again with --from reward") from None
    if use_bonus and checkpoint.bonus is None:
        raise UserError(f"{path} must hold bonus statistics: fit it again with reward.kappa > 0, or set reward.kappa=0")
    return RewardScorer(checkpoint, make_renderer(limits, load_tokenizer(path)), batch_size, use_bonus, use_baseline)
