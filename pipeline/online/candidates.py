"""Candidates for questions: N answers of a policy to each prompt, with the features by which r̄ judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.lm.models import end_ids
from private_rlhf.reward_models.model import RewardModel


@dataclass(frozen=True)
class Candidates:
    """Of M prompts N answers each: `texts` M lists of N, `features` (M, N, d) float32 last-token features, and
    log_ratio (M, N) float32, log π_ref/π of the policy π that gave them, nats; 0 where that is π_ref."""

    prompts: list[Prompt]
    texts: list[list[str]]
    features: torch.Tensor
    log_ratio: torch.Tensor


@dataclass(frozen=True)
class CandidateSampler:
    """A policy whose answers are candidates, and the backbone that gives their features.

    policy: causal LM in evaluation mode. batch_size: of sampling and of features. reference: π_ref; None where the
    policy is. progress: show bars.
    """

    policy: Any
    backbone: RewardModel
    renderer: Renderer
    batch_size: int
    reference: Any | None = None
    progress: bool = False

    def draw(self, prompts: Sequence[Prompt], count: int, key: Callable[[int, int], int]) -> Candidates:
        """`count` answers of the policy to each prompt.

        key: noise key of answer k to prompt i, e.g. `candidate_key(seed, …)`; equal keys give equal answers, however
        prompts are spread over processes.
        """
        renderer, policy = self.renderer, self.policy
        ids = [renderer.prompt_ids(prompt) for prompt in prompts]
        rows = sample_responses(
            policy,
            [each for each in ids for _ in range(count)],
            [key(i, k) for i in range(len(prompts)) for k in range(count)],
            Sampling(renderer.max_response_tokens),
            pad_token_id=renderer.tokenizer.pad_token_id,
            eos_token_id=end_ids(policy, renderer.tokenizer),
            batch_size=self.batch_size,
            progress="candidates" if self.progress else None,
        )
        flat = [renderer.text(row) for row in rows]
        texts = [flat[start : start + count] for start in range(0, len(flat), count)]
        pairs = [
            (prompt, renderer.response_ids(text))
            for prompt, answers in zip(ids, texts, strict=True)
            for text in answers
        ]
        label = "their features" if self.progress else None
        features = self.features([prompt + response for prompt, response in pairs], label)
        shape = (len(texts), count)
        log_ratio = self._log_ratio(pairs).reshape(shape)
        return Candidates(list(prompts), texts, features.reshape(*shape, -1), log_ratio)

    def features(self, rows: Sequence[list[int]], progress: str | None = None) -> torch.Tensor:
        """(n, d) float32 last-token features of whole texts as token ids. progress: label of a bar."""
        pad, device = self.renderer.tokenizer.pad_token_id, self.backbone.weight.device
        return extract_features(
            self.backbone, rows, pad_token_id=pad, batch_size=self.batch_size, device=device, progress=progress
        )

    def _log_ratio(self, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """(n,) float32: log π_ref/π of responses to prompts, both as token ids."""
        if self.reference is None:
            return torch.zeros(len(pairs))
        device, pad = self.backbone.weight.device, self.renderer.tokenizer.pad_token_id
        ours, theirs = (
            mean_logprobs(model, pairs, pad_token_id=pad, batch_size=self.batch_size, device=device)
            for model in (self.policy, self.reference)
        )
        return torch.tensor([len(response) for _, response in pairs]) * torch.from_numpy(theirs - ours).float()


def candidate_key(seed: int, purpose: str) -> Callable[[int, int], int]:
    """Noise keys of a pool: a function of the seed, the purpose, the prompt's number and the answer's."""
    return lambda prompt, answer: sample_key(seed, "online", purpose, prompt, answer)
