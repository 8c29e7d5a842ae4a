"""Two other arms with the same number of answers at the same ε, for runs whose truth is known; no stage reads them.

passive   pairs of answers of π_ref, r̄ refitted after each round
offline   the same answers, collected before anything is learnt; the policy is PPKL Algorithm 1's, pessimistic about r̄
"""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.online.pool import Pool
from private_rlhf.online.posterior import Learner
from private_rlhf.online.rounds import regret_of
from private_rlhf.online.strategies import choose
from private_rlhf.recipe import OnlineConfig
from torch import Tensor


def other_arms(
    pool: Pool, learner: Learner, settings: OnlineConfig, generator: torch.Generator
) -> dict[str, list[Any]]:
    """By arm, a row after each round: labels, gibbs_objective_gain and regret, as `rounds.measure` has them.

    learner: without answers. ValueError for a pool without truth.
    """
    if pool.truth is None:
        raise ValueError("arms are measured by a known truth")
    rows: dict[str, list[Any]] = {"passive": [], "offline": []}
    regret = {"passive": 0.0, "offline": 0.0}
    best, pairs = pool.best(learner.kl_coef), pool.open_pairs()
    while len(rows["passive"]) < settings.rounds:
        picked = choose("passive", learner.posterior, pool.x, pairs, settings.questions, generator)
        prompt, one, other = picked.T
        regret["passive"] += regret_of(learner.posterior, pool, len(picked))
        regret["offline"] += len(picked) * best  # π_ref answers while the labels are collected
        z = _answers(pool.truth[prompt, one] - pool.truth[prompt, other], learner, generator)
        posterior = learner.add(pool.x[prompt, one], pool.x[prompt, other], z)
        policies = {
            "passive": posterior.policy(pool.x, pool.log_ratio),
            "offline": posterior.pessimistic_policy(pool.x, settings.kappa, pool.log_ratio),
        }
        for name, policy in policies.items():
            gain = pool.gain(policy, learner.kl_coef)
            rows[name].append({"labels": len(learner), "gibbs_objective_gain": gain, "regret": regret[name]})
    return rows


def _answers(margin: Tensor, learner: Learner, generator: torch.Generator) -> Tensor:
    """Bradley–Terry answers (n,) ±1 through randomised response."""
    noise, preferred = learner.noise, torch.sigmoid(margin)
    plus = noise.keep_prob * preferred + noise.flip_prob * (1.0 - preferred)
    return torch.where(torch.rand(len(margin), generator=generator, dtype=torch.float64) < plus, 1.0, -1.0)
