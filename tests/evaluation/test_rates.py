"""Win rates: planted length effects, ties and biased judges, and whether 95 % intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.stats import Estimate, wilson
from private_rlhf.evaluation.judges import judged_rates
from private_rlhf.evaluation.rates import agreement, best_of_four, decided_win_rate, length_controlled
from scipy import optimize, special
from sklearn.linear_model import LogisticRegression

EVALUATIONS = 2000


def judged(skill: float, slope: float, longer_by: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(outcomes, length differences): P(win) = σ(skill + slope·tanh(Δ/sd)), sd 10, by `longer_by` more on average."""
    generator = np.random.default_rng(seed)
    length = generator.normal(longer_by, 10.0, size=n)
    win = special.expit(skill + slope * np.tanh(length / np.std(length)))
    return (generator.random(n) < win).astype(float), length


# --- length -----------------------------------------------------------------------------------------------------------


def test_a_pure_length_effect_is_no_win() -> None:
    """A judge that looks at length alone, a policy that writes more: 78 % of wins are nothing at equal length."""
    outcome, length = judged(0.0, 2.5, longer_by=8.0, n=2000, seed=3)
    found = length_controlled(outcome, length)
    assert found is not None
    assert outcome.mean() > 0.7
    assert found.ci_low < 0.5 < found.ci_high


@pytest.mark.parametrize("skill", [-0.5, 0.0, 0.8])
def test_the_skill_behind_a_length_effect_is_found(skill: float) -> None:
    outcome, length = judged(skill, 1.5, longer_by=6.0, n=4000, seed=4)
    found = length_controlled(outcome, length)
    assert found is not None
    assert found.ci_low < special.expit(skill) < found.ci_high
    assert found.ci_high - found.ci_low < 0.06


def test_the_fit_is_that_of_a_library() -> None:
    outcome, length = judged(0.4, 1.0, longer_by=5.0, n=300, seed=5)
    covariate = np.tanh(length / np.std(length))[:, None]
    library = LogisticRegression(C=math.inf, tol=1e-10).fit(covariate, outcome)
    found = length_controlled(outcome, length)
    assert found is not None
    assert found.value == pytest.approx(special.expit(library.intercept_[0]), abs=1e-5)


def test_nothing_is_said_where_lengths_separate_the_two() -> None:
    length = np.array([-3.0, -1.0, 2.0, 5.0])
    assert length_controlled(np.array([0.0, 0.0, 1.0, 1.0]), length) is None  # the longer always wins
    assert length_controlled(np.array([1.0, 1.0, 0.0, 0.0]), length) is None  # the shorter
    assert length_controlled(np.ones(4), length) is None  # no loss
    assert length_controlled(np.zeros(4), length) is None
    assert length_controlled(np.array([1.0, 0.0, 1.0, 0.0]), length + 10) is None  # longer on every prompt
    assert length_controlled(np.array([1.0, 0.0, 1.0, 0.0]), length - 10) is None
    assert length_controlled(np.array([]), np.array([])) is None
    assert length_controlled(np.array([0.5, 1.0, 0.0, 0.5]), length) is not None
    rates = judged_rates([{"outcome": value} for value in (0.0, 0.0, 1.0, 1.0)], [-3, -1, 2, 5], 0)
    assert rates["length_controlled_win_rate"] is None
    assert rates["win_rate"]["value"] == 0.5


def test_without_a_difference_of_lengths_it_is_the_win_rate() -> None:
    found = length_controlled(np.array([1.0, 0.0, 1.0, 0.5]), np.zeros(4))
    assert found is not None
    assert found.value == pytest.approx(0.625)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 40), slope=st.sampled_from([0.0, 1.0, 6.0]))
def test_swapping_the_two_gives_the_complement(seed: int, n: int, slope: float) -> None:
    outcome, length = judged(0.3, slope, 2.0, n, seed)
    one, other = length_controlled(outcome, length), length_controlled(1 - outcome, -length)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.value == pytest.approx(1 - other.value, abs=1e-5)
        assert 0 <= one.ci_low <= one.value <= one.ci_high <= 1


# --- ties -------------------------------------------------------------------------------------------------------------


def outcomes(difference: float, threshold: float, n: int, generator: np.random.Generator) -> np.ndarray:
    win, loss = special.expit(difference - threshold), special.expit(-difference - threshold)
    return generator.choice([1.0, 0.0, 0.5], size=n, p=[win, loss, max(0.0, 1 - win - loss)])


def test_rao_kupper_is_the_maximum_of_its_likelihood() -> None:
    wins, losses, ties = 60.5, 30.5, 10.0
    found = decided_win_rate(np.repeat([1.0, 0.0, 0.5], [60, 30, 10]))

    def loss(weights: np.ndarray) -> float:
        win, lose = special.expit(weights[0] - weights[1]), special.expit(-weights[0] - weights[1])
        return -float(wins * np.log(win) + losses * np.log(lose) + ties * np.log(max(1e-300, 1 - win - lose)))

    best = optimize.minimize(loss, np.array([0.1, 0.1]), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    assert found.value == pytest.approx(special.expit(best.x[0]), abs=1e-6)
    with pytest.raises(ValueError, match="verdicts must not be empty"):
        decided_win_rate(np.array([]))


def test_a_pair_that_is_won_in_one_order_and_tied_in_the_other_is_half_a_win() -> None:
    """60 such, 10 lost and tied, 30 tied twice: shares (30 + ½)/101 and (5 + ½)/101, ties the rest. By the orders' own
    verdicts and by their means alike; as 100 ties it was .5."""
    means = np.repeat([0.75, 0.25, 0.5], [60, 10, 30])
    both = np.repeat([[1.0, 0.5], [0.5, 0.0], [0.5, 0.5]], [60, 10, 30], axis=0)
    found = decided_win_rate(means)
    win, loss = 30.5 / 101, 5.5 / 101
    assert found.value == pytest.approx(special.expit((special.logit(win) - special.logit(loss)) / 2))
    assert found.value == pytest.approx(0.7327, abs=1e-4)
    assert found.ci_low > 0.6
    assert decided_win_rate(both) == decided_win_rate(both[:, ::-1]) == found


def test_a_judge_that_contradicts_itself_and_calls_no_tie_has_its_win_rate() -> None:
    """70 pairs won twice, 20 lost twice, 40 won in one order alone: half wins, half losses, and no tie to undo."""
    both = np.repeat([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [70, 20, 40], axis=0)
    assert decided_win_rate(both).value == pytest.approx((90 + 0.5) / 131)


@pytest.mark.parametrize("copied", [0.0, 0.5, 1.0])
def test_decided_rates_of_both_orders_cover(copied: float) -> None:
    """2,000 evaluations of 210 pairs; the second verdict is the first's copy in that share of pairs, else another draw:
    a pair is one unit however much its verdicts agree."""
    generator, drawn = np.random.default_rng(8), []
    for _ in range(EVALUATIONS):
        both = outcomes(0.7, 0.5, 420, generator).reshape(210, 2)
        both[generator.random(210) < copied, 1] = np.nan
        drawn.append(np.where(np.isnan(both), both[:, :1], both))
    share = covered(float(special.expit(0.7)), [decided_win_rate(each) for each in drawn])
    assert 0.94 <= share <= 0.965


def test_ties_hide_a_win_from_the_half_count_alone() -> None:
    drawn = outcomes(1.0, 2.0, 20_000, np.random.default_rng(1))
    assert abs(decided_win_rate(drawn).value - special.expit(1.0)) < 0.02
    assert drawn.mean() < special.expit(1.0) - 0.1


# --- coverage ---------------------------------------------------------------------------------------------------------


def covered(truth: float, estimates: list[Estimate | None]) -> float:
    held = [found.ci_low <= truth <= found.ci_high for found in estimates if found is not None]
    assert len(held) > 0.99 * EVALUATIONS
    return float(np.mean(held))


MORE = [pytest.param(*given, marks=pytest.mark.thorough) for given in ((0.0, 210), (1.2, 120))]


@pytest.mark.parametrize(("skill", "n"), [(0.5, 210), *MORE])
def test_length_control_covers(skill: float, n: int) -> None:
    """2,000 evaluations: a rate of 95 % is found within ± 1 point with 95 %."""
    drawn = [judged(skill, 1.0, 3.0, n, seed) for seed in range(EVALUATIONS)]
    share = covered(float(special.expit(skill)), [length_controlled(*each) for each in drawn])
    assert 0.94 <= share <= 0.965


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("difference", [0.0, 0.7])
def test_decided_and_half_counted_rates_cover(difference: float, threshold: float) -> None:
    """Without ties both are Wilson-like and no wider than they must be; with ties the half count is cautious."""
    generator = np.random.default_rng(7)
    drawn = [outcomes(difference, threshold, 210, generator) for _ in range(EVALUATIONS)]
    share = covered(float(special.expit(difference)), [decided_win_rate(each) for each in drawn])
    assert 0.94 <= share <= 0.965
    mean = float(special.expit(difference - threshold) + (1 - special.expit(difference - threshold)
                 - special.expit(-difference - threshold)) / 2)  # fmt: skip
    half = covered(mean, [wilson(float(each.sum()), len(each)) for each in drawn])
    assert half >= 0.94
    assert half <= 0.965 or threshold > 0


# --- judges -----------------------------------------------------------------------------------------------------------


def test_agreement_by_hand() -> None:
    assert agreement(np.array([1.0, 0.5, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, 0.5])) == wilson(1.5, 3)
    assert agreement(np.array([1.0]), np.array([0.5])) is None


def test_best_of_four_by_hand() -> None:
    reward = np.array([[3.0, 1.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 9.0]])
    truth = np.array([[5.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 2.0, 9.0], [1.0, 0.0, 0.0, 0.0, 4.0, 3.0, 2.0, 1.0, 9.0]])
    found = best_of_four(reward, truth, 0)
    assert found is not None
    assert found.value == pytest.approx(((1 + 0) / 2 + (0.25 + 0) / 2) / 2)  # the ninth draw fills no four
    assert best_of_four(reward[:, :3], truth[:, :3], 0) is None


def test_best_of_four_is_a_quarter_by_chance() -> None:
    generator = np.random.default_rng(2)
    found = best_of_four(generator.normal(size=(2000, 8)), generator.normal(size=(2000, 8)), 0)
    assert found is not None
    assert found.ci_low < 0.25 < found.ci_high
