"""The verdict on a fitted reward: does its accuracy on held-out labels tell it from a coin?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from private_rlhf.core.noise import LabelNoise, share_text, units_needed, withheld
from private_rlhf.core.noise_levels import LevelledNoise, mean_factor, noise_from_json

Z = NormalDist().inv_cdf(0.975)
MOST_LABELS = 10_000_000
"""Larger numbers of labels are not stated: they only say that the accuracy is close to 1/2."""


@dataclass(frozen=True)
class RewardVerdict:
    """Attributes:
    estimate: the accuracy on held-out labels, debiased to true labels, with its 95 % interval (unclipped) and n.
    noise: of the labels.
    share: n by all labels, in (0, 1): the share held out where each counts as one.
    repeated: labels on one prompt count as fewer.
    """

    estimate: Mapping[str, Any]
    noise: LabelNoise | LevelledNoise
    share: float
    repeated: bool = False

    @classmethod
    def of(cls, fit: Mapping[str, Any]) -> RewardVerdict | None:
        """The verdict on what reward/fit.json states; None where no labels were held out."""
        stated = fit.get("validation_accuracy_debiased")
        if not stated:
            return None
        share = stated["n"] / (fit["validation_pairs"] + fit["num_pairs"])
        return cls(stated, noise_from_json(fit), share, stated["n"] < fit["validation_pairs"])

    @property
    def is_coin(self) -> bool:
        """True if the interval contains 1/2 or lies below it."""
        return not self.estimate["ci_low"] > 0.5

    def labels_needed(self, accuracy: float) -> float:
        """Number of labels, held-out ones included, above which Wilson's interval excludes 1/2 at an accuracy > 1/2.

        It excludes 1/2 where the share of agreeing released labels, 1/2 + (2α − 1)(a − 1/2), lies more than z/(2√n)
        from it: for n > (z / ((2α − 1)(2a − 1)))² held-out labels.
        """
        return float((Z / (mean_factor(self.noise) * (2.0 * min(accuracy, 1.0) - 1.0))) ** 2 / self.share)

    @property
    def stated(self) -> str:
        """The accuracy and its interval, with the reason where it lies outside [0, 1] or is withheld."""
        return share_text(self.estimate)

    @property
    def advice(self) -> str:
        """The number of labels that would show the accuracy, or that would exclude 1/2 if it stayed, in words."""
        accuracy, high = self.estimate["value"], self.estimate["ci_high"]
        epsilon = "public labels" if self.noise.public else f"labels at epsilon {self.noise.epsilon:g}"
        epsilon = "labels at this mix of epsilons" if isinstance(self.noise, LevelledNoise) else epsilon
        if withheld(self.estimate) and self.repeated:
            return "labels on more prompts would show it"
        if withheld(self.estimate):
            return f"{_count(units_needed(self.estimate) / self.share)} {epsilon} would show it"
        if high <= 0.5:
            return "more labels do not help an accuracy below 0.5"
        supposed, whose = (accuracy, "that accuracy") if accuracy > 0.5 else (high, "the interval's end")
        return f"at {whose} {_count(self.labels_needed(supposed))} {epsilon} would exclude 0.5"

    def sentence(self, aligner: str | None) -> str:
        """One sentence for the page. aligner: what trained a policy on the reward, if anything did."""
        if not self.is_coin:
            return f"The reward is better than a coin: its accuracy on held-out labels, debiased, is {self.stated}."
        trained = f"; {aligner} trained the policy on it all the same (--accept-reward)" if aligner else ""
        return (
            f"The reward cannot be told from a coin: its accuracy on held-out labels, debiased, is {self.stated}, and "
            f"{self.advice}{trained}."
        )


def _count(labels: float) -> str:
    count = f"about {math.ceil(labels):,}" if labels <= MOST_LABELS else f"more than {MOST_LABELS:,}"
    return count.replace(",", " ")
