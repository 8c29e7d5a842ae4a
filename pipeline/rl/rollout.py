"""The record of one PPO iteration: what was sampled, what it scored, and what learning starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import torch

from pipeline.rl.advantages import generalised_advantages, token_rewards, whiten


@dataclass
class Rollout:
    """All responses of one iteration, gathered from every process; B responses, C tokens, P prompt tokens.

    Trajectory
        prompts, responses: B token-id lists.
        mask: (B, C) float32, 1 on real response tokens.
        finished: (B,) bool, ended with end-of-turn.
    Policy
        logprobs, reference_logprobs: (B, C) float32, under the sampling policy and π_ref, 0 where masked.
    Value
        values: (B, C) float32, 0 where masked.
    Outcome
        reward, bonus: (B,) float32, r̄ and Γ.
        baseline: (B,) float32, mean r̄ of π_ref's completions of the same prompt. A shift per prompt changes no
            optimum (DESIGN 4.3), so learning subtracts it: what remains is what the response did, not the prompt.
        scores: (B,) float32, r̂ = r̄ − Γ less the missing-EOS penalty.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    mask: torch.Tensor
    finished: torch.Tensor
    logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    values: torch.Tensor
    reward: torch.Tensor
    bonus: torch.Tensor
    baseline: torch.Tensor
    scores: torch.Tensor

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                raise FloatingPointError(f"rollout field '{item.name}' is not finite: stopping before the update")

    @property
    def log_ratio(self) -> torch.Tensor:
        """(B, C) log π − log π_ref of the sampled tokens."""
        return (self.logprobs - self.reference_logprobs) * self.mask

    @property
    def kl(self) -> torch.Tensor:
        """(B,) k1 estimate of the sequence KL, nats."""
        return self.log_ratio.sum(dim=1)


@dataclass(frozen=True)
class Targets:
    """(B, C) advantages (whitened if asked) and returns."""

    advantages: torch.Tensor
    returns: torch.Tensor


def learning_targets(
    rollout: Rollout, *, kl_coef: float, estimator: str, gamma: float, lam: float, whiten_advantages: bool
) -> Targets:
    """Advantages and returns of a whole iteration; whitening uses the global statistics."""
    rewards = token_rewards(rollout.scores - rollout.baseline, rollout.log_ratio, rollout.mask, kl_coef, estimator)
    advantages, returns = generalised_advantages(rewards, rollout.values, rollout.mask, gamma, lam)
    if whiten_advantages:
        advantages = whiten(advantages, rollout.mask)
    return Targets(advantages, returns)


def minibatch_order(prompts: Sequence[Sequence[int]], minibatch_size: int, seed: int) -> list[list[int]]:
    """A permutation of the rollouts cut into minibatches; neighbours with equal prompts stay together.

    A pure function of its arguments; without repeated prompts a plain permutation.
    """
    groups = [[i for i, _ in rows] for _, rows in groupby(enumerate(map(tuple, prompts)), key=lambda pair: pair[1])]
    generator = torch.Generator().manual_seed(seed)
    order = [i for group in torch.randperm(len(groups), generator=generator).tolist() for i in groups[group]]
    return [order[start : start + minibatch_size] for start in range(0, len(order), minibatch_size)]


def by_length(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], rows: Iterable[int]) -> list[int]:
    """`rows` in an order for micro-batches: equal prompts side by side, groups of like size together."""
    picked = list(rows)
    sizes: dict[tuple[int, ...], int] = {}
    for row in picked:
        key = tuple(prompts[row])
        sizes[key] = sizes.get(key, len(key)) + len(responses[row])
    return sorted(picked, key=lambda row: (sizes[tuple(prompts[row])], tuple(prompts[row]), len(responses[row])))
