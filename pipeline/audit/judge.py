"""Exact verdicts: guesses against Binomial(n, alpha), Holm over all attacks, and the power of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from private_rlhf.core.stats import holm_adjusted
from scipy import stats

FAMILY_WISE = 0.001
POWER = 0.9


@dataclass(frozen=True)
class Guesses:
    """Guesses by one attack of some labels.

    attack, variant: names. events: (m,) int64 positions in the view, each at most once. labels: (m,) int8, the guess
    in {-1, +1}, +1 for the event's first response. learned: the attack was fitted on the half whose labels are known,
    so that only the other half counts. target: "label", or "product" for the product of the two labels of a pair of
    copies (`events` are then positions among the copies).
    """

    attack: str
    variant: str
    events: np.ndarray
    labels: np.ndarray
    learned: bool = False
    target: str = "label"


@dataclass(frozen=True)
class Verdict:
    """One judged attack. rate = correct/n (None for n = 0), interval: 95 % Clopper-Pearson, p_value: P(Binomial(n,
    ceiling) >= correct), adjusted: Holm's p-value in the family, leak: adjusted < 0.1 %.
    """

    attack: str
    variant: str
    n: int
    correct: int
    ceiling: float
    rate: float | None
    low: float
    high: float
    p_value: float
    adjusted: float = 1.0
    leak: bool = False

    @classmethod
    def of(cls, attack: str, variant: str, n: int, correct: int, ceiling: float, p_value: float) -> Verdict:
        """The verdict before Holm, with its rate and interval."""
        rate = correct / n if n else None
        return cls(attack, variant, n, correct, ceiling, rate, *clopper_pearson(correct, n), p_value)

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        names = {"low": "ci_low", "high": "ci_high", "adjusted": "p_adjusted"}
        facts = {names.get(name, name): value for name, value in asdict(self).items() if name != "leak"}
        return facts | {"verdict": "leak" if self.leak else "no leak found"}


def clopper_pearson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a binomial share; (0, 1) for n = 0."""
    tail = (1 - confidence) / 2
    low = 0.0 if correct == 0 else float(stats.beta.ppf(tail, correct, n - correct + 1))
    high = 1.0 if correct == n else float(stats.beta.ppf(1 - tail, correct + 1, n - correct))
    return low, high


def upper_tail(correct: int, n: int, ceiling: float) -> float:
    """P(Binomial(n, ceiling) >= correct), exactly; 1 for n = 0."""
    return 1.0 if n == 0 else float(stats.binom.sf(correct - 1, n, ceiling))


def judge_one(guesses: Guesses, truth: np.ndarray, ceiling: float) -> Verdict:
    """The verdict before Holm. truth: (n,) int8 labels by position; 0 where it is unknown, which does not count."""
    known = truth[guesses.events] != 0
    right = truth[guesses.events] == guesses.labels
    n, correct = int(known.sum()), int((known & right).sum())
    return Verdict.of(guesses.attack, guesses.variant, n, correct, ceiling, upper_tail(correct, n, ceiling))


def adjust(verdicts: Sequence[Verdict], level: float = FAMILY_WISE) -> list[Verdict]:
    """The verdicts with Holm's p-values and the decision at the family-wise level."""
    changed = holm_adjusted([verdict.p_value for verdict in verdicts])
    return [replace(row, adjusted=value, leak=value < level) for row, value in zip(verdicts, changed, strict=True)]


def detectable_excess(n: int, alpha: float, family: int, level: float = FAMILY_WISE, power: float = POWER) -> float:
    """The smallest rate - alpha that `n` guesses expose with probability `power` at Holm's first step (level/family).

    1 - alpha if no rate is exposed (few guesses, alpha near 1). Exact: both tails are binomial.
    """
    critical = int(stats.binom.isf(level / family, n, alpha)) + 1
    while critical <= n and upper_tail(critical, n, alpha) >= level / family:
        critical += 1
    if n == 0 or critical > n:
        return 1.0 - alpha
    # P(Binomial(n, r) >= c) = P(Beta(c, n - c + 1) <= r), so the rate with that power is a quantile of the beta law.
    rate = float(stats.beta.ppf(power, critical, n - critical + 1))
    return max(0.0, rate - alpha)
