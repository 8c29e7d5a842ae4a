"""Scores responses with a reward model: r̄ and the centred uncertainty Γ, from the text that was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from pipeline.data.render import Prompt, Renderer
from pipeline.lm.generate import pad_right


@dataclass(frozen=True)
class Scores:
    """(B,) float32 each: the estimate r̄ and its uncertainty Γ ≥ 0 (0 without reference completions)."""

    reward: torch.Tensor
    bonus: torch.Tensor

    @property
    def pessimistic(self) -> torch.Tensor:
        """r̂ = r̄ − Γ (PPKL Algorithm 1, step 3)."""
        return self.reward - self.bonus


@dataclass
class RewardScorer:
    """A reward model with the renderer of its own tokenizer, so that it may differ from the policy's.

    Attributes:
        model: a `reward_models` model: `features(input_ids, attention_mask)` and `score(features, reference)`.
        renderer: renders text for the reward model.
        batch_size: sequences per forward pass.
        use_bonus: whether Γ is computed; it needs reference completions.
    """

    model: Any
    renderer: Renderer
    batch_size: int = 64
    use_bonus: bool = True
    _references: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def sequence(self, prompt: Prompt, response: str) -> list[int]:
        """Token ids of prompt and response for the reward model."""
        return self.renderer.prompt_ids(prompt) + self.renderer.response_ids(response)

    @torch.no_grad()
    def features(
        self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None
    ) -> torch.Tensor:
        """Last-token features (B, d) float32 of each prompt and response; short sequences are batched together."""
        rows = [self.sequence(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        found: dict[int, torch.Tensor] = {}
        pad = self.renderer.tokenizer.pad_token_id
        bar = tqdm(total=len(rows), desc=progress, unit="text", disable=progress is None, leave=False)
        for start in range(0, len(order), self.batch_size):
            picked = order[start : start + self.batch_size]
            ids, mask = pad_right([rows[index] for index in picked], pad, self.model.device)
            for index, row in zip(picked, self.model.features(ids, mask).float().cpu(), strict=True):
                found[index] = row
            bar.update(len(picked))
        bar.close()
        return torch.stack([found[index] for index in range(len(rows))])

    def has_reference(self, prompt: Prompt) -> bool:
        """Whether reference completions of `prompt` are known, or not needed."""
        return not self.use_bonus or repr(prompt) in self._references

    def add_reference(self, prompt: Prompt, features: torch.Tensor) -> None:
        """Keeps the features (K, d) of K completions of π_ref, which centre Γ."""
        self._references[repr(prompt)] = features

    def reference(self, prompt: Prompt) -> torch.Tensor:
        """The kept features (K, d) of `prompt`."""
        return self._references[repr(prompt)]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None) -> Scores:
        """r̄ and Γ of each response; `add_reference` must have been called for every prompt when Γ is used."""
        features = self.features(prompts, responses, progress)
        if not self.use_bonus:
            return Scores(self.model.reward(features), torch.zeros(len(features)))
        references = torch.stack([self.reference(prompt) for prompt in prompts])
        reward, bonus = self.model.score(features, references)
        return Scores(reward.float(), bonus.float())
