"""The empirical audit: bounds below the claim for sound mechanisms, a 5 % fault caught at the computed size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from private_rlhf.audit.judge import upper_tail
from private_rlhf.audit.mechanism_bound import FALSE_ALARM, Audit, audit_outcomes
from private_rlhf.audit.statistics import numbers
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.privacy.local import privatize_label
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.prf import Prf

CAUGHT_NINE_TIMES_IN_TEN = 20_617
"""The least number of labels at ε = 1 of which the count exposes a flip probability off by 5 % with probability .9 at a
false alarm of .001: by the exact binomial power, from there on."""


def keyed(epsilon: float, secret: bytes):
    """A new event at every call."""
    count, mechanism, prf = iter(range(1 << 60)), RandomizedResponse(epsilon), Prf(secret)
    return lambda label: mechanism.release(prf, b"audit-%d" % next(count), label)


def simulated(flip_prob: float, seed: int):
    generator = random.Random(seed)
    return lambda label: -label if generator.random() < flip_prob else label


def audit_mechanism(draw: Callable[[int], int], epsilon: float, samples: int) -> tuple[Audit, bool]:
    """The audit of z for y = +1 and y = -1 (`samples` in all) from `draw(y)`, and whether it or the count of kept
    labels is evidence against the claim; both share the false alarm.

    The number of kept labels of both is tested against Binomial(samples, alpha): epsilon-LDP bounds the mean of the two
    keep probabilities by alpha, and two shares with that mean spread less than one (Hoeffding 1956).
    """
    each = samples // 2
    plus, minus = [draw(1) for _ in range(each)], [draw(-1) for _ in range(each)]
    bound = audit_outcomes(plus, minus, epsilon, FALSE_ALARM / 3)
    kept = sum(z == 1 for z in plus) + sum(z == -1 for z in minus)
    p_value = upper_tail(kept, 2 * each, LabelNoise.of(epsilon).keep_prob)
    return bound, bound.caught or p_value < 2 * FALSE_ALARM / 3


def audit_releases(draw: Callable[[int], Sequence[int]], epsilons: Sequence[float], samples: int) -> Audit:
    """The joint law of several releases of one event against the claim max(epsilons). draw(y): their z, one each."""
    each = samples // 2
    plus = [tuple(draw(1)) for _ in range(each)]
    minus = [tuple(draw(-1)) for _ in range(each)]
    return audit_outcomes(plus, minus, max(epsilons))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_the_keyed_mechanism_passes(epsilon: float) -> None:
    """Fixed key, so a fixed outcome."""
    audit, caught = audit_mechanism(keyed(epsilon, bytes(range(32))), epsilon, 8000)
    assert not caught
    assert audit.epsilon_low <= epsilon
    if epsilon >= 1:
        assert audit.epsilon_low > 0.7 * epsilon  # the bound is no dead letter


def test_the_local_mechanism_passes() -> None:
    """The operating system's randomness: 1 run in 1,000 would fail."""
    audit, caught = audit_mechanism(lambda label: privatize_label(label, 1.0), 1.0, 4000)
    assert not caught
    assert 0.7 < audit.epsilon_low <= 1.0


def test_several_releases_of_one_event_cost_the_largest_epsilon() -> None:
    epsilons, prf, count = (0.3, 1.0, 2.0), Prf(bytes(range(1, 33))), iter(range(1 << 60))

    def draw(label: int) -> tuple[int, ...]:
        event = b"chain-%d" % next(count)
        return tuple(RandomizedResponse(epsilon).release(prf, event, label) for epsilon in epsilons)

    audit = audit_releases(draw, epsilons, 6000)
    assert not audit.caught
    assert 1.4 < audit.epsilon_low <= 2.0


def test_independent_flips_and_one_uniform_are_caught() -> None:
    generator = random.Random(4)

    def independent(label: int) -> tuple[int, ...]:
        return tuple(-label if generator.random() > 1 / (1 + math.exp(-e)) else label for e in (1.0, 1.5))

    def one_uniform(label: int) -> tuple[int, ...]:
        u = generator.random()
        return tuple(-label if u > 1 / (1 + math.exp(-e)) else label for e in (0.5, 1.5))

    for draw in (independent, one_uniform):
        audit = audit_releases(draw, (0.5, 1.5), 6000)
        assert audit.caught
        assert audit.epsilon_low > 1.5


def test_a_bound_is_wrong_as_seldom_as_stated() -> None:
    """200 audits of a fair coin at a false alarm of 5 %: over 20 positive bounds have probability below 1e-3."""
    generator = random.Random(8)
    wrong = 0
    for _ in range(200):
        plus, minus = generator.choices((-1, 1), k=60), generator.choices((-1, 1), k=60)
        wrong += audit_outcomes(plus, minus, 0.0, false_alarm=0.05).epsilon_low > 0
    assert wrong <= 20


def test_many_outcomes_are_searched_on_one_half_and_tested_on_the_other() -> None:
    generator = random.Random(2)
    plus = [generator.gauss(1, 1) // 0.1 for _ in range(4000)]
    minus = [generator.gauss(-1, 1) // 0.1 for _ in range(4000)]
    assert audit_outcomes(plus, minus, 1.0).caught
    same = [generator.gauss(0, 1) // 0.1 for _ in range(4000)]
    assert audit_outcomes(same[:2000], same[2000:], 0.1).epsilon_low < 0.1


def test_a_flip_probability_off_by_five_percent_is_caught_nine_times_in_ten() -> None:
    """The draws are simulated with 1 - alpha less 5 %. Of 40 audits, fewer than 29 caught has probability 2e-4 at .9;
    of 40 sound ones, more than 2 has probability 1e-5 at .001.
    """
    epsilon = 1.0
    samples = CAUGHT_NINE_TIMES_IN_TEN
    mechanism = RandomizedResponse(epsilon)
    generator = np.random.default_rng(0)

    def caught(flip_prob: float) -> int:
        kept = samples - generator.binomial(samples, flip_prob, size=40)
        return sum(upper_tail(int(count), samples, mechanism.noise.keep_prob) <= 0.001 for count in kept)

    assert caught(0.95 * mechanism.noise.flip_prob) >= 29
    assert caught(mechanism.noise.flip_prob) <= 2


def test_a_broken_mechanism_is_caught_through_its_outputs() -> None:
    samples = int(1.2 * CAUGHT_NINE_TIMES_IN_TEN)
    flip_prob = RandomizedResponse(1.0).noise.flip_prob
    assert audit_mechanism(simulated(0.95 * flip_prob, 3), 1.0, samples)[1]
    assert not audit_mechanism(simulated(flip_prob, 3), 1.0, samples)[1]


def test_an_audit_needs_both_labels() -> None:
    with pytest.raises(UserError, match="outputs of both labels"):
        audit_outcomes([1], [], 1.0)


def test_a_row_is_one_row_whatever_breaks_its_texts_hold() -> None:
    """Cut at U+2028, a row was no JSON any more, and its numbers lost their names."""
    assert list(numbers(".jsonl", '{"raw": {"mtime": 5}, "text": "x\u2028y"}\n')) == [("raw.mtime", 5.0, 1.0)]
