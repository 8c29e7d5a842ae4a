"""Arms of POKL Algorithm 2 beside the product's: other ways to draw the second response, other estimators; and traces
that also hold what Theorem 5.2 bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation import regret
from private_rlhf.validation.bandits import Array, factor
from private_rlhf.validation.regret import ESTIMATOR, REFRESH, World, play, stretches

Exploration = Literal["optimism", "none", "uniform", "reference", "posterior"]
POSTERIOR_MEAN = "posterior_mean"


@dataclass(frozen=True)
class Arm:
    """estimator: a name of `reward_models.losses`, or POSTERIOR_MEAN, the mean member given the private labels (uniform
    prior, likelihood of Eq. 9), whose Gibbs policy has the largest expected J. exploration, how the second response
    is drawn:

    - optimism: π² ∝ π¹ exp(b/kl_coef), c = `constant` in Γ_T, b at most `clip` (None: 2B);
    - none: b = 0, so π² = π¹ and both responses come from π¹;
    - uniform: π² = (1−γ_t) π¹ + γ_t uniform, γ_t = min(1, m/((2α−1)² t)), m = `mixture`;
    - reference: π² = π_ref;
    - posterior: π² = Σ_n w_n π_n, the Gibbs policy of a member drawn from that posterior (Thompson sampling of the
      second response); with POSTERIOR_MEAN.
    """

    name: str
    exploration: Exploration
    estimator: str = ESTIMATOR
    constant: float = 0.2
    mixture: float = 0.0
    clip: float | None = None


@dataclass(frozen=True)
class Trace(regret.Trace):
    """Also cumulative (K, R): regret of π¹, promised = Σ 4 E_{π²} b²/kl_coef and eluder = Σ min(1, U(s_t, a²_t)²), U as
    of the last refresh. Per world (R,): failed, the share of rounds in which r̄ + b + c(s) >= r* was violated somewhere;
    saturated, the share of rounds and (s, a) with b at its clip. The last four are 0 without optimism.
    """

    arm: Arm
    epsilon: float
    regret_exploiting: Array
    promised: Array
    eluder: Array
    failed: Array
    saturated: Array


def proof_constant(bound: float) -> float:
    """The c for which Γ_T²/2 is the error bound of Lemma C.3: 4 (e^−B + 2 + e^B)/e^B."""
    return 4.0 * (math.exp(-bound) + 2.0 + math.exp(bound)) / math.exp(bound)


class Learner(regret.Learner):
    """The state of an arm in all worlds."""

    def __init__(self, world: World, arm: Arm, epsilon: float, horizon: int) -> None:
        loss = "private_likelihood" if arm.estimator == POSTERIOR_MEAN else arm.estimator
        super().__init__(world, epsilon, horizon, arm.constant, arm.clip, loss)
        self.arm = arm
        self.estimate = np.full(world.bandit.reward.shape, np.nan)

    def estimated(self, loss: Array) -> Array:
        """r̄ (R, S, A), of the likeliest member or of the posterior."""
        if self.arm.estimator != POSTERIOR_MEAN:
            return super().estimated(loss)
        return np.asarray(np.einsum("rn,rnsa->rsa", posterior(loss), self.world.members))

    def second_policy(self, loss: Array, rounds: int) -> Array:
        """log π² of the arm, (R, S, A)."""
        bandit = self.world.bandit
        if self.arm.exploration == "optimism":
            return super().second_policy(loss, rounds)
        if self.arm.exploration == "uniform":
            share = min(1.0, self.arm.mixture / (factor(self.epsilon) ** 2 * rounds))
            return np.asarray(np.log((1.0 - share) * np.exp(self.exploit) + share / self.exploit.shape[-1]))
        if self.arm.exploration == "posterior":
            policies = gibbs_log_policy(self.world.members, bandit.log_reference[:, None], bandit.kl_coef)
            mixed = np.einsum("rn,rnsa->rsa", posterior(loss), np.exp(policies))
            return np.asarray(np.log(mixed / mixed.sum(axis=-1, keepdims=True)))
        return self.exploit if self.arm.exploration == "none" else self.explore

    def violated(self) -> Array:
        """1 where r̄ + b + c(s) < r* somewhere, c(s) = E_{π¹}[r* − r̄], (R,) of 0 and 1; 0 before the first refresh."""
        error = self.world.bandit.reward - self.estimate
        centred = error - (np.exp(self.exploit) * error).sum(axis=-1, keepdims=True)
        return (centred > self.bonus + 1e-12).any(axis=(1, 2)).astype(np.float64)


def posterior(loss: Array) -> Array:
    """Weights (R, N) of the members, summed negative log-likelihoods given, under a uniform prior."""
    weight = np.exp(loss.min(axis=1, keepdims=True) - loss)
    return np.asarray(weight / weight.sum(axis=1, keepdims=True))


def simulate(world: World, arm: Arm, epsilon: float, horizon: int, seed: int, refresh: int = REFRESH) -> Trace:
    """One arm in all worlds for `horizon` rounds; the same seed gives arms the same random stream."""
    learner, lengths = Learner(world, arm, epsilon, horizon), stretches(horizon, refresh)
    bandit, totals = world.bandit, []
    failed, saturated = np.zeros((2, len(world.members)))
    for length, drawn in play(learner, lengths, seed):
        promised = 4.0 / bandit.kl_coef * (np.exp(learner.explore) * learner.bonus**2).sum(axis=-1).mean(axis=-1)
        eluder = (drawn.sum(axis=2) * np.minimum(1.0, learner.uncertainty**2)).sum(axis=(1, 2))
        gaps = [length * bandit.suboptimality(policy) for policy in (learner.explore, learner.exploit)]
        totals.append(np.stack([*gaps, length * promised, eluder]))
        if arm.exploration == "optimism":
            failed += length * learner.violated()
            saturated += length * (learner.bonus >= learner.clip).mean(axis=(1, 2))
    both, exploiting, promises, eluders = np.cumsum(totals, axis=0).swapaxes(0, 1)
    return Trace(np.cumsum(lengths), both, arm, epsilon, exploiting, promises, eluders, failed / horizon,
                 saturated / horizon)  # fmt: skip
