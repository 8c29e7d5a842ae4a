"""Randomised response: exact laws by enumeration, statistics with stated false-alarm rates, and near misses rejected.

False alarms: every statistical test uses fixed keys, so it is deterministic; its threshold would reject a true
mechanism with probability 1e-4 over the choice of keys.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LEVELS
from private_rlhf.data.spellings import LETTERS_DOMAIN
from private_rlhf.privacy.batches import KEYS, LABELER_DOMAIN, blinds, event_tags, tie_coins
from private_rlhf.privacy.counts import COUNT_DOMAIN
from private_rlhf.privacy.mechanism import (
    DOMAIN,
    WALK_DOMAIN,
    Coins,
    PublicLabels,
    RandomizedResponse,
    last_coin,
    make_mechanism,
)
from private_rlhf.privacy.prf import DIGEST_DOMAIN, Prf, frame
from scipy.stats import binomtest, chi2, chisquare

ALARM = 1e-4
OCTAVES_OF_TEST = 3
KEY = bytes(range(32))
PRF = Prf(KEY)
GOLDEN = "+++-++-+-+++++--++--++++"  # z of events 0 to 23 at epsilon 0.5, label +1


def event(index: int) -> bytes:
    return f"event {index}".encode()


class Fixed:
    """`Coins` with everything written out: per octave the visited levels, falling, with their coins."""

    def __init__(self, ground: int, octaves: list[list[tuple[int, int]]]) -> None:
        self.ground, self.octaves = ground, octaves

    def visited(self, octave: int) -> bool:
        return bool(self.octaves[octave])

    def lowest(self, octave: int) -> int:
        return self.ground if octave < 0 else self.octaves[octave][-1][1]

    def walk(self, octave: int) -> Iterator[tuple[int, int]]:
        visits = self.octaves[octave]
        yield from visits[:-1]
        yield visits[-1][0], -visits[-1][1]  # the lowest visit's coin is `lowest`, whatever the walk says
        yield 0, 1


def visits(octave: int) -> list[tuple[list[tuple[int, int]], Fraction]]:
    """Every outcome of an octave with its probability: level k is visited with probability 1/(k+1), coins are fair."""
    outcomes: list[tuple[list[tuple[int, int]], Fraction]] = [([], Fraction(1))]
    for level in reversed(range(1 << octave, 2 << octave)):
        seen, not_seen = Fraction(1, 2 * (level + 1)), Fraction(level, level + 1)
        outcomes = [
            *((path, weight * not_seen) for path, weight in outcomes),
            *(([*path, (level, coin)], weight * seen) for path, weight in outcomes for coin in (-1, 1)),
        ]
    return outcomes


def exact_joint_law(thresholds: tuple[int, ...], label: int) -> dict[tuple[int, ...], Fraction]:
    """The law of the releases at all thresholds below 2^3, by `last_coin` on every outcome."""
    law: dict[tuple[int, ...], Fraction] = Counter()
    for ground, *octaves in itertools.product((-1, 1), *(visits(octave) for octave in range(OCTAVES_OF_TEST))):
        coins = Fixed(ground, [path for path, _ in octaves])
        weight = Fraction(1, 2) * math.prod(weight for _, weight in octaves)
        law[tuple(last_coin(label, threshold, coins, OCTAVES_OF_TEST) for threshold in thresholds)] += weight
    assert sum(law.values()) == 1
    return law


def test_exact_marginal_law_for_every_threshold() -> None:
    levels = 1 << OCTAVES_OF_TEST
    for threshold, label in itertools.product(range(levels), (-1, 1)):
        law = exact_joint_law((threshold,), label)
        assert law[(label,)] == Fraction(levels + threshold, 2 * levels)
        assert law[(label,)] + law[(-label,)] == 1


@pytest.mark.parametrize("thresholds", [(5, 2), (4, 3, 1), (7, 6, 5, 4), (6, 4, 2, 1), (7, 5, 3, 0)])
def test_all_releases_together_cost_the_largest_epsilon_exactly(thresholds: tuple[int, ...]) -> None:
    levels = 1 << OCTAVES_OF_TEST
    plus, minus = (exact_joint_law(thresholds, label) for label in (1, -1))
    top = max(thresholds)
    allowed = Fraction(levels + top, levels - top)
    cells = list(itertools.product((-1, 1), repeat=len(thresholds)))
    ratios = [plus[cell] / minus[cell] for cell in cells if minus[cell]]
    assert all(plus[cell] == 0 for cell in cells if not minus[cell])
    assert max(ratios) == allowed
    assert min(ratios) == 1 / allowed
    for cell in cells:  # Markov: given the first release, the others do not depend on the label
        first_plus = sum(plus[other] for other in cells if other[0] == cell[0])
        first_minus = sum(minus[other] for other in cells if other[0] == cell[0])
        assert plus[cell] / first_plus == minus[cell] / first_minus


def test_an_epsilon_chosen_after_an_earlier_release_costs_the_largest_asked_for() -> None:
    """The second threshold depends on the first z, the third on both: every transcript keeps to its own largest."""
    levels = 1 << OCTAVES_OF_TEST

    def transcripts(label: int) -> dict[tuple[tuple[int, int], ...], Fraction]:
        law: dict[tuple[tuple[int, int], ...], Fraction] = Counter()
        for second, third in itertools.product((6, 1), (7, 4)):
            for (z1, z2, z3), weight in exact_joint_law((3, second, third), label).items():
                if second == (6 if z1 == 1 else 1) and third == (7 if z1 == z2 else 4):
                    law[(3, z1), (second, z2), (third, z3)] += weight
        assert sum(law.values()) == 1
        return law

    plus, minus = transcripts(1), transcripts(-1)
    assert {max(threshold for threshold, _ in transcript) for transcript in plus} == {4, 6, 7}
    for transcript in plus.keys() | minus.keys():
        top = max(threshold for threshold, _ in transcript)
        allowed = Fraction(levels + top, levels - top)
        assert plus[transcript] / minus[transcript] in (allowed, 1 / allowed)


def test_one_uniform_with_several_thresholds_would_fail_the_exact_test() -> None:
    """The tempting construction: flip where one uniform exceeds the keep probability of each epsilon."""
    keep = (Fraction(3, 4), Fraction(5, 8))
    plus: Counter[tuple[int, int]] = Counter()
    minus: Counter[tuple[int, int]] = Counter()
    for eighth in range(8):
        kept = [Fraction(eighth, 8) < alpha for alpha in keep]
        plus[tuple(1 if k else -1 for k in kept)] += Fraction(1, 8)
        minus[tuple(-1 if k else 1 for k in kept)] += Fraction(1, 8)
    assert plus[(1, -1)] > 0
    assert minus[(1, -1)] == 0  # this pair of releases reveals the label


@pytest.mark.parametrize("epsilon", [1e-300, 1e-40, 1e-6, 0.1, 0.5, 1.0, 2.0, 10.0, 37.0, 50.0, 89.5, 100.0, 1e300])
def test_realised_alpha_is_never_above_and_never_far_below(epsilon: float) -> None:
    mechanism = RandomizedResponse(epsilon)
    with localcontext() as context:
        context.prec = 500
        alpha = 1 / (1 + (-Decimal(min(epsilon, 1000.0))).exp())
        exact = mechanism.noise.exact_keep
        realised = Decimal(exact.numerator) / Decimal(exact.denominator)
        assert realised <= alpha
        assert alpha - realised < Decimal(2) ** -127
    assert 0 <= mechanism.threshold < LEVELS
    assert Fraction(mechanism.noise.keep_prob) <= exact
    assert 0.5 <= mechanism.noise.keep_prob < 1.0
    assert 0.0 < mechanism.noise.flip_prob <= 0.5
    assert mechanism.noise.keep_prob == pytest.approx(1 / (1 + math.exp(-epsilon)), rel=1e-15)


@given(st.floats(1e-6, 89))
def test_labels_are_kept_as_often_as_stated(epsilon: float) -> None:
    """To the last of 129 bits: `last_coin` keeps with (2^128 + T)/2^129 (the exact law above)."""
    mechanism = RandomizedResponse(epsilon)
    assert Fraction(LEVELS + mechanism.threshold, 2 * LEVELS) == mechanism.noise.exact_keep


@given(st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
def test_the_threshold_is_the_floor(epsilon: float) -> None:
    """T <= tanh(epsilon/2) 2^128 < T + 1, by arithmetic with 700 digits in place of 120."""
    with localcontext() as context:
        context.prec = 700
        growth = Decimal(min(max(epsilon, 1e-300), 1000.0)).exp()
        exact = (growth - 1) / (growth + 1) * LEVELS
        threshold = RandomizedResponse(epsilon).threshold
        assert threshold <= exact < threshold + 1


def test_flip_prob_is_accurate_where_floats_of_alpha_are_one() -> None:
    assert RandomizedResponse(37.0).noise.flip_prob == pytest.approx(math.exp(-37.0), rel=1e-12)


@given(st.floats(1e-6, 50), st.floats(1e-6, 50))
def test_the_threshold_rises_with_epsilon(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert RandomizedResponse(low).threshold <= RandomizedResponse(high).threshold


def marginal_p_value(releases: np.ndarray, keep_prob: float) -> float:
    """Two-sided exact binomial p-value of the number of kept labels (all labels +1)."""
    return binomtest(int((releases == 1).sum()), releases.size, keep_prob).pvalue


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_marginal_frequency_on_samples(epsilon: float) -> None:
    mechanism = RandomizedResponse(epsilon)
    releases = np.array([mechanism.release(PRF, event(i), 1) for i in range(20_000)])
    assert marginal_p_value(releases, mechanism.noise.keep_prob) > ALARM


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_flip_probability_off_by_a_tenth_is_rejected_by_the_same_test(sign: int) -> None:
    """n = 20,000, epsilon 2: 10 % of the flip probability is 5.2 standard errors, power > 0.9 at ALARM."""
    honest = RandomizedResponse(2.0)
    wrong_flip = honest.noise.flip_prob * (1 + 0.1 * sign)
    near_miss = RandomizedResponse(math.log((1 - wrong_flip) / wrong_flip))
    releases = np.array([near_miss.release(PRF, event(i), 1) for i in range(20_000)])
    assert marginal_p_value(releases, honest.noise.keep_prob) < ALARM
    assert marginal_p_value(releases, near_miss.noise.keep_prob) > ALARM


def joint_cells(high: float, low: float) -> dict[tuple[int, int], float]:
    """P(z(high), z(low) | y = +1), from the Markov chain in closed form."""
    t_high, t_low = math.tanh(high / 2), math.tanh(low / 2)
    return {
        (a, b): (1 + a * t_high) / 2 * (1 + a * b * t_low / t_high) / 2 for a, b in itertools.product((-1, 1), repeat=2)
    }


def test_joint_law_of_two_levels_on_samples() -> None:
    n, high, low = 20_000, RandomizedResponse(2.0), RandomizedResponse(0.5)
    cells = joint_cells(high.epsilon, low.epsilon)
    assert sum(cells.values()) == pytest.approx(1)
    expected = [n * p for p in cells.values()]

    def p_value(prf_of_low: Prf) -> float:
        events = [event(i) for i in range(n)]
        pairs = Counter((high.release(PRF, name, 1), low.release(prf_of_low, name, 1)) for name in events)
        return float(chisquare([pairs[cell] for cell in cells], expected).pvalue)

    assert p_value(PRF) > ALARM
    assert p_value(Prf(b"2" * 32)) < ALARM  # draws of another key at the low level: what composes to high + low


def test_release_does_not_depend_on_the_order_or_number_of_releases() -> None:
    epsilons = [0.1, 0.5, 1.0, 2.0, 5.0]
    for i in range(200):
        rising = {e: RandomizedResponse(e).release(PRF, event(i), -1) for e in epsilons}
        falling = {e: RandomizedResponse(e).release(PRF, event(i), -1) for e in reversed(epsilons)}
        assert rising == falling


def test_once_a_coin_has_replaced_the_label_lower_releases_forget_it() -> None:
    """Where z(high) is the same for both labels, so is z at every lower epsilon; and some events show each case."""
    outcomes = Counter()
    for i in range(500):
        same = [
            RandomizedResponse(e).release(PRF, event(i), 1) == RandomizedResponse(e).release(PRF, event(i), -1)
            for e in (4.0, 2.0, 1.0, 0.5, 0.1)
        ]
        assert same == sorted(same)
        outcomes[sum(same)] += 1
    assert len(outcomes) == 6


def test_distinct_events_get_independent_bits() -> None:
    """2 x 2 chi-square of neighbouring events, and of one event under two keys."""
    mechanism = RandomizedResponse(0.5)
    bits = np.array([mechanism.release(PRF, event(i), 1) for i in range(20_000)])
    other_key = np.array([mechanism.release(Prf(b"k" * 32), event(i), 1) for i in range(20_000)])
    for first, second in ((bits[0::2], bits[1::2]), (bits, other_key)):
        keep = mechanism.noise.keep_prob
        expected = [len(first) * p for p in (keep * keep, keep * (1 - keep), keep * (1 - keep), (1 - keep) ** 2)]
        observed = [int(((first == a) & (second == b)).sum()) for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
        statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
        assert chi2.sf(statistic, 3) > ALARM


def test_release_is_a_pure_function_and_its_bits_never_change() -> None:
    values = [RandomizedResponse(0.5).release(Prf(KEY), event(i), 1) for i in range(24)]
    assert values == [RandomizedResponse(0.5).release(Prf(KEY), event(i), 1) for i in range(24)]
    assert "".join("+" if v == 1 else "-" for v in values) == GOLDEN


def test_blocks_are_keyed_blake2b_in_their_domain() -> None:
    expected = hashlib.blake2b(b"message", key=KEY, digest_size=48, person=b"domain").digest()
    assert PRF.block(b"domain", b"message") == expected
    assert PRF.blocks(b"domain", [b"message", b"other"]) == expected + PRF.block(b"domain", b"other")
    assert PRF.block(b"domain2", b"message") != expected
    assert len({PRF.block(DOMAIN, b""), PRF.block(WALK_DOMAIN, b""), Prf(b"k" * 32).block(DOMAIN, b"")}) == 3


def test_tags_and_blinds_share_no_bit_with_the_coins() -> None:
    """What names an event in its owner's store, blinds its label, chooses it or breaks a tie is independent of z."""

    class Rooted(Prf):
        __slots__ = ("root",)

        def block(self, domain: bytes, message: bytes) -> bytes:
            return self.root

    def coins(root: bytes) -> list[object]:
        prf = Rooted(KEY)
        prf.root = root
        found = Coins(prf, b"")
        return [(found.visited(octave), found.lowest(octave)) for octave in range(128)] + [found.lowest(-1)]

    root = PRF.block(DOMAIN, event(0))
    for bit in range(8 * len(root)):
        other = bytearray(root)
        other[bit // 8] ^= 1 << bit % 8
        row = np.zeros(2, KEYS)
        row["root"] = [list(root), list(other)]
        (tag, turned), (blind, against) = row["root"][:, 32:47].tolist(), blinds(row).tolist()
        assert np.array_equal(event_tags(row)[:, 1:], row["root"][:, 32:47])
        tie, other_tie = tie_coins(row).tolist()
        assert (blind != against) + (tie != other_tie) <= 1
        named = tag != turned or blind != against or tie != other_tie
        assert not (named and coins(root) != coins(bytes(other))), bit


def test_uses_of_the_key_are_told_apart_by_their_domain() -> None:
    """No two uses ever give the key the same input. (`private_rlhf.audit.twins` has a key of its own.)"""
    domains = {"DOMAIN": DOMAIN, "WALK_DOMAIN": WALK_DOMAIN, "COUNT_DOMAIN": COUNT_DOMAIN,
               "LABELER_DOMAIN": LABELER_DOMAIN, "DIGEST_DOMAIN": DIGEST_DOMAIN,
               "LETTERS_DOMAIN": LETTERS_DOMAIN}  # fmt: skip
    padded = {domain.ljust(16, b"\0") for domain in domains.values()}  # as BLAKE2b pads it
    assert len(padded) == len(domains)
    assert {len(domain) for domain in padded} == {16}
    package = Path(__file__).parents[2] / "pipeline"
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.name != "twins.py"]
    asked = [name for text in sources for name in re.findall(r"\.blocks?\(([\w\"']+)[,)]", text)]
    assert set(asked) <= set(domains)
    assert len(asked) >= 5


def test_the_walk_visits_each_level_by_itself_with_the_right_probability() -> None:
    """Octave 2 (levels 4 to 7), 16 subsets, 20,000 events; and coins that are fair."""
    subsets: Counter[tuple[int, ...]] = Counter()
    coins = Counter()
    for i in range(20_000):
        source = Coins(PRF, event(i))
        path = list(source.walk(2)) if source.visited(2) else []
        subsets[tuple(level for level, _ in path if level >= 4)] += 1
        assert not path or path[-1][0] < 4
        coins.update(coin for _, coin in path[:-1])
        coins["lowest", source.lowest(2)] += 1
    law = Counter()
    for path, weight in visits(2):
        law[tuple(level for level, _ in path)] += weight
    cells = [cell for cell in law if 20_000 * law[cell] >= 5]
    rest = 20_000 - sum(subsets[cell] for cell in cells)
    expected = [20_000 * float(law[cell]) for cell in cells]
    observed = [subsets[cell] for cell in cells]
    if len(cells) < len(law):
        observed, expected = [*observed, rest], [*expected, 20_000 - sum(expected)]
    assert chisquare(observed, expected).pvalue > ALARM
    assert chisquare([coins[-1], coins[1]]).pvalue > ALARM
    assert chisquare([coins["lowest", -1], coins["lowest", 1]]).pvalue > ALARM


def test_octaves_are_visited_half_of_the_time_and_independently() -> None:
    sources = [Coins(PRF, event(i)) for i in range(20_000)]
    for first, second in ((127, 126), (3, 0), (64, 63)):
        cells = Counter((source.visited(first), source.visited(second)) for source in sources)
        assert chisquare([cells[cell] for cell in itertools.product((False, True), repeat=2)]).pvalue > ALARM


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_framing_is_injective(first: list[bytes], second: list[bytes]) -> None:
    assert (b"".join(map(frame, first)) == b"".join(map(frame, second))) == (first == second)


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, -math.inf, True, "2", None, 10**400])
def test_bad_epsilon_is_refused(epsilon: object) -> None:
    with pytest.raises(UserError, match=r"^epsilon must be a (finite )?number above 0, got .*; .*epsilon: 2$"):
        RandomizedResponse(epsilon)  # type: ignore[arg-type]


def test_infinite_epsilon_needs_public_labels() -> None:
    assert isinstance(make_mechanism(math.inf, public=True), PublicLabels)
    assert make_mechanism(2.0, public=True) == RandomizedResponse(2.0)
    with pytest.raises(UserError, match=r"releases the true labels; declare the labels public"):
        make_mechanism(math.inf)


def test_guarantee_states_what_is_promised() -> None:
    facts = RandomizedResponse(2.0).guarantee()
    assert facts["epsilon"] == 2.0
    assert facts["keep_prob"] == pytest.approx(0.8807970779778823)
    assert "one labelling event" in facts["unit"]
    assert "differ in the label of one event" in facts["neighbouring"]
    assert PublicLabels().guarantee()["epsilon"] is None
