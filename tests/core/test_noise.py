"""How noisy a label is: exact probabilities, JSON both ways, and a release's own statement before any formula."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from private_rlhf.core.noise import PUBLIC, LabelNoise, check_epsilon, epsilon_of, is_public, upper_text
from private_rlhf.core.stats import Estimate

EPSILONS = (1e-300, 1e-20, 1e-4, 0.5, 2.0, 37.0, 89.5, 1e300)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_every_number_is_the_exact_one_rounded_once(epsilon: float) -> None:
    """Against 500 digits; the mechanism's α lies at most 2^-127 below e^ε/(1+e^ε)."""
    noise = LabelNoise.of(epsilon)
    with localcontext() as context:
        context.prec = 500
        alpha = 1 / (1 + (-Decimal(min(epsilon, 1000.0))).exp())
        keep = Decimal(noise.exact_keep.numerator) / Decimal(noise.exact_keep.denominator)
        assert 0 <= alpha - keep < Decimal(2) ** -127
        for found, exact in ((noise.flip_prob, 1 - keep), (noise.factor, 2 * keep - 1)):
            assert found == pytest.approx(float(exact), rel=3e-16, abs=0)
        for found, exact in ((noise.log_keep, keep.ln()), (noise.log_flip, (1 - keep).ln())):
            assert found == pytest.approx(float(exact), rel=1e-15, abs=0)
    assert Fraction(noise.keep_prob) <= noise.exact_keep < Fraction(math.nextafter(noise.keep_prob, 2.0))


def test_public_labels_and_labels_that_carry_nothing() -> None:
    assert LabelNoise.of(math.inf) == PUBLIC
    assert (PUBLIC.keep_prob, PUBLIC.flip_prob, PUBLIC.factor, PUBLIC.public) == (1.0, 0.0, 1.0, True)
    assert PUBLIC.log_keep == 0.0
    assert PUBLIC.log_flip == -math.inf
    nothing = LabelNoise.of(0.0)
    assert (nothing.keep_prob, nothing.flip_prob, nothing.factor) == (0.5, 0.5, 0.0)
    for epsilon in (-1.0, math.nan, True, "2", None, [2.0], 10**400):
        with pytest.raises(ValueError, match="epsilon must be a number of at least 0"):
            LabelNoise.of(epsilon)  # type: ignore[arg-type]
    assert LabelNoise.of(np.float32(2.0)) == LabelNoise.of(np.int64(2)) == LabelNoise.of(2.0)
    assert check_epsilon(np.float32(0.5)) == check_epsilon(Fraction(1, 2)) == 0.5
    for noise in (0.0, nothing):
        with pytest.raises(ValueError, match="above 0"):
            LabelNoise.of(noise, allow_zero=False)
    assert is_public(math.inf)
    assert not is_public(None)
    assert epsilon_of(None) == math.inf


def test_debiasing_undoes_the_noise_and_widens_the_interval_by_its_factor() -> None:
    noise = LabelNoise.of(1.0)
    for truth in (0.0, 0.3, 1.0):
        released = truth * noise.keep_prob + (1 - truth) * noise.flip_prob
        assert noise.debias_share(released) == pytest.approx(truth, abs=1e-15)
    found = noise.debias(Estimate(0.5, 0.4, 0.6, 96))
    assert found.value == pytest.approx(0.5)
    assert found.ci_high - found.ci_low == pytest.approx(0.2 / math.tanh(0.5))
    assert found.n == 96
    assert noise.debias_share(0.0) < 0 < 1 < noise.debias_share(1.0)  # clipping would bias it
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        LabelNoise.of(0.0).debias_share(0.5)
    share = Estimate(0.5, 0.4, 0.6, 96)
    assert PUBLIC.debias(share) == share


@pytest.mark.parametrize("noise", [PUBLIC, *map(LabelNoise.of, (1e-4, 0.5, 2.0, 37.0, 120.0))])
def test_json_goes_both_ways(noise: LabelNoise) -> None:
    stated = noise.as_json()
    assert (stated["epsilon"] is None) == noise.public
    assert LabelNoise.from_json(stated) == noise


def test_what_older_files_rounded_is_the_mechanism_s_own() -> None:
    """Reward checkpoints used to state 1/(1 + exp(-ε)), which is 1.0 at ε = 37."""
    for epsilon in (0.1, 1.0, 2.0, 37.0):
        stated = {"epsilon": epsilon, "keep_prob": 1 / (1 + math.exp(-epsilon))}
        assert LabelNoise.from_json(stated) == LabelNoise.of(epsilon)


def test_another_statement_is_taken_as_it_is() -> None:
    noise = LabelNoise.from_json({"epsilon": 2.0, "keep_prob": 0.75})
    assert (noise.epsilon, noise.keep_prob, noise.flip_prob, noise.factor) == (2.0, 0.75, 0.25, 0.5)


@pytest.mark.parametrize(
    ("epsilon", "keep", "message"),
    [
        (2.0, 0.9, "does not belong"),  # more than ε allows
        (2.0, 0.4, "does not belong"),
        (None, 0.9, "does not belong"),
        (2.0, 1.0, "does not belong"),
        (2.0, math.nan, "must be a number"),
        (2.0, 10**400, "must be a number"),
        (2.0, True, "must be a number"),
        (2.0, None, "must be a number"),
        (0, 0.5, "finite number above 0"),
        (math.inf, 1.0, "finite number above 0"),
        ("2", 0.8, "epsilon must be a finite number"),
        (True, 0.7, "epsilon must be a finite number"),
    ],
)
def test_statements_that_cannot_be(epsilon: object, keep: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabelNoise.from_json({"epsilon": epsilon, "keep_prob": keep})


@pytest.mark.parametrize(
    ("epsilon", "share", "per_cent"),
    [
        (1.0, "0.731", "73.1\u00a0%"),
        (6.9, "0.999", "99.9\u00a0%"),
        (10.0, "0.99995", "99.995\u00a0%"),
        (20.0, "0.999999998", "99.9999998\u00a0%"),
        (60.0, "over 0.999999999", "over 99.9999999\u00a0%"),
        (800.0, "over 0.999999999", "over 99.9999999\u00a0%"),
        (math.inf, "1", "100\u00a0%"),
    ],
)
def test_no_label_is_said_to_be_kept_for_certain(epsilon: float, share: str, per_cent: str) -> None:
    noise = LabelNoise.of(epsilon)
    assert (noise.keep_text(), noise.keep_text(percent=True)) == (share, per_cent)


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (2.0, "2"),
        (0.1 + 0.2, "0.3"),
        (2.007, "2.007"),
        (1.87071016, "1.87072"),
        (1612.95412, "1612.96"),
        (12345678.0, "12345700"),
        (1.000001e-7, "1.00001e-7"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_a_bound_is_never_stated_below_its_value(epsilon: float, text: str) -> None:
    assert upper_text(epsilon) == text
    assert float(text) >= epsilon * (1 - 1e-12)


def test_a_label_that_is_nearly_always_kept_is_warned_of() -> None:
    assert LabelNoise.of(9.9).warning is LabelNoise.of(math.inf).warning is None
    assert LabelNoise.of(10.0).warning == (
        "at ε = 10 nearly every label is released as it is: about one in 22,027 is turned round"
    )
    assert str(LabelNoise.of(60.0).warning).endswith("about one in 1e+26 is turned round")
    assert str(LabelNoise.of(1e300).warning).endswith("about one in 7e+38 is turned round")  # 2^-129


def test_a_huge_whole_number_is_refused_in_one_line() -> None:
    from private_rlhf.core.errors import UserError

    with pytest.raises(UserError, match="--budget must be a finite number above 0"):
        check_epsilon(10**400, "--budget")
