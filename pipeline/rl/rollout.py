"""The record of one PPO iteration: what was sampled, what it scored, and what learning starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from private_rlhf.lm.generate import sample_key
from private_rlhf.lm.rows import Sharing, batches
from private_rlhf.rl.nonfinite import NonFiniteError, nonfinite_rows, tensor_statistics
from private_rlhf.rl.ppo_losses import generalised_advantages, token_rewards, whiten


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
            optimum, so learning subtracts it: what remains is what the response did, not the prompt.
        scores: (B,) float32, r̂ = r̄ − Γ less the missing-EOS penalty, plus the weighted extra rewards.
        extra: (B, K) float32, the K extra rewards before their weights.
        extra_weights: K weights.
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
    extra: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    extra_weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        """Raises NonFiniteError, with the rows of the bad values, when a field is not finite."""
        for item in sorted(fields(self), key=lambda item: item.name != "extra"):  # what the scores are made of, first
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                raise NonFiniteError(
                    f"rollout field '{item.name}' is not finite: stopping before the update",
                    {"tensor": item.name, "statistics": tensor_statistics(value)},
                    [self.row_facts(row) for row in nonfinite_rows(value)],
                )

    def row_facts(self, row: int) -> dict[str, Any]:
        """Token ids and scores of a row, for a dump."""
        names = ("reward", "bonus", "baseline", "scores")
        return {
            "row": row,
            "prompt_ids": self.prompts[row],
            "response_ids": self.responses[row],
            **{name: float(getattr(self, name)[row]) for name in names},
            "extra": self.extra[row].tolist() if self.extra.numel() else [],
        }

    @property
    def weighted_extra(self) -> torch.Tensor:
        """(B,) what the extra rewards add to the scores; 0 where there are none."""
        return weighted_sum(self.extra, self.extra_weights) if self.extra.numel() else torch.zeros_like(self.scores)

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


def join_responses(
    rows: Sequence[Sequence[Any]],
    ends: Collection[int],
    missing_eos_penalty: float,
    device: torch.device,
    extra_weights: Sequence[float] = (),
) -> Rollout:
    """All responses of one iteration as padded tensors on `device`; one is finished if its last token is in `ends`.

    rows: of each response its prompt and itself as token ids; log π, log π_ref and value of each token; r̄, Γ, baseline;
        and the extra rewards.

    Raises:
        NonFiniteError: a number of a response is NaN or infinite.
    """
    prompts, responses, *numbers = map(list, zip(*rows, strict=True))
    logprobs, reference_logprobs, values = (pad_numbers(column, device) for column in numbers[:3])
    reward, bonus, baseline, extra = (torch.tensor(each, dtype=torch.float32, device=device) for each in numbers[3:])
    finished = torch.tensor([response[-1] in ends for response in responses], device=device)
    scores = reward - bonus - missing_eos_penalty * (~finished).float()
    return Rollout(
        prompts=prompts,
        responses=responses,
        mask=pad_numbers([[1.0] * len(response) for response in responses], device),
        finished=finished,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        values=values,
        reward=reward,
        bonus=bonus,
        baseline=baseline,
        scores=scores + weighted_sum(extra, extra_weights) if extra_weights else scores,
        extra=extra,
        extra_weights=extra_weights,
    )


def weighted_sum(extra: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(B, K) rewards and K weights -> (B,) their weighted sum."""
    return (extra * torch.tensor(weights, dtype=torch.float32, device=extra.device)).sum(dim=1)


def pad_numbers(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """(B, C) float32, rows padded with 0 on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float32, device=device)


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
    return cut(order, minibatch_size)


def summary_of(history: Sequence[Mapping[str, Any]]) -> str:
    """A stage's one line: the first r̂, and means of r̂ and KL over the last five iterations."""
    tail = history[-5:]
    score, kl = (sum(entry[name] for entry in tail) / len(tail) for name in ("score", "kl"))
    return (
        f"{len(history)} iterations, {sum(entry['rollouts'] for entry in history)} responses, "
        f"r̂ {history[0]['score']:.2f} → {score:.2f}, KL {kl:.2f} nats"
    )


def cut(rows: Sequence[int], size: int) -> list[list[int]]:
    """`rows` in pieces of `size`, the last one shorter if they do not divide."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def prompt_index(position: int, count: int, seed: int) -> int:
    """The index, below `count`, of the prompt at `position` of an endless sequence of seeded permutations."""
    epoch, offset = divmod(position, count)
    return int(_prompt_order(epoch, count, seed)[offset])


@lru_cache(maxsize=2)  # a rollout asks for one after another; at a million prompts each order takes 10 ms
def _prompt_order(epoch: int, count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(sample_key(seed, "prompts", epoch)))


def shares(
    rollout: Rollout, picked: Sequence[int], size: int, process: int, processes: int, sharing: Sharing | None
) -> list[list[int]]:
    """The rows of a minibatch that one of several processes takes, in micro-batches.

    All processes have equally many, as their forward and backward passes are joint ones: where one has less, some are
    empty. sharing: `private_rlhf.lm.rows.sharing_of` the model.
    """
    found = []
    for start in range(processes):
        own = list(picked[start::processes])
        texts = [[*rollout.prompts[row], *rollout.responses[row]] for row in own]
        found.append([[own[place] for place in batch] for batch in batches(texts, sharing, size)])
    mine = found[process]
    return mine + [[] for _ in range(max(map(len, found)) - len(mine))]
