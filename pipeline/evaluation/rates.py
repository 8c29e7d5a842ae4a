"""Win rates that neither length nor ties can flatter, and how far a judge can be trusted.

An outcome is 1 where the policy's answer wins against the reference's, 0 where it loses, ½ for a tie. The likelihood
win rate (PPKL Table 1) is how often a policy finds the chosen answer likelier per token: drift alone makes longer
answers likelier, so it is also given on pairs of like length.

With `evaluation_labels: laplace` a rule is a choice of one response per pair. Stage count adds discrete Laplace noise
to how often each is right (`privacy.counts`); nothing here sees a label.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, group_numbers, rows_of, true_share
from private_rlhf.core.stats import Estimate, bootstrap_mean, wilson
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Renderer, plain_text, prompt_key
from private_rlhf.privacy.counts import DiscreteLaplace
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from scipy import optimize, special, stats

Z = float(stats.norm.ppf(0.975))
NOT_AT_EQUAL_LENGTH = "no answer to compare at equal length: the lengths separate the two policies"
LIKELIHOOD_TEXTS = 32
"""Texts per forward pass."""
LIKE_LENGTH = 0.2
"""|log ratio of characters| up to which two answers are of like length."""
LONGER = "longer_answer"  # the rule that prints beside the policies' rates


def length_controlled(outcome: np.ndarray, longer: np.ndarray) -> Estimate | None:
    """Win rate at equal length: logit P(win) = a + b·tanh(Δ/sd Δ) by maximum likelihood at Δ = 0, with a robust Wald
    interval. AlpacaEval 2's regression (arXiv 2404.04475) without its instruction term.

    outcome (n,), longer (n,): the policy's length minus the reference's. None where no finite fit answers
    (`separated`).
    """
    outcome, longer = np.asarray(outcome, dtype=np.float64), np.asarray(longer, dtype=np.float64)
    if not len(outcome) or separated(outcome, longer):
        return None
    spread = float(np.std(longer))
    design = np.stack([np.ones(len(longer)), *([np.tanh(longer / spread)] if spread else [])], axis=1)

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
    wins, losses = longer[outcome > 0], longer[outcome < 1]
    if not len(wins) or not len(losses):
        return True
    if np.ptp(longer) and (wins.min() >= losses.max() or wins.max() <= losses.min()):
        return True
    return bool(longer.min() > 0 or longer.max() < 0)


def decided_win_rate(verdicts: np.ndarray) -> Estimate:
    """σ(d), the win rate that Rao and Kupper's model (1967) gives two policies that a judge can always tell apart.

    P(win) = σ(d − η), P(loss) = σ(−d − η), the rest are ties, so d = (logit P(win) − logit P(loss))/2, half a pair
    added to wins and to losses. Interval: Wald's for d, with the covariance of the shares over pairs.

    verdicts: (n,) or (n, 2) 1, 0 or ½ of n pairs, by order; ¾ and ¼ are half a tie. ValueError without verdicts.
    """
    if not len(verdicts):
        raise ValueError("verdicts must not be empty: give one for each pair")
    sides, count = 2.0 * np.asarray(verdicts, dtype=np.float64).reshape(len(verdicts), -1) - 1.0, len(verdicts) + 1.0
    wins, losses = (np.clip(sign * sides, 0.0, None).mean(axis=1) for sign in (1.0, -1.0))
    win, loss = (wins.sum() + 0.5) / count, (losses.sum() + 0.5) / count
    difference = (special.logit(win) - special.logit(loss)) / 2
    slopes = np.array([1 / (win * (1 - win)), -1 / (loss * (1 - loss))]) / 2
    shares = np.stack([wins, losses])
    covariance = (shares @ shares.T + 0.5 * np.eye(2)) / count - np.outer([win, loss], [win, loss])
    half = Z * math.sqrt(slopes @ covariance @ slopes / count)
    low, value, high = (float(special.expit(difference + step)) for step in (-half, 0.0, half))
    return Estimate(value, low, high, len(verdicts))


def agreement(outcome: np.ndarray, truth: np.ndarray) -> Estimate | None:
    """Share of pairs (n,) that a judge decides as the truth does; the judge's ties count half, the truth's are left
    out. None where the truth decides nothing."""
    decided = truth != 0.5
    if not decided.any():
        return None
    agreements = 1.0 - np.abs(outcome - truth)[decided]
    return wilson(float(agreements.sum()), int(decided.sum()))


def best_of_four(reward: np.ndarray, truth: np.ndarray, seed: int) -> Estimate | None:
    """Share of fours of answers of which r̄ finds the best (RewardBench 2's form, 25 % by chance).

    reward, truth (n, N) of N draws of π_ref per prompt; interval over prompts. Ties by r̄ share their point, ties by
    the truth are each right. None for fewer than four draws.
    """
    fours = reward.shape[1] // 4
    if not fours:
        return None
    estimated, true = (values[:, : 4 * fours].reshape(len(values), fours, 4) for values in (reward, truth))
    best = estimated == estimated.max(axis=2, keepdims=True)
    right = (best & (true == true.max(axis=2, keepdims=True))).sum(axis=2) / best.sum(axis=2)
    return bootstrap_mean(right.mean(axis=1), seed)


def beats_by_truth(rows: list[dict[str, list[float | None]]]) -> np.ndarray | None:
    """(n,) outcomes by the true rewards [policy's, reference's] of each row; None where there is no truth."""
    scores = [row["true_reward"] for row in rows]
    if not scores or any(value is None for pair in scores for value in pair):
        return None
    policy, reference = np.array(scores, dtype=np.float64).T
    return beats(policy, reference)


@dataclass(frozen=True)
class GibbsResult:
    """Per prompt, (n,) float64 each: E[r*], E[r̄], E[r̂], KL in nats and P(win) against one reference answer."""

    true_reward: np.ndarray | None
    reward: np.ndarray
    pessimistic_reward: np.ndarray
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
    """Expectations under the Gibbs policy of r̂. scores, reward, true_reward: (n, N) r̂, r̄ and r* of N draws of π_ref
    per prompt. baseline_reward, baseline_truth: (n,) of one answer of π_ref to each, to win against."""
    weights = gibbs_weights(scores, kl_coef)
    return GibbsResult(
        true_reward=None if true_reward is None else (weights * true_reward).sum(axis=-1),
        reward=(weights * reward).sum(axis=-1),
        pessimistic_reward=(weights * scores).sum(axis=-1),
        kl=kl_from_uniform(weights),
        win_truth=None
        if true_reward is None or baseline_truth is None
        else (weights * beats(true_reward, baseline_truth[:, None])).sum(axis=-1),
        win_reward=(weights * beats(reward, baseline_reward[:, None])).sum(axis=-1),
    )


def beats(score: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """1 for a win, ½ for a tie, 0 for a loss."""
    return np.where(score > baseline, 1.0, np.where(score == baseline, 0.5, 0.0))


def pair_rows(pairs: Sequence[ReleasedPair], renderer: Renderer) -> list[tuple[list[int], list[int]]]:
    """Token ids of chosen and rejected answers, interleaved: row 2i is chosen, 2i+1 rejected (`learnt_ids`)."""
    rows = []
    for pair in pairs:
        prompt = renderer.prompt_ids(pair.prompt)
        rows += [(prompt, renderer.learnt_ids(pair.chosen)), (prompt, renderer.learnt_ids(pair.rejected))]
    return rows


def prompt_numbers(pairs: Sequence[ReleasedPair]) -> np.ndarray:
    """(n,) int64: the same number for pairs on one prompt, over which intervals are."""
    return group_numbers(prompt_key(pair.prompt) for pair in pairs)


def likelihood_win_rate(
    logprobs: np.ndarray, noise: LabelNoise | LevelledNoise, prompts: np.ndarray | None = None
) -> Estimate:
    """Share of pairs whose chosen answer is likelier; interleaved (2n,) from `pair_rows`. Debiased for z. prompts: (n,)
    `prompt_numbers`; None where all differ."""
    return true_share(beats(logprobs[0::2], logprobs[1::2]), noise, prompts)


def longer_answer_baseline(pairs: Sequence[ReleasedPair], noise: LabelNoise | LevelledNoise) -> Estimate:
    """Share of pairs whose chosen answer has more characters, ties half: the trivial rule to print beside any win rate.
    """
    return true_share(beats(longer_answers(pairs), np.zeros(len(pairs))), noise, prompt_numbers(pairs))


def longer_answers(pairs: Sequence[ReleasedPair]) -> np.ndarray:
    """(n,) +1 where `chosen` has more characters, -1 where `rejected` has, 0 for equally many."""
    sizes = np.array([(len(plain_text(pair.chosen)), len(plain_text(pair.rejected))) for pair in pairs]).reshape(-1, 2)
    return np.sign(sizes[:, 0] - sizes[:, 1]).astype(np.int8)


def preferences(logprobs: np.ndarray) -> np.ndarray:
    """(n,) +1 where the policy finds `chosen` likelier, -1 where `rejected`, 0 for a tie; (2n,) as from `pair_rows`."""
    return np.sign(logprobs[0::2] - logprobs[1::2]).astype(np.int8)


def like_length(pairs: Sequence[ReleasedPair]) -> np.ndarray:
    """(n,) bool: both answers are of like length."""
    sizes = np.array([[max(len(plain_text(side)), 1) for side in (pair.chosen, pair.rejected)] for pair in pairs])
    return np.asarray(np.abs(np.log(sizes.reshape(-1, 2)) @ (1.0, -1.0)) <= LIKE_LENGTH)


def win_rate_at_like_length(
    logprobs: np.ndarray, pairs: Sequence[ReleasedPair], noise: LabelNoise | LevelledNoise
) -> Estimate | None:
    """The likelihood win rate of the pairs of like length; (2n,) as from `pair_rows`. None where there are none."""
    like = like_length(pairs)
    if not like.any():
        return None
    return likelihood_win_rate(logprobs.reshape(-1, 2)[like].ravel(), rows_of(noise, like), prompt_numbers(pairs)[like])


def prefers_longer(choices: np.ndarray, longer: np.ndarray, prompts: np.ndarray | None = None) -> Estimate:
    """Share of pairs on which the longer answer is chosen, ½ for a tie of either; all (n,), as from `preferences`,
    `longer_answers` and `prompt_numbers`. No label is read."""
    return true_share(beats(choices * longer, np.zeros(len(longer))), PUBLIC, prompts)


def write_decisions(folder: Path, choices: Mapping[str, np.ndarray], places: list[int], rows: int) -> None:
    """Writes `decisions.json`: the choices (n,) of every rule, the rows they are on, and how many rows there are."""
    content = {"rows": rows, "places": places, "choices": {name: choice.tolist() for name, choice in choices.items()}}
    write_json(folder / "decisions.json", content)


def read_decisions(folder: Path) -> tuple[dict[str, np.ndarray], list[int], int]:
    """(choices, places, rows) as `write_decisions` wrote them."""
    path = folder / "decisions.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path} must be there and whole: run the stage again (--from evaluate)") from None
    return {name: np.array(choice) for name, choice in content["choices"].items()}, content["places"], content["rows"]


def spread(choices: Mapping[str, np.ndarray], places: list[int], rows: int) -> dict[str, list[int]]:
    """Choices (n,) in {-1, 0, +1} on the rows at `places` as choices on all rows: 0 elsewhere."""
    decisions = {}
    for name, choice in choices.items():
        everywhere = np.zeros(rows, np.int8)
        everywhere[places] = choice
        decisions[name] = everywhere.tolist()
    return decisions


def counted_rates(choices: Mapping[str, np.ndarray], counted: Mapping[str, Any]) -> dict[str, Estimate]:
    """The win rate of every rule, ties counted half. counted: `epsilon` of all counts, the noisy `counts` by rule."""
    noise = DiscreteLaplace.shared(counted["epsilon"], len(choices))
    wins = {name: counted["counts"][name] + 0.5 * int((choice == 0).sum()) for name, choice in choices.items()}
    return {name: counted_share(wins[name], len(choice), noise) for name, choice in choices.items()}


def counted_share(count: float, n: int, noise: DiscreteLaplace) -> Estimate:
    """The share of n pairs a rule is right about, from a noisy count; not clipped, which would bias it. The 95 %
    half-widths of sampling and of the noise are added in squares."""
    share = count / n
    inside = min(1.0, max(0.0, share))
    sampling = 1.96**2 * max(inside * (1 - inside), 0.25 / n) / n
    half = math.sqrt(sampling + (noise.half_width() / n) ** 2)
    return Estimate(share, share - half, share + half, n)
