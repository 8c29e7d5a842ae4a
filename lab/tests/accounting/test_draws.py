"""The Gibbs-draw accountants: numbers by hand, limits, monotonicity, and what they refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions
from private_rlhf_lab.accounting.draws import (
    Thresholds,
    bandit_approximate,
    bandit_epsilon,
    bandit_pure,
    curvature_floor,
    inverse_root_drop,
    linear_draw,
    linear_epsilon,
    rlhf_draw,
    rlhf_epsilon,
    rlhf_label_instance_epsilon,
)

POSITIVE = st.floats(0.01, 50.0)


def test_bandit_by_hand() -> None:
    """R/(M+1) + β(1/√M − 1/√(M+1)) over η at M = 3: 1/4 + 2(1/√3 − 1/2), halved."""
    assert bandit_epsilon(2.0, 2.0, 1.0, 3) == pytest.approx((0.25 + 2.0 * (3**-0.5 - 0.5)) / 2.0)
    assert bandit_pure(2.0, 2.0, 1.0, 3).delta == 0.0


def test_root_drop_does_not_cancel() -> None:
    assert inverse_root_drop(1e12) == pytest.approx(0.5e-18, rel=1e-9)


def test_bandit_approximate_by_hand() -> None:
    found = bandit_approximate(0.1, 20.0, 1.0, 100, 0.25, 0.5)
    assert found.epsilon == pytest.approx(bandit_epsilon(0.1, 20.0, 1.0, 25))
    assert found.delta == pytest.approx(2.0 * math.exp(-(20.0 * (1 / 5 - 1 / 10) - 1.0) / 0.1))
    assert bandit_approximate(1.0, 1.0, 1.0, 100, 0.29, 0.5).details["count_threshold"] == 29


def test_a_vacuous_delta_says_so() -> None:
    found = bandit_approximate(1.0, 0.0, 1.0, 100, 0.5, 0.5)
    assert found.delta == 1.0
    assert "VACUOUS" in found.statement


@pytest.mark.parametrize(("radius", "scaled"), [(1.0, 38.1), (2.0, 226.5), (0.5, 20.34)])
def test_rlhf_label_constants(radius: float, scaled: float) -> None:
    """2L/γ of the unit feature ball, for μ >= 4."""
    for eigenvalue in (4.0, 1000.0):
        assert rlhf_epsilon(1.0, eigenvalue, radius, "label") * eigenvalue == pytest.approx(scaled, rel=1e-3)


def test_curvature_is_the_slope_of_the_sigmoid() -> None:
    assert curvature_floor(1.0) == pytest.approx(1.0 / (2.0 + math.exp(2.0) + math.exp(-2.0)))
    assert curvature_floor(1.0, 0.5) == pytest.approx(1.0 / (2.0 + math.e + 1.0 / math.e))


def test_label_notion_does_not_depend_on_pessimism_and_add_remove_does() -> None:
    label = {rlhf_epsilon(1.0, 50.0, 1.0, "label", pessimism=level) for level in (0.0, 5.0)}
    added = [rlhf_epsilon(1.0, 50.0, 1.0, "add-remove", pessimism=level) for level in (0.0, 5.0)]
    assert len(label) == 1
    assert added[1] == pytest.approx(added[0] + 5.0 * inverse_root_drop(50.0, 4.0))


@given(POSITIVE, st.floats(0.3, 3.0), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_features_and_parameters_trade_off(eigenvalue: float, scale: float, radius: float, kl_coef: float) -> None:
    """Scaling features by s, parameters by 1/s and μ by s² leaves the policy, so also ε, as it is."""
    for notion in ("label", "add-remove"):
        plain = rlhf_epsilon(kl_coef, eigenvalue, radius, notion, ridge=eigenvalue / 2)
        scaled = rlhf_epsilon(
            kl_coef, eigenvalue * scale**2, radius / scale, notion, feature_norm=scale, ridge=eigenvalue / 2 * scale**2
        )
        assert scaled == pytest.approx(plain, rel=1e-9)


@given(POSITIVE, POSITIVE, POSITIVE, st.integers(1, 1000))
def test_epsilon_falls_with_kl_and_coverage(kl_coef: float, level: float, eigenvalue: float, rows: int) -> None:
    assert bandit_epsilon(2 * kl_coef, level, 1.0, rows) == pytest.approx(bandit_epsilon(kl_coef, level, 1.0, rows) / 2)
    assert bandit_epsilon(kl_coef, level, 1.0, rows + 1) < bandit_epsilon(kl_coef, level, 1.0, rows)
    more = linear_epsilon(kl_coef, level, 1.0, eigenvalue * 1.1, rows)
    assert more < linear_epsilon(kl_coef, level, 1.0, eigenvalue, rows)


def test_linear_by_hand() -> None:
    """μ = 3, N = 12, R = 1: 2(1 + 2)/√12 plus β(1/√3 − 1/2); the constrained remark replaces R√(N/μ) by B."""
    assert linear_epsilon(1.0, 1.0, 1.0, 3.0, 12) == pytest.approx(6.0 / math.sqrt(12.0) + 3**-0.5 - 0.5)
    assert linear_epsilon(1.0, 0.0, 1.0, 3.0, 12, parameter_norm=0.5) == pytest.approx(3.0 / math.sqrt(12.0))


def test_thresholds_exchange_epsilon_for_delta() -> None:
    split = Thresholds(tau=0.05, core=0.01, reference_odds=0.5)
    narrow = linear_draw(0.2, 200.0, 1.0, 25.0, 25, thresholds=split, parameter_norm=1.0)
    assert narrow.delta == pytest.approx(0.5 * math.exp(-(200.0 * 0.04 - 2.0) / 0.2))
    assert narrow.epsilon < linear_draw(0.2, 200.0, 1.0, 25.0, 25, parameter_norm=1.0).epsilon
    close = Thresholds(tau=0.05, core=0.01, reference_odds=0.5, separation=0.5)
    assert linear_draw(0.2, 200.0, 1.0, 25.0, 25, thresholds=close, parameter_norm=1.0).delta == pytest.approx(
        narrow.delta * math.exp(-1.5 / 0.2)
    )
    label = rlhf_draw(0.2, 25.0, 1.0, "label", pessimism=200.0, thresholds=split)
    assert label.epsilon == pytest.approx(rlhf_epsilon(0.2, 25.0, 1.0, "label") * 0.05 * 5.0)
    assert label.delta == narrow.delta


def test_instance_form_at_its_worst_is_the_worst_case() -> None:
    """Two opposite actions on the least covered axis, a pair across it: widths 2/√μ and L/√μ."""
    worst = rlhf_epsilon(0.3, 40.0, 1.0, "label")
    assert rlhf_label_instance_epsilon(0.3, 1.0, 2.0 / math.sqrt(40.0), 2.0 / math.sqrt(40.0)) == pytest.approx(worst)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: bandit_pure(0.0, 1.0, 1.0, 5), "kl_coef"),
        (lambda: bandit_pure(math.nan, 1.0, 1.0, 5), "kl_coef"),
        (lambda: bandit_pure(1.0, -1.0, 1.0, 5), "pessimism"),
        (lambda: bandit_pure(1.0, 1.0, math.inf, 5), "reward_range"),
        (lambda: bandit_pure(1.0, 1.0, 1.0, 0), "min_count"),
        (lambda: bandit_approximate(1.0, 1.0, 1.0, 3, 0.2, 0.5), "coverage_ratio"),
        (lambda: bandit_approximate(1.0, 1.0, 1.0, 30, 1.0, 0.5), "coverage_ratio"),
        (lambda: bandit_approximate(1.0, 1.0, 1.0, 30, 0.5, 0.0), "reference_mass"),
        (lambda: linear_draw(1.0, 1.0, 1.0, 0.0, 5), "lambda_min"),
        (lambda: linear_draw(1.0, 1.0, 1.0, 1.0, -1), "rows"),
        (lambda: linear_draw(1.0, 1.0, 1.0, 1.0, 5, thresholds=Thresholds(0.1, 0.2, 1.0)), "core"),
        (lambda: rlhf_draw(1.0, 1.0, 1.0, "swap"), "notion"),
        (lambda: rlhf_draw(1.0, 1.0, 400.0, "label"), "parameter_norm"),
        (lambda: rlhf_draw(1.0, 0.5, 1.0, "label", ridge=1.0), "lambda_min"),
    ],
)
def test_outside_the_assumptions(call: object, name: str) -> None:
    with pytest.raises(OutsideAssumptions, match=f"^{name} ") as refusal:
        call()  # type: ignore[operator]
    assert refusal.value.name == name
    assert "\n" not in str(refusal.value)


def test_a_computed_eigenvalue_may_be_rounded_below_the_ridge() -> None:
    """The least eigenvalue of λI is λ only up to rounding."""
    rounded = 0.3 * (1.0 - 1e-15)
    assert rounded < 0.3
    assert rlhf_draw(1.0, rounded, 1.0, "label", ridge=0.3).epsilon == pytest.approx(
        rlhf_draw(1.0, 0.3, 1.0, "label", ridge=0.3).epsilon
    )
