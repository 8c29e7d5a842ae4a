r"""Empirical audit of the mechanism: what epsilon do its outputs prove?

For a mechanism M of one label, any event O of its output gives log P(O | y) / P(O | -y) <= epsilon. An audit draws
outputs for both labels, bounds each probability by Clopper-Pearson (Bonferroni over all the bounds), and reports the
largest *lower* bound on epsilon. For a sound mechanism it stays below the claim with the stated confidence; a bound
above the claim is a proof of a fault, up to that confidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from private_rlhf.audit.judge import clopper_pearson
from private_rlhf.core.errors import UserError

FALSE_ALARM = 0.001
FEW = 8  # outcomes: 254 sets
MOST_EVENTS = 1 << 8


@dataclass(frozen=True)
class Audit:
    """epsilon_low: lower confidence bound on epsilon (>= 0). claim: the stated one. caught: the bound is above it."""

    epsilon_low: float
    claim: float
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
    low = _best_bound(sets or [tuple(names)], tallies, false_alarm)
    return Audit(low, claim, low > claim)


def _half_lines(plus: Counter[object], minus: Counter[object]) -> list[tuple[object, ...]]:
    order = sorted({*plus, *minus}, key=lambda name: (plus[name] + 0.5) / (minus[name] + 0.5))
    step = max(1, len(order) // MOST_EVENTS)
    return [tuple(order[:cut]) for cut in range(1, len(order), step)]


def _best_bound(
    sets: Sequence[tuple[object, ...]], tallies: tuple[Counter[object], Counter[object]], false_alarm: float
) -> float:
    """Both directions of every set; each of its two bounds is one-sided at false_alarm / (4 * sets)."""
    confidence = 1 - 2 * false_alarm / (4 * len(sets))
    best = 0.0
    totals = [sum(tally.values()) for tally in tallies]
    for outcomes in sets:
        hits = [sum(tally[name] for name in outcomes) for tally in tallies]
        bounds = [clopper_pearson(hit, total, confidence) for hit, total in zip(hits, totals, strict=True)]
        for one, other in ((0, 1), (1, 0)):
            if bounds[one][0] > 0:
                best = max(best, math.log(bounds[one][0] / bounds[other][1]))
    return best
