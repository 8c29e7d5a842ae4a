"""What may be asked about: N answers of a policy to each prompt, with the features by which r̄ judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.likelihood import mean_logprobs
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


def draw_candidates(
    policy: Any,
    backbone: RewardModel,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    count: int,
    key: Callable[[int, int], int],
    batch_size: int,
    reference: Any | None = None,
    show: bool = False,
) -> Candidates:
    """`count` answers of the policy to each prompt.

    policy: causal LM in evaluation mode. key: noise key of answer k to prompt i, e.g. `candidate_key(seed, …)`; equal
    keys give equal answers, however prompts are spread over processes. batch_size: of sampling and of features.
    reference: π_ref; None where the policy is.
    """
    ids = [renderer.prompt_ids(prompt) for prompt in prompts]
    rows = sample_responses(
        policy,
        [each for each in ids for _ in range(count)],
        [key(i, k) for i in range(len(prompts)) for k in range(count)],
        Sampling(renderer.max_response_tokens),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(policy, renderer.tokenizer),
        batch_size=batch_size,
        progress="candidates" if show else None,
    )
    flat = [renderer.text(row) for row in rows]
    texts = [flat[start : start + count] for start in range(0, len(flat), count)]
    rows_of = [(own, renderer.response_ids(text)) for own, answers in zip(ids, texts, strict=True) for text in answers]
    features = extract_features(
        backbone,
        [own + response for own, response in rows_of],
        pad_token_id=renderer.tokenizer.pad_token_id,
        batch_size=batch_size,
        device=backbone.weight.device,
        progress="their features" if show else None,
    )
    log_ratio = torch.zeros(len(rows_of))
    if reference is not None:
        device, pad = backbone.weight.device, renderer.tokenizer.pad_token_id
        ours, theirs = (
            mean_logprobs(model, rows_of, pad_token_id=pad, batch_size=batch_size, device=device)
            for model in (policy, reference)
        )
        log_ratio = torch.tensor([len(response) for _, response in rows_of]) * torch.from_numpy(theirs - ours).float()
    return Candidates(
        list(prompts), texts, features.reshape(len(texts), count, -1), log_ratio.reshape(len(texts), count)
    )


def candidate_key(seed: int, purpose: str) -> Callable[[int, int], int]:
    """Noise keys of a pool: a function of the seed, the purpose, the prompt's number and the answer's."""
    return lambda prompt, answer: sample_key(seed, "online", purpose, prompt, answer)
