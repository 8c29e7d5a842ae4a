"""Turns per-prompt results into the metrics of each method, every figure with its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap, bootstrap_mean, ratio_of_means, student_mean, win_rate
from private_rlhf.evaluation.calibration import coverage
from private_rlhf.evaluation.evaluation_sampler import Answer, PromptResult
from private_rlhf.evaluation.rates import (
    GibbsResult,
    agreement,
    beats,
    best_of_four,
    decided_win_rate,
    gibbs_expectations,
    length_controlled,
)
from private_rlhf.reward_models.gibbs import gibbs_weights

_RATES = (
    "generation_win_rate_truth",
    "generation_win_rate_rm",
    "length_controlled_win_rate",
    "decided_win_rate",
    "agreement_rm",
)
FRONTIER = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)


class Summary:
    """Metrics of one evaluation. results: one per prompt, in prompt order. kl_coef: of J. seed: of the bootstrap."""

    def __init__(self, results: Sequence[PromptResult], kl_coef: float, seed: int) -> None:
        self.results, self.kl_coef, self.seed = list(results), kl_coef, seed
        self.has_truth = self.results[0].policy[0].true_reward is not None
        self.baseline = [result.candidates or result.reference for result in self.results]
        self.reference_truth = self._truth(self.baseline)

    def policy_metrics(self) -> dict[str, Any]:
        """The trained policy against π_ref."""
        answers = [result.policy for result in self.results]
        metrics = self._metrics(answers, answers, per_prompt(answers, "kl"))
        return {**metrics, **self._win_rates([result.policy[0] for result in self.results])}

    def reference_metrics(self) -> dict[str, Any]:
        """π_ref itself: KL 0. Its win rates are those of a second draw against the first; None without a second draw.
        """
        answers = [result.reference for result in self.results]
        metrics = self._metrics(answers, self.baseline, np.zeros(len(self.results)))
        second = [result.candidates[:1] for result in self.results]
        rates = self._win_rates([answers[0] for answers in second]) if all(second) else dict.fromkeys(_RATES)
        return {**rates, **metrics, "objective_gain": None}

    def gibbs_metrics(self) -> dict[str, Any] | None:
        """The Gibbs policy of r̂ at kl_coef; None without candidates."""
        if not self.results[0].candidates:
            return None
        gibbs = self.gibbs(self.kl_coef)
        picks = [[result.candidates[pick]] for result, pick in zip(self.results, self.gibbs_picks(), strict=True)]
        metrics = self._metrics(picks, picks, gibbs.kl, gibbs)
        truth = None if gibbs.win_truth is None else bootstrap_mean(gibbs.win_truth, self.seed).as_dict()
        return {
            "generation_win_rate_truth": truth,
            "generation_win_rate_rm": bootstrap_mean(gibbs.win_reward, self.seed).as_dict(),
            **dict.fromkeys(_RATES[2:]),
            **metrics,
        }

    def gibbs(self, kl_coef: float) -> GibbsResult:
        """Expectations of the Gibbs policy at another coefficient."""
        first = [result.reference[:1] for result in self.results]
        return gibbs_expectations(
            self._drawn("pessimistic_reward"),
            self._drawn("reward"),
            self._drawn("true_reward") if self.has_truth else None,
            kl_coef,
            per_prompt(first, "reward"),
            self._truth(first),
        )

    def gibbs_picks(self) -> list[int]:
        """One candidate per prompt drawn from the Gibbs weights, to show and to count n-grams on."""
        generator = np.random.default_rng(self.seed)
        weights = gibbs_weights(self._drawn("pessimistic_reward"), self.kl_coef)
        return [int(generator.choice(len(row), p=row)) for row in weights]

    def frontier(self) -> list[dict[str, Any]] | None:
        """Reward against KL of the Gibbs policy over a range of coefficients."""
        if not self.results[0].candidates:
            return None
        points = []
        for kl_coef in FRONTIER:
            gibbs = self.gibbs(kl_coef)
            kl, truth = float(gibbs.kl.mean()), None if gibbs.true_reward is None else float(gibbs.true_reward.mean())
            known = {"true_reward": truth, "objective": None if truth is None else truth - kl_coef * kl}
            points.append({"kl_coef": kl_coef, "kl": kl, "reward": float(gibbs.reward.mean()), **known})
        return points

    def coverage(self, kappa: float) -> list[dict[str, Any]] | None:
        """Coverage of r* by r̄ ± κΓ over the draws of π_ref; kappa: with which Γ was scaled. None without a truth,
        without Γ or with fewer than two draws a prompt."""
        if not self.has_truth or not kappa or len(self.results[0].candidates) < 2:
            return None
        reward = self._drawn("reward")
        return coverage(reward, (reward - self._drawn("pessimistic_reward")) / kappa, self._drawn("true_reward"))

    def best_of_four(self) -> Estimate | None:
        """Share of fours of draws of π_ref of which r̄ finds the truly best; None without a truth or four draws."""
        if not self.has_truth or len(self.results[0].candidates) < 4:
            return None
        return best_of_four(self._drawn("reward"), self._drawn("true_reward"), self.seed)

    def _drawn(self, name: str) -> np.ndarray:
        """(n, N) a field of the N draws of π_ref for each prompt."""
        return np.array([[getattr(answer, name) for answer in result.candidates] for result in self.results])

    def ppo_over_gibbs(self, resamples: int = 2000) -> Estimate | None:
        """PPO's share of the true-J gain of the Gibbs policy of the same r̂, with a bootstrap interval over prompts.
        None where that gain is not clearly above 0."""
        policy, ideal = self.policy_gain(), self.gibbs_gain()
        if policy is None or ideal is None or student_mean(ideal).ci_low <= 0:
            return None
        return bootstrap(ratio_of_means, np.stack([policy, ideal]), self.seed, resamples)

    def policy_gain(self) -> np.ndarray | None:
        """(n,) gain of the trained policy over π_ref in the true J, prompt by prompt; None without a truth."""
        if self.reference_truth is None:
            return None
        answers = [result.policy for result in self.results]
        return per_prompt(answers, "true_reward") - self.kl_coef * per_prompt(answers, "kl") - self.reference_truth

    def gibbs_gain(self) -> np.ndarray | None:
        """(n,) the same of the Gibbs policy of r̂ at kl_coef; None without a truth or without candidates."""
        if self.reference_truth is None or not self.results[0].candidates:
            return None
        gibbs = self.gibbs(self.kl_coef)
        assert gibbs.true_reward is not None
        return gibbs.true_reward - self.kl_coef * gibbs.kl - self.reference_truth

    def by_prompt(self) -> list[dict[str, Any]]:
        """One row per prompt of what the means are made of, so that two runs can be compared on equal prompts."""
        columns = {
            "kl": per_prompt([result.policy for result in self.results], "kl"),
            "objective_gain": self.policy_gain(),
            "gibbs_objective_gain": self.gibbs_gain(),
        }
        return [
            {"index": result.index}
            | {name: None if values is None else float(values[place]) for name, values in columns.items()}
            for place, result in enumerate(self.results)
        ]

    def longer(self) -> list[int]:
        """By prompt, the tokens that the policy's first answer has more than π_ref's."""
        return [result.policy[0].tokens - result.reference[0].tokens for result in self.results]

    def _win_rates(self, policy: Sequence[Answer]) -> dict[str, Any]:
        """Win rates of one answer per prompt against π_ref's first, on the same prompts."""
        reference = [result.reference[0] for result in self.results]
        length = np.array([a.tokens - b.tokens for a, b in zip(policy, reference, strict=True)])
        judges = {"rm": "reward", **({"truth": "true_reward"} if self.has_truth else {})}
        scores = {judge: (column(policy, name), column(reference, name)) for judge, name in judges.items()}
        outcomes = {judge: beats(*both) for judge, both in scores.items()}
        main = outcomes["truth" if self.has_truth else "rm"]
        controlled = length_controlled(main, length)
        agreement_rate = agreement(outcomes["rm"], outcomes["truth"]) if self.has_truth else None
        return {
            "generation_win_rate_truth": win_rate(*scores["truth"]).as_dict() if self.has_truth else None,
            "generation_win_rate_rm": win_rate(*scores["rm"]).as_dict(),
            "length_controlled_win_rate": controlled.as_dict() if controlled else None,
            "decided_win_rate": decided_win_rate(main).as_dict(),
            "agreement_rm": agreement_rate.as_dict() if agreement_rate else None,
        }

    def _truth(self, answers: Sequence[Sequence[Answer]]) -> np.ndarray | None:
        """(n,) mean r* of the answers to each prompt; None without a truth."""
        return per_prompt(answers, "true_reward") if self.has_truth else None

    def _metrics(
        self,
        shown: Sequence[Sequence[Answer]],
        scored: Sequence[Sequence[Answer]],
        kl: np.ndarray,
        expected: GibbsResult | None = None,
    ) -> dict[str, Any]:
        """Means with intervals over prompts: lengths and n-grams of the answers `shown`, rewards of those `scored`, KL
        (n,); expected: has r̄, r̂ and r* in their place.
        """
        flat = [answer for group in shown for answer in group]
        truth = self._truth(scored) if expected is None else expected.true_reward
        pessimistic = per_prompt(scored, "pessimistic_reward") if expected is None else expected.pessimistic_reward
        metrics: dict[str, Any] = {
            **self._mean("kl", kl),
            **self._mean("reward", per_prompt(scored, "reward") if expected is None else expected.reward),
            **self._mean("pessimistic_reward", pessimistic),
            "response_tokens": float(np.mean([answer.tokens for answer in flat])),
            "distinct_1": distinct_n([answer.text for answer in flat], 1),
            "distinct_2": distinct_n([answer.text for answer in flat], 2),
            **dict.fromkeys(("true_reward", "true_reward_ci", "objective", "objective_ci", "objective_gain")),
        }
        if truth is not None and self.reference_truth is not None:
            objective = truth - self.kl_coef * kl
            metrics |= {**self._mean("true_reward", truth), **self._mean("objective", objective)}
            metrics["objective_gain"] = student_mean(objective - self.reference_truth).as_dict()
        return metrics

    def _mean(self, name: str, values: np.ndarray) -> dict[str, Any]:
        estimate = student_mean(values)
        return {name: estimate.value, f"{name}_ci": [estimate.ci_low, estimate.ci_high]}


def per_prompt(answers: Sequence[Sequence[Answer]], name: str) -> np.ndarray:
    """(n,) mean of a field over the answers to each prompt."""
    return np.array([np.mean([getattr(answer, name) for answer in group]) for group in answers])


def column(answers: Sequence[Answer], name: str) -> np.ndarray:
    """(n,) a field of each answer."""
    return np.array([getattr(answer, name) for answer in answers])


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Share of distinct n-grams of words among all n-grams of the texts; low values show mode collapse."""
    grams = [
        tuple(words[i : i + n]) for words in (text.lower().split() for text in texts) for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0
