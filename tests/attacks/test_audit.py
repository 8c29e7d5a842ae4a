"""The empirical audit: bounds below the claim for sound mechanisms, a 5 % fault caught at the computed size."""

from __future__ import annotations

import math
import random

import pytest

from pipeline.attacks.audit import audit_mechanism, audit_outcomes, audit_releases, audit_sample_size, detection_power
from pipeline.core.errors import UserError
from pipeline.privacy.mechanism import RandomizedResponse, keyed_response, privatize_label


def keyed(epsilon: float, secret: bytes):
    """A new event at every call."""
    count = iter(range(1 << 60))
    return lambda label: keyed_response(secret, b"audit-%d" % next(count), label, epsilon)


def simulated(flip_prob: float, seed: int):
    generator = random.Random(seed)
    return lambda label: -label if generator.random() < flip_prob else label


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_the_keyed_mechanism_passes(epsilon: float) -> None:
    """Fixed key, so a fixed outcome."""
    audit = audit_mechanism(keyed(epsilon, bytes(range(32))), epsilon, 8000)
    assert not audit.caught
    assert audit.epsilon_low <= epsilon
    if epsilon >= 1:
        assert audit.epsilon_low > 0.7 * epsilon  # the bound is no dead letter


def test_the_local_mechanism_passes() -> None:
    """The operating system's randomness: 1 run in 1,000 would fail."""
    audit = audit_mechanism(lambda label: privatize_label(label, 1.0), 1.0, 4000)
    assert not audit.caught
    assert 0.7 < audit.epsilon_low <= 1.0


def test_several_releases_of_one_event_cost_the_largest_epsilon() -> None:
    epsilons, secret, count = (0.3, 1.0, 2.0), bytes(range(1, 33)), iter(range(1 << 60))

    def draw(label: int) -> tuple[int, ...]:
        event = b"chain-%d" % next(count)
        return tuple(keyed_response(secret, event, label, epsilon) for epsilon in epsilons)

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


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 6.0])
def test_the_sample_size_has_the_power_and_little_less_has_not(epsilon: float) -> None:
    samples = audit_sample_size(epsilon, 0.05, 0.9, 0.001)
    mechanism = RandomizedResponse(epsilon)
    faulty = 1 - 0.95 * mechanism.noise.flip_prob
    assert detection_power(samples, mechanism.noise.keep_prob, faulty, 0.001) >= 0.9
    assert detection_power(int(0.97 * samples), mechanism.noise.keep_prob, faulty, 0.001) < 0.9


def test_a_flip_probability_off_by_five_percent_is_caught_nine_times_in_ten() -> None:
    """The draws are simulated with 1 - alpha less 5 %. Of 40 audits, fewer than 29 caught has probability 2e-4 at .9;
    of 40 sound ones, more than 2 has probability 1e-5 at .001.
    """
    import numpy as np

    from pipeline.attacks.judge import upper_tail

    epsilon = 1.0
    samples = audit_sample_size(epsilon, 0.05)
    mechanism = RandomizedResponse(epsilon)
    generator = np.random.default_rng(0)

    def caught(flip_prob: float) -> int:
        kept = samples - generator.binomial(samples, flip_prob, size=40)
        return sum(upper_tail(int(count), samples, mechanism.noise.keep_prob) <= 0.001 for count in kept)

    assert caught(0.95 * mechanism.noise.flip_prob) >= 29
    assert caught(mechanism.noise.flip_prob) <= 2


def test_a_broken_mechanism_is_caught_through_its_outputs() -> None:
    samples = int(1.2 * audit_sample_size(1.0, 0.05))
    flip_prob = RandomizedResponse(1.0).noise.flip_prob
    assert audit_mechanism(simulated(0.95 * flip_prob, 3), 1.0, samples).caught
    assert not audit_mechanism(simulated(flip_prob, 3), 1.0, samples).caught


@pytest.mark.parametrize(("error", "power"), [(0.0, 0.9), (1.0, 0.9), (0.05, 1.0), (0.05, 0.0)])
def test_senseless_requests_are_refused(error: float, power: float) -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        audit_sample_size(1.0, error, power)


def test_an_audit_needs_both_labels() -> None:
    with pytest.raises(UserError, match="outputs of both labels"):
        audit_outcomes([1], [], 1.0)
