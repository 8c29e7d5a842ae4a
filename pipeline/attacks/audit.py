r"""Empirical audit of the mechanism: what epsilon do its outputs prove, and how many are needed to expose a fault?

For a mechanism M of one label, any event O of its output gives log P(O | y) / P(O | -y) <= epsilon. An audit draws
outputs for both labels, bounds each probability by Clopper-Pearson (Bonferroni over all the bounds), and reports the
largest *lower* bound on epsilon. For a sound mechanism it stays below the claim with the stated confidence; a bound
above the claim is a proof of a fault, up to that confidence.

A bound on epsilon needs both tails and is slower than the exact binomial test of one probability, P(z = y) <= alpha,
which is what `audit_sample_size` is about: a flip probability that is too small by 5 % is caught by counting flips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from pipeline.attacks.judge import clopper_pearson, upper_tail
from pipeline.core.errors import UserError
from pipeline.core.noise import LabelNoise

FALSE_ALARM = 0.001
FEW = 8  # outcomes: 254 sets
MOST_EVENTS = 1 << 8


@dataclass(frozen=True)
class Audit:
    """epsilon_low: lower confidence bound on epsilon (>= 0). claim: the stated epsilon. samples: of both labels.

    event: the outputs that gave the bound. caught: the bound, or the exact test of the number of kept labels, is
    above what the claim allows at the family-wise false-alarm probability. p_value: of that exact test (1 for joint
    audits, which have none).
    """

    epsilon_low: float
    claim: float
    samples: int
    event: str
    p_value: float
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
    return Audit(low, claim, len(plus) + len(minus), event, 1.0, low > claim)


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


def audit_mechanism(
    draw: Callable[[int], int], epsilon: float, samples: int, false_alarm: float = FALSE_ALARM
) -> Audit:
    """Draws z for y = +1 and y = -1 (`samples` in all) from `draw(y)`; both kinds of evidence share the false alarm.

    The number of kept labels of both is tested against Binomial(samples, alpha): epsilon-LDP bounds the mean of the two
    keep probabilities by alpha, and two shares with that mean spread less than one (Hoeffding 1956).

    epsilon: the claim. For the keyed mode `draw` uses a new event each time, for the local mode `privatize_label`.
    """
    each = samples // 2
    plus, minus = [draw(1) for _ in range(each)], [draw(-1) for _ in range(each)]
    bound = audit_outcomes(plus, minus, epsilon, false_alarm / 3)
    alpha = LabelNoise.of(epsilon).keep_prob
    kept = sum(z == 1 for z in plus) + sum(z == -1 for z in minus)
    p_value = upper_tail(kept, 2 * each, alpha)
    caught = bound.caught or p_value < 2 * false_alarm / 3
    return Audit(bound.epsilon_low, epsilon, 2 * each, bound.event, p_value, caught)


def audit_releases(
    draw: Callable[[int], Sequence[int]], epsilons: Sequence[float], samples: int, false_alarm: float = FALSE_ALARM
) -> Audit:
    """The joint law of several releases of one event against the claim max(epsilons). draw(y): their z, one each."""
    each = samples // 2
    plus = [tuple(draw(1)) for _ in range(each)]
    minus = [tuple(draw(-1)) for _ in range(each)]
    return audit_outcomes(plus, minus, max(epsilons), false_alarm)


def audit_sample_size(
    epsilon: float, relative_error: float, power: float = 0.9, false_alarm: float = FALSE_ALARM
) -> int:
    """How many labels expose, with probability `power`, a flip probability of (1 - relative_error) (1 - alpha).

    The test counts kept labels against Binomial(n, alpha) at `false_alarm`. The normal approximation gives the
    neighbourhood, n ~ ((z_f sqrt(a (1 - a)) + z_p sqrt(b (1 - b))) / (b - a))^2 with a = alpha and b the faulty keep
    probability; the exact binomial power decides, for n and for every larger n that was looked at (the power of a
    discrete test is not monotone: the answer is the smallest n from which it stays above `power` for 1 % more).

    Raises:
        UserError: relative_error or power outside (0, 1).
    """
    if not 0 < relative_error < 1 or not 0 < power < 1 or not 0 < false_alarm < 1:
        raise UserError(
            "relative_error, power and false_alarm lie strictly between 0 and 1; for example 0.05, 0.9, 0.001"
        )
    noise = LabelNoise.of(epsilon)
    alpha, faulty = noise.keep_prob, noise.keep_prob + relative_error * noise.flip_prob
    tails = stats.norm.isf(false_alarm) * math.sqrt(alpha * (1 - alpha)) + stats.norm.ppf(power) * math.sqrt(
        faulty * (1 - faulty)
    )
    guess = max(2, int((tails / (faulty - alpha)) ** 2))
    low, high = max(1, guess // 2), 2 * guess + 50
    while high - low > max(1, guess // 20_000):
        middle = (low + high) // 2
        low, high = (low, middle) if _stays(middle, alpha, faulty, power, false_alarm) else (middle, high)
    return high


def detection_power(samples: int, alpha: float, faulty: float, false_alarm: float) -> float:
    """Exact probability that the count of kept labels exposes the keep probability `faulty` > alpha."""
    critical = stats.binom.isf(false_alarm, samples, alpha) + 1
    return float(stats.binom.sf(critical - 1, samples, faulty))


def _stays(samples: int, alpha: float, faulty: float, power: float, false_alarm: float) -> bool:
    ahead = np.unique(np.linspace(samples, 1.01 * samples + 20, 40).astype(np.int64))
    critical = stats.binom.isf(false_alarm, ahead, alpha) + 1
    return bool(np.all(stats.binom.sf(critical - 1, ahead, faulty) >= power))
