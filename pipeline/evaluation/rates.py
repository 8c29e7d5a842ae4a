"""Win rates that neither length nor ties can flatter, and how far a judge can be trusted.

An outcome is 1 where the policy's answer wins against the reference's, 0 where it loses, ½ for a tie.
"""

from __future__ import annotations

import math

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap_mean, wilson
from private_rlhf.evaluation.gibbs_yardstick import beats
from scipy import optimize, special, stats

Z = float(stats.norm.ppf(0.975))
NOT_AT_EQUAL_LENGTH = "no answer to compare at equal length: the lengths separate the two policies"


def length_controlled(outcome: np.ndarray, longer: np.ndarray) -> Estimate | None:
    """Win rate at equal length: logit P(win) = a + b·tanh(Δ/sd Δ) by maximum likelihood, read off at Δ = 0, with a
    robust Wald interval for a. AlpacaEval 2's regression (arXiv 2404.04475) without its instruction term, which two
    policies do not identify.

    outcome (n,), longer (n,) tokens or words of the policy's answer minus the reference's. None where the data hold no
    answer: all outcomes alike, lengths that part wins from losses, or one policy that is longer on every prompt.
    """
    outcome, longer = np.asarray(outcome, dtype=np.float64), np.asarray(longer, dtype=np.float64)
    if not len(outcome) or separated(outcome, longer):
        return None
    spread = float(np.std(longer))
    design = np.stack([np.ones(len(longer)), np.tanh(longer / spread) if spread else np.zeros(len(longer))], axis=1)
    if not spread:
        design = design[:, :1]

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = design @ weights
        value = float((np.logaddexp(0.0, logits) - outcome * logits).sum())
        return value, design.T @ (special.expit(logits) - outcome)

    weights = optimize.minimize(loss, np.zeros(design.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-8}).x
    share = special.expit(design @ weights)
    inverse = np.linalg.inv((design * (share * (1 - share))[:, None]).T @ design)
    scores = design * (outcome - share)[:, None]
    count, size = design.shape
    half = Z * math.sqrt(count / max(1, count - size) * float((inverse @ (scores.T @ scores) @ inverse)[0, 0]))
    low, value, high = (float(special.expit(weights[0] + step)) for step in (-half, 0.0, half))
    return Estimate(value, low, high, count)


def separated(outcome: np.ndarray, longer: np.ndarray) -> bool:
    """True where no finite fit exists (ties count as a win and a loss), or Δ = 0 lies outside the lengths seen."""
    won, lost = longer[outcome > 0], longer[outcome < 1]
    if not len(won) or not len(lost):
        return True
    if np.ptp(longer) and (won.min() >= lost.max() or won.max() <= lost.min()):
        return True
    return bool(longer.min() > 0 or longer.max() < 0)


def decided_win_rate(verdicts: np.ndarray) -> Estimate:
    """σ(d), the win rate that Rao and Kupper's model (1967) gives two policies that a judge can always tell apart.

    P(win) = σ(d − η), P(loss) = σ(−d − η), the rest are ties; η >= 0 says how readily the judge calls one. Three shares
    and two parameters: the maximum is d = (logit P(win) − logit P(loss))/2, with half a pair added to wins and to
    losses so that none of them is 0. Without ties this is the win rate.

    Of a judge that is asked in both orders each verdict is one comparison: won in one and tied in the other counts half
    a win and half a tie, won in one and lost in the other half a win and half a loss. The two verdicts of a pair are
    not independent, so the shares are means over pairs. Interval: Wald's for d, with the covariance of the shares over
    pairs, which is the multinomial one where there is one verdict a pair.

    verdicts: (n,) or (n, 2) 1, 0 or ½ of n pairs, by order. From (n,) means of both orders, ¾ and ¼ are half a tie as
    above, and ½ is taken for a tie. ValueError without verdicts.
    """
    if not len(verdicts):
        raise ValueError("no outcomes")
    sides, count = 2.0 * np.asarray(verdicts, dtype=np.float64).reshape(len(verdicts), -1) - 1.0, len(verdicts) + 1.0
    won, lost = (np.clip(sign * sides, 0.0, None).mean(axis=1) for sign in (1.0, -1.0))
    win, loss = (won.sum() + 0.5) / count, (lost.sum() + 0.5) / count
    difference = (special.logit(win) - special.logit(loss)) / 2
    slopes = np.array([1 / (win * (1 - win)), -1 / (loss * (1 - loss))]) / 2
    shares = np.stack([won, lost])
    covariance = (shares @ shares.T + 0.5 * np.eye(2)) / count - np.outer([win, loss], [win, loss])
    half = Z * math.sqrt(slopes @ covariance @ slopes / count)
    low, value, high = (float(special.expit(difference + step)) for step in (-half, 0.0, half))
    return Estimate(value, low, high, len(verdicts))


def agreement(outcome: np.ndarray, truth: np.ndarray) -> Estimate | None:
    """Share of pairs that a judge decides as the truth does; what the judge calls a tie counts half, what the truth
    calls one is left out. outcome, truth (n,). None where the truth decides nothing.
    """
    decided = truth != 0.5
    if not decided.any():
        return None
    agreed = 1.0 - np.abs(outcome - truth)[decided]
    return wilson(float(agreed.sum()), int(decided.sum()))


def best_of_four(reward: np.ndarray, truth: np.ndarray, seed: int) -> Estimate | None:
    """Share of fours of answers of which r̄ finds the best (RewardBench 2's form, 25 % by chance).

    reward, truth (n, N) of N draws of π_ref for each prompt, taken four by four; interval over prompts. Several answers
    that are best by r̄ share their point, several that are truly best are each right. None for fewer than four draws.
    """
    fours = reward.shape[1] // 4
    if not fours:
        return None
    estimated, true = (values[:, : 4 * fours].reshape(len(values), fours, 4) for values in (reward, truth))
    chosen = estimated == estimated.max(axis=2, keepdims=True)
    right = (chosen & (true == true.max(axis=2, keepdims=True))).sum(axis=2) / chosen.sum(axis=2)
    return bootstrap_mean(right.mean(axis=1), seed)


def beats_by_truth(rows: list[dict[str, list[float | None]]]) -> np.ndarray | None:
    """(n,) outcomes by the true rewards [policy's, reference's] of each row; None where there is no truth."""
    scores = [row["true_reward"] for row in rows]
    if not scores or any(value is None for pair in scores for value in pair):
        return None
    policy, reference = np.array(scores, dtype=np.float64).T
    return beats(policy, reference)
