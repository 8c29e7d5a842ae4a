"""A forecast of what n labels at ε bring, before anyone is asked: rewards learnt from simulated people's labels.

A simulated reward is linear in coordinates of answers and as strong as the agreement of two people says, which is
stated or read from pilot labels. n labels of random pairs follow Bradley–Terry and are randomised; `private_likelihood`
with the ridge of the largest evidence learns from them, as `reward.ridge: evidence` does. Its policy is the Gibbs
policy among the answers to a prompt, π ∝ exp(r̂/kl_coef), and is judged by the simulated reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise
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
DELTA = 1e-6  # of central trust
PILOT_DRAWS, PILOT_SCALES = 600, np.geomspace(0.1, 8.0, 20)  # nats: people agree on 50 % to 90 %

Terms = float | tuple[tuple[float, float], ...]
"""ε of every label, or (ε, share of the labels) by rising ε."""


def noise_of(terms: Terms, count: int) -> LabelNoise | LevelledNoise:
    """The noise of labels; each ε has its share of the first of them as of all."""
    if not isinstance(terms, tuple):
        return LabelNoise.of(terms)
    epsilons, shares = zip(*terms, strict=True)
    even = np.arange(count) * 0.6180339887498949 % 1.0  # multiples of the golden ratio spread evenly, however many
    return LevelledNoise(tuple(map(LabelNoise.of, epsilons)), np.searchsorted(np.cumsum(shares)[:-1], even, "right"))


def agreement_of(scale: float) -> float:
    """P(two people prefer the same of two answers), in [½, 1): Bradley–Terry, margins N(0, scale²) nats."""
    coin, _ = integrate.quad(lambda z: math.exp(-z * z / 2) * (p := special.expit(scale * z)) * (1.0 - p), -9, 9)
    return 1.0 - 2.0 * float(coin) / math.sqrt(2.0 * math.pi)


def margin_scale(agreement: float) -> float:
    """The standard deviation of the margin, nats, at which two people agree with that probability, in (½, 1)."""
    return float(optimize.brentq(lambda scale: agreement_of(scale) - agreement, 1e-3, 1e3))


@dataclass(frozen=True)
class Answers:
    """Coordinates x (M, N, k) float64 of N answers to each of M prompts, in a `pair_basis`."""

    x: Tensor

    @classmethod
    def normal(cls, moments: Tensor | None = None) -> Answers:
        """Answers of a model that is not there yet: independent normal features, 32 or with these `moments` (k,)."""
        moments = torch.ones(FEATURES, dtype=torch.float64) if moments is None else moments
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(PROMPTS, ANSWERS, len(moments), generator=generator, dtype=torch.float64)
        return cls(noise * (moments / 2.0).sqrt())

    @cached_property
    def differences(self) -> Tensor:
        """(P, k): of every pair of answers to the same prompt."""
        one, other = torch.triu_indices(self.x.shape[1], self.x.shape[1], offset=1)
        return (self.x[:, one] - self.x[:, other]).flatten(0, 1)

    @cached_property
    def moments(self) -> Tensor:
        """(k,): mean squares of the differences."""
        return self.differences.square().mean(dim=0).clamp(min=1e-12)

    def reward(self, number: int, generator: torch.Generator) -> Tensor:
        """θ (k,) of simulated reward `number`, with margins of a standard deviation of 1 nat."""
        theta = torch.randn(len(self.moments), generator=generator, dtype=torch.float64)
        theta *= self.moments ** (TILTS[number % len(TILTS)] / 2)
        return theta / (self.differences @ theta).square().mean().sqrt()

    @cached_property
    def weights(self) -> Tensor:
        """(k, 2): the variance of θ of simulated rewards, by tilt."""
        return torch.stack([self.moments**t / (self.moments ** (1.0 + t)).sum() for t in TILTS], dim=1)

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
    cells: Sequence[tuple[int, Terms]],
    scales: Sequence[float],
    kl_coef: float,
    held: Answers | None = None,
) -> list[Forecast]:
    """The forecast of each (labels n, terms). Cells share rewards, pairs, true labels and coins.

    scales: the standard deviation of the margin of each simulated reward, nats (`margin_scale`). held: answers that
    judge; by default those that are asked about.
    """
    judged, results = held or answers, np.zeros((len(cells), 3, len(scales)))
    for number, scale in enumerate(tqdm(scales, desc="simulated rewards", leave=False)):
        generator = torch.Generator().manual_seed(number)
        theta = scale * answers.reward(number, generator)
        most = max(labels for labels, _ in cells)
        rows = answers.differences[torch.randint(len(answers.differences), (most,), generator=generator)]
        coins = torch.rand(2, most, generator=generator, dtype=torch.float64)
        true = torch.where(coins[0] < torch.sigmoid(rows @ theta), 1.0, -1.0).double()
        learnt = {cell: learn(rows[: cell[0]], true, coins[1], cell[1])
                  for cell in {*cells, *((labels, math.inf) for labels, _ in cells)}}  # fmt: skip
        for place, (labels, terms) in enumerate(cells):
            gains = [judged.gain(theta, learnt[labels, each], kl_coef) for each in (terms, math.inf)]
            ordered = (judged.differences @ learnt[labels, terms]) * (judged.differences @ theta) > 0
            results[place, :, number] = *gains, float(ordered.double().mean())
    return [Forecast(*cell) for cell in results]


def learn(rows: Tensor, true: Tensor, coins: Tensor, terms: Terms) -> Tensor:
    """θ̂ (k,) of labels of pairs that differ by rows (n, k), flipped where a coin says so, each read at its own ε; true
    ±1 and coins, n or more."""
    noise, zeros, count = noise_of(terms, len(rows)), torch.zeros_like(rows), len(rows)
    label = torch.where(1.0 - coins[:count] > torch.as_tensor(noise.flip_prob), true[:count], -true[:count])
    problem = pair_problem(rows, zeros, label, noise, identity_basis(rows.shape[1]), None, "private_likelihood")
    ridge = ridge_by_evidence(rows, zeros, label, noise, None)
    return minimize(problem, ridge, torch.zeros(rows.shape[1], dtype=torch.float64), tolerance=1e-6)


def pilot_scales(answers: Answers, x: Tensor, noise: LabelNoise | LevelledNoise, rewards: int) -> list[float]:
    """The standard deviation of the margin, nats, as pilot labels tell it: 2.5 %, 50 % and 97.5 % of what is believed
    after them, and as many even quantiles as rewards are simulated.

    x (n, k): coordinates of the answer that label i prefers less those of the other; noise: of the labels. Labels of a
    strong reward go together: S = Σ f_i f_j x_i·W x_j is large, f = 2α − 1, W the variance of rewards of a tilt. Both
    log S are normal with the moments that they have for simulated rewards, labels and coins on these pairs. Before the
    pilot every agreement of `PILOT_SCALES` is believed alike, and so are tilts.
    """
    factor, generator = torch.as_tensor(noise.factor, dtype=torch.float64), torch.Generator().manual_seed(0)
    margins = torch.stack([x @ answers.reward(number, generator) for number in range(PILOT_DRAWS)])
    coins = torch.rand(margins.shape, generator=generator, dtype=torch.float64)

    def together(labels: Tensor) -> np.ndarray:
        return np.log((((labels * factor) @ x).square() @ answers.weights).numpy())

    measured, logs = together(torch.ones(1, len(x), dtype=torch.float64))[0], []
    for scale in PILOT_SCALES:
        drawn = together(torch.sign(factor * torch.tanh(scale * margins / 2.0) + 1.0 - 2.0 * coins))
        laws = [drawn[place :: len(TILTS)] for place in range(len(TILTS))]
        moments = ((law.mean(axis=0), np.cov(law.T) + 1e-9 * np.eye(2)) for law in laws)
        logs.append([stats.multivariate_normal.logpdf(measured, *each) for each in moments])
    believed = np.exp(logs - np.max(logs)).sum(axis=1) * np.gradient([agreement_of(scale) for scale in PILOT_SCALES])
    below = (np.cumsum(believed) - believed / 2.0) / believed.sum()
    quantiles = [0.025, 0.5, 0.975, *((number + 0.5) / rewards for number in range(rewards))]
    return [float(scale) for scale in np.interp(quantiles, below, PILOT_SCALES)]


def central_worth(answers: Answers, labels: int, epsilon: float) -> int:
    """True labels that carry as much as one noisy sum of the features of all preferred answers, (ε, `DELTA`)-private.

    docs/explanation/central-label-dp.md: features x are clipped at their median norm c, and the sum has the variance
    H + vI, H = Σ xxᵀ/4, v = c²/(2ρ): a share h/(h + v) is signal. Directions weigh what they weigh in rewards.
    """
    norm = answers.differences.norm(dim=1, keepdim=True)
    clip = norm.median()
    square = (answers.differences * clip / norm.clamp(min=clip)).square().mean(dim=0)
    share = square / (square + 4.0 * clip**2 / (2.0 * zcdp_rho(epsilon, DELTA) * labels))
    return max(2, round(labels * float((answers.weights.mean(dim=1) * square * share).sum())))
