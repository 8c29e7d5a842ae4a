"""A Python function as the reward of PPO, behind the interface of a reward model's scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from private_rlhf.data.render import Prompt, prompt_key
from private_rlhf.reward_models.external import checked
from private_rlhf.reward_models.scorer import Scores

RewardFunction = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]
"""(prompts, response texts) -> one finite number per response."""


@dataclass
class FunctionScorer:
    """A reward function in the place of a `RewardScorer`: r̄ is its value and Γ is 0.

    Attributes:
        function: called with B prompts and B response texts.
        use_baseline: subtract the mean reward of π_ref's completions of the prompt.
        references: by prompt, (1,) float32, that mean. Filled by `add_reference`.
        together: False, since a function needs no joint forward pass of all processes.
    """

    function: RewardFunction
    use_baseline: bool = True
    references: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    together: bool = False

    def has_reference(self, prompt: Prompt) -> bool:
        """True where reference completions of `prompt` are known or not needed."""
        return not self.use_baseline or prompt_key(prompt) in self.references

    def features(
        self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None
    ) -> torch.Tensor:
        """(B, 1) float32 rewards. UserError unless the function gives one finite number per response."""
        values = self.function(list(prompts), list(responses)) if prompts else []
        return checked(values, responses, "the reward function")[:, None]

    def add_reference(self, prompt: Prompt, features: torch.Tensor) -> None:
        """Set the baseline of `prompt` from the rewards (K, 1) of K completions of π_ref."""
        self.references[prompt_key(prompt)] = features.mean()[None]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], progress: str | None = None) -> Scores:
        """(B,) rewards, with Γ = 0; `add_reference` comes first for each prompt without `has_reference`."""
        return self.score_features(prompts, self.features(prompts, responses, progress))

    def score_features(self, prompts: Sequence[Prompt], features: torch.Tensor) -> Scores:
        """As `score`, from rewards (B, 1)."""
        reward = features[:, 0]
        baseline = torch.zeros_like(reward)
        if self.use_baseline and prompts:
            baseline = torch.cat([self.references[prompt_key(prompt)] for prompt in prompts])
        return Scores(reward, torch.zeros_like(reward), baseline)
