"""Exact verdicts: guesses against Binomial(n, alpha), Holm over all attacks, the power, and an audit of outcomes.

For a mechanism M of one label, any event O of its output gives log P(O | y) / P(O | -y) <= epsilon. The audit bounds
each probability by Clopper-Pearson (Bonferroni over all bounds) and reports the largest *lower* bound on epsilon. A
bound above the claim is a proof of a fault, up to the stated confidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from private_rlhf.core.errors import UserError
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
    low, high = clopper_pearson(correct, n)
    rate = correct / n if n else None
    p_value = upper_tail(correct, n, ceiling)
    return Verdict(guesses.attack, guesses.variant, n, correct, ceiling, rate, low, high, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below a level errs with at most that probability, in all."""
    order = sorted(range(len(p_values)), key=lambda position: p_values[position])
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, position in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted


def adjust(verdicts: Sequence[Verdict], level: float = FAMILY_WISE) -> list[Verdict]:
    """The verdicts with Holm's p-values and the decision at the family-wise level."""
    changed = holm([verdict.p_value for verdict in verdicts])
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


FALSE_ALARM = 0.001
FEW = 8  # outcomes: 254 sets
MOST_EVENTS = 1 << 8


@dataclass(frozen=True)
class Audit:
    """epsilon_low: lower confidence bound on epsilon (>= 0). claim: the stated epsilon. samples: of both labels.

    event: the outputs that gave the bound. caught: the bound is above the claim.
    """

    epsilon_low: float
    claim: float
    samples: int
    event: str
    caught: bool


def audit_outcomes(
    plus: Sequence[object], minus: Sequence[object], claim: float, false_alarm: float = FALSE_ALARM
) -> Audit:
    """Audits outputs (any hashable values, such as tuples of several releases) drawn for y = +1 and for y = -1.

    Every set of outcomes is tried where there are few (up to 8), otherwise the half-lines of the outcomes sorted by
    their ratio in the first half of the samples, on the second half. The bounds are simultaneous: the probability that
    any of them is wrong is at most `false_alarm`. UserError without outputs of both labels.
    """
    names = sorted({*plus, *minus}, key=repr)
    if not plus or not minus or not names:
        raise UserError("an audit needs outputs of both labels; draw some for y = +1 and some for y = -1")
    if len(names) <= FEW:
        sets: list[tuple[object, ...]] = [
            chosen for size in range(1, len(names)) for chosen in combinations(names, size)
        ]
        checked = plus, minus
    else:
        half, other = len(plus) // 2, len(minus) // 2
        sets = _half_lines(Counter(plus[:half]), Counter(minus[:other]))
        checked = plus[half:], minus[other:]
    tallies = Counter(checked[0]), Counter(checked[1])
    low, event = _best_bound(sets or [tuple(names)], tallies, false_alarm)
    return Audit(low, claim, len(plus) + len(minus), event, low > claim)


def _half_lines(plus: Counter[object], minus: Counter[object]) -> list[tuple[object, ...]]:
    order = sorted({*plus, *minus}, key=lambda name: (plus[name] + 0.5) / (minus[name] + 0.5))
    step = max(1, len(order) // MOST_EVENTS)
    return [tuple(order[:cut]) for cut in range(1, len(order), step)]


def _best_bound(
    sets: Sequence[tuple[object, ...]], tallies: tuple[Counter[object], Counter[object]], false_alarm: float
) -> tuple[float, str]:
    """Both directions of every set; each of its two bounds is one-sided at false_alarm / (4 * sets)."""
    confidence = 1 - 2 * false_alarm / (4 * len(sets))
    best, event = 0.0, "none"
    totals = [sum(tally.values()) for tally in tallies]
    for outcomes in sets:
        hits = [sum(tally[name] for name in outcomes) for tally in tallies]
        bounds = [clopper_pearson(hit, total, confidence) for hit, total in zip(hits, totals, strict=True)]
        for one, other in ((0, 1), (1, 0)):
            if bounds[one][0] > 0:
                low = math.log(bounds[one][0] / bounds[other][1])
                if low > best:
                    best, event = low, f"{' or '.join(map(repr, outcomes))} more often for y = {'+-'[one]}1"
    return best, event
