"""Reward, KL and win rate of the Gibbs policy of r̂ (`private_rlhf.reward_models.gibbs`), from N draws of π_ref."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform


@dataclass(frozen=True)
class GibbsResult:
    """Per prompt, (n,) float64 each: E[r*], E[r̄], KL in nats and P(win) against one reference answer."""

    true_reward: np.ndarray | None
    reward: np.ndarray
    kl: np.ndarray
    win_truth: np.ndarray | None
    win_reward: np.ndarray


def gibbs_expectations(
    scores: np.ndarray,
    reward: np.ndarray,
    true_reward: np.ndarray | None,
    kl_coef: float,
    baseline_reward: np.ndarray,
    baseline_truth: np.ndarray | None,
) -> GibbsResult:
    """Expectations under the Gibbs policy of r̂.

    Args:
        scores, reward, true_reward: (n, N) r̂, r̄ and r* of N draws of π_ref for each of n prompts.
        kl_coef: as in J.
        baseline_reward, baseline_truth: (n,) of one answer of π_ref to each prompt, to win against.
    """
    weights = gibbs_weights(scores, kl_coef)
    return GibbsResult(
        true_reward=None if true_reward is None else (weights * true_reward).sum(axis=-1),
        reward=(weights * reward).sum(axis=-1),
        kl=kl_from_uniform(weights),
        win_truth=None
        if true_reward is None or baseline_truth is None
        else (weights * beats(true_reward, baseline_truth[:, None])).sum(axis=-1),
        win_reward=(weights * beats(reward, baseline_reward[:, None])).sum(axis=-1),
    )


def beats(score: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """1 for a win, ½ for a tie, 0 for a loss."""
    return np.where(score > baseline, 1.0, np.where(score == baseline, 0.5, 0.0))
