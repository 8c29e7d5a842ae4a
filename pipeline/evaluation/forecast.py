"""A forecast of what n labels at ε bring, before anyone is asked: rewards learnt from simulated people's labels.

A simulated reward is linear in coordinates of answers and as strong as the agreement of two people says. n labels of
random pairs follow Bradley–Terry and are randomised; `private_likelihood` with the ridge of the largest evidence learns
from them, as `reward.ridge: evidence` does. Its policy is the Gibbs policy among the answers to a prompt, π ∝
exp(r̂/kl_coef), and is judged by the simulated reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import identity_basis
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.reward_models.linear import minimize, pair_problem
from private_rlhf.reward_models.ridge import ridge_by_evidence
from scipy import integrate, optimize, special, stats
from torch import Tensor
from tqdm import tqdm

FEATURES, PROMPTS, ANSWERS = 32, 200, 32
TILTS = (0.0, -1.0)
"""θ's variance in a direction of second moment m is m^tilt: leading directions of the answers decide, or all alike."""


def agreement_of(scale: float) -> float:
    """P(two people prefer the same of two answers), in [½, 1): Bradley–Terry, margins N(0, scale²) nats."""
    coin, _ = integrate.quad(lambda z: stats.norm.pdf(z) * special.expit(scale * z) * special.expit(-scale * z), -9, 9)
    return 1.0 - 2.0 * float(coin)


def margin_scale(agreement: float) -> float:
    """The standard deviation of the margin, nats, at which two people agree with that probability, in (½, 1)."""
    return float(optimize.brentq(lambda scale: agreement_of(scale) - agreement, 1e-3, 1e3))


@dataclass(frozen=True)
class Answers:
    """Coordinates x (M, N, k) float64 of N answers to each of M prompts, in a `pair_basis`."""

    x: Tensor

    @classmethod
    def normal(cls, seed: int = 0) -> Answers:
        """Answers of a model that is not there yet: 32 independent normal features."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(PROMPTS, ANSWERS, FEATURES, generator=generator, dtype=torch.float64)
        return cls(noise / math.sqrt(2.0))

    @cached_property
    def differences(self) -> Tensor:
        """(P, k): of every pair of answers to the same prompt."""
        one, other = torch.triu_indices(self.x.shape[1], self.x.shape[1], offset=1)
        return (self.x[:, one] - self.x[:, other]).flatten(0, 1)

    def gain(self, theta: Tensor, learnt: Tensor, kl_coef: float) -> float:
        """J = E[θx] − kl_coef·KL of the Gibbs policy of `learnt` (k,), less that of π_ref, by θ (k,)."""
        policy = gibbs_weights((self.x @ learnt).numpy(), kl_coef)
        reward = ((policy - 1.0 / policy.shape[1]) * (self.x @ theta).numpy()).sum(axis=1)
        return float((reward - kl_coef * kl_from_uniform(policy)).mean())


@dataclass(frozen=True)
class Forecast:
    """Over R simulated rewards, (R,) each: J gain; that of as many true labels; and the share of pairs of answers that
    the learnt reward orders as the true one does."""

    gain: np.ndarray
    public_gain: np.ndarray
    right: np.ndarray

    @property
    def retained(self) -> np.ndarray:
        """(R,) in [0, 1]: the gain as a share of that of as many true labels, clipped; 0 where those gain nothing."""
        return np.clip(self.gain / np.where(self.public_gain > 0.0, self.public_gain, np.inf), 0.0, 1.0)


def middle(values: np.ndarray) -> tuple[float, float, float]:
    """Median, 5 % and 95 %."""
    low, centre, high = np.quantile(values, [0.05, 0.5, 0.95])
    return float(centre), float(low), float(high)


def forecasts(
    answers: Answers,
    cells: Sequence[tuple[int, float]],
    agreement: float,
    kl_coef: float,
    rewards: int = 20,
    held: Answers | None = None,
) -> list[Forecast]:
    """The forecast of each (labels n, ε). Cells share rewards, pairs, true labels and coins.

    agreement: of two people, in (½, 1). held: answers that judge; by default those that are asked about.
    """
    judged, scale = held or answers, margin_scale(agreement)
    moments = answers.differences.square().mean(dim=0).clamp(min=1e-12)
    results = np.zeros((len(cells), 3, rewards))
    for number in tqdm(range(rewards), desc="simulated rewards", leave=False):
        generator = torch.Generator().manual_seed(number)
        theta = torch.randn(len(moments), generator=generator, dtype=torch.float64)
        theta *= moments ** (TILTS[number % len(TILTS)] / 2)
        theta *= scale / (answers.differences @ theta).square().mean().sqrt()
        most = max(labels for labels, _ in cells)
        rows = answers.differences[torch.randint(len(answers.differences), (most,), generator=generator)]
        coins = torch.rand(2, most, generator=generator, dtype=torch.float64)
        true = torch.where(coins[0] < torch.sigmoid(rows @ theta), 1.0, -1.0).double()
        learnt = {cell: learn(rows[: cell[0]], true, coins[1], cell[1])
                  for cell in {*cells, *((labels, math.inf) for labels, _ in cells)}}  # fmt: skip
        for place, (labels, epsilon) in enumerate(cells):
            gains = [judged.gain(theta, learnt[labels, each], kl_coef) for each in (epsilon, math.inf)]
            ordered = (judged.differences @ learnt[labels, epsilon]) * (judged.differences @ theta) > 0
            results[place, :, number] = *gains, float(ordered.double().mean())
    return [Forecast(*cell) for cell in results]


def learn(rows: Tensor, true: Tensor, coins: Tensor, epsilon: float) -> Tensor:
    """θ̂ (k,) of labels of pairs that differ by rows (n, k), flipped at ε where a coin says so; true ±1 and coins, n
    or more."""
    noise, zeros, count = LabelNoise.of(epsilon), torch.zeros_like(rows), len(rows)
    label = torch.where(coins[:count] < noise.keep_prob, true[:count], -true[:count])
    problem = pair_problem(rows, zeros, label, noise, identity_basis(rows.shape[1]), None, "private_likelihood")
    ridge = ridge_by_evidence(rows, zeros, label, noise, None)
    return minimize(problem, ridge, torch.zeros(rows.shape[1], dtype=torch.float64), tolerance=1e-6)
