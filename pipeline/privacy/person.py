"""Total cost of one person's labels: the exact (ε, δ) of independent randomised responses."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, check_epsilon

BEST_EPSILON = 2.1773189849653067
"""At this ε an answer carries most information for each unit of ε: the root of sinh(ε) = 2ε."""
DELTA = 1e-6
"""At which a person's total is stated beside that at 0."""
CELLS = 1 << 17
NEGLIGIBLE = 1e-25  # masses below it are counted as certain disclosure rather than convolved


def person_epsilon(levels: Sequence[tuple[float, int]], delta: float) -> float:
    """The smallest e such that one person's labels, m of them at ε for each (ε, m) in `levels`, are (e, delta)-private.

    Randomised response with independent flips: of m labels at ε, k kept under Binomial(m, α) give the privacy loss
    (2k - m)ε, and losses add. delta(e) = E[max(0, 1 - exp(e - loss))] is convex and falls in e; solved by bisection
    from above. Exact for one ε. For several, losses are rounded up to a grid of 2^-16 Σ mε, which can only overstate e
    (by at most the number of levels times that). 0 < delta < 1, every m >= 1, every ε > 0; UserError otherwise.
    """
    if not levels or any(not events >= 1 or not epsilon > 0.0 for epsilon, events in levels) or not 0.0 < delta < 1.0:
        raise UserError(f"person_epsilon needs events >= 1 and 0 < delta < 1, got {levels} and {delta}; correct them")
    losses, masses, lost = _losses(levels)
    if lost >= delta:
        raise UserError(f"person_epsilon cannot resolve delta {delta}; choose a larger one")

    def spill(total: float) -> float:
        above = np.searchsorted(losses, total, side="right")
        return lost + float(np.sum(masses[above:] * -np.expm1(total - losses[above:])))

    low, high = 0.0, math.fsum(epsilon * events for epsilon, events in levels)
    if spill(low) <= delta:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if spill(middle) <= delta else (middle, high)
    return high


def largest_person_epsilon(everyone: Iterable[Sequence[tuple[float, int]]], delta: float) -> float:
    """An e at which the labels of each person, as `person_epsilon` takes them by rising ε, are (e, delta)-private.

    The smallest such e where each person's labels have one ε. Persons who share a set of several ε count as one person
    with the most labels at each. e is at most the largest Σ mε, and 0 without persons.
    """
    most: dict[tuple[float, ...], tuple[int, ...]] = {}
    total = 0.0
    for levels in everyone:
        epsilons, counts = zip(*levels, strict=True)
        most[epsilons] = tuple(map(max, counts, most.get(epsilons, counts)))
        total = max(total, math.fsum(map(operator.mul, epsilons, counts)))
    profiles = [(math.fsum(map(operator.mul, *profile)), list(zip(*profile, strict=True))) for profile in most.items()]
    largest = 0.0
    for bound, levels in sorted(profiles, reverse=True):
        if bound <= largest:  # at δ nobody loses more than at 0, so no profile after it does
            break
        largest = max(largest, person_epsilon(levels, delta))
    return min(total, largest)


def _losses(levels: Sequence[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray, float]:
    """(rising losses, their masses, mass left out) of the sum over the levels."""
    if len(levels) == 1:
        ((epsilon, events),) = levels
        return (2.0 * np.arange(events + 1) - events) * epsilon, _kept_masses(epsilon, events), 0.0
    most = math.fsum(epsilon * events for epsilon, events in levels)
    cell = 2 * most / CELLS
    first, masses, lost = 0, np.ones(1), 0.0
    for epsilon, events in levels:
        kept = _kept_masses(epsilon, events)
        counts = np.flatnonzero(kept >= NEGLIGIBLE)
        lost += float(kept[kept < NEGLIGIBLE].sum())
        steps = np.ceil((2.0 * counts - events) * epsilon / cell).astype(np.int64)
        total = np.zeros(len(masses) + int(steps[-1] - steps[0]))
        for step, mass in zip(steps - steps[0], kept[counts], strict=True):
            total[step : step + len(masses)] += mass * masses
        first, masses = first + int(steps[0]), total
    return (first + np.arange(len(masses))) * cell, masses, lost


def _kept_masses(epsilon: float, events: int) -> np.ndarray:
    """(events + 1,) Binomial(events, α) masses of the number of labels kept, α = e^ε/(1+e^ε)."""
    log_keep = -math.log1p(math.exp(-epsilon))
    kept = np.arange(events + 1)
    log_factorial = np.array([math.lgamma(count + 1) for count in range(events + 1)])
    choices = log_factorial[-1] - log_factorial - log_factorial[::-1]
    return np.exp(choices + events * log_keep - (events - kept) * epsilon)


def split_budget(total: float, questions: int | None = None) -> tuple[int, float]:
    """(k, ε): how many answers of a person count, k in 1..questions, and what each costs, for the most information.

    total: E, what one person may lose by all their answers together; finite, > 0. questions: the most that anyone
    answers, >= 1; None: no limit. ε is the largest float with k·ε <= E, never above by rounding. Of two k that carry
    the same the smaller one is taken: it asks less. Information is Fisher's at margin 0. UserError otherwise.
    """
    total = check_epsilon(total, "the budget of a person")
    if questions is not None and questions < 1:
        raise UserError(f"questions must be at least 1 for a person, got {questions}: ask one")
    below = max(1, math.floor(total / BEST_EPSILON))
    candidates = sorted({min(count, questions or count) for count in (below, below + 1)})
    answers = max(candidates, key=lambda count: information(total, count))
    return answers, epsilon_each(total, answers)


def epsilon_each(total: float, answers: int) -> float:
    """The largest float ε with answers·ε <= total, exactly."""
    epsilon = total / answers
    return epsilon if Fraction(epsilon) * answers <= Fraction(total) else math.nextafter(epsilon, 0.0)


def information(total: float, answers: int) -> float:
    """Σ tanh²(ε/2) over the answers, at ε = total/answers each: their Fisher information at margin 0 is a quarter."""
    return answers * LabelNoise.of(total / answers).factor ** 2
