"""Exact composition of bounded ranges: closed form, brute force over adversaries, the older bounds around it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from private_rlhf.accounting.conversions import zcdp_epsilon
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions
from private_rlhf_lab.accounting.bounded_range import composed_delta, composed_epsilon, largest_factor
from private_rlhf_lab.accounting.steps import bounded_range_zcdp
from scipy.stats import binom

Array = np.ndarray


def window_law(e: float, points: int = 401) -> tuple[Array, Array, Array]:
    """(upper loss, lower loss, chance of the upper one) for every window of a grid."""
    upper = np.linspace(0.0, e, points)
    return upper, upper - e, (math.exp(e) - np.exp(upper)) / math.expm1(e)


def by_windows(lost: Array, ranges: list[float], epsilon: float) -> Array:
    """δ given what was lost, by adversaries with windows of a grid: a lower bound, an exhaustive one at that."""
    if not ranges:
        return np.maximum(-np.expm1(epsilon - lost), 0.0)
    up, down, chance = window_law(ranges[0])
    high, low = (by_windows(lost[..., None] + loss, ranges[1:], epsilon) for loss in (up, down))
    return np.asarray((chance * high + (1.0 - chance) * low).max(axis=-1))


def one_window(e: float, times: int, epsilon: float) -> float:
    """Dong, Durfee and Rogers: the same t in every mechanism, nothing adapts."""
    kept = np.arange(times + 1)
    found = 0.0
    for up, down, chance in zip(*window_law(e, 200), strict=True):
        loss = kept * up + (times - kept) * down
        found = max(found, float((binom.pmf(kept, times, chance) * np.maximum(-np.expm1(epsilon - loss), 0.0)).sum()))
    return found


@pytest.mark.parametrize(("e", "epsilon"), [(2.0, 1.0), (2.0, 1.9), (0.01, 0.004), (8.01, 8.0), (1.0, 0.0)])
def test_one_mechanism_in_closed_form(e: float, epsilon: float) -> None:
    """p(t)(1 − exp(ε − t)) is largest at t = (e + ε)/2."""
    top = math.exp(0.5 * (e + epsilon))
    closed = (math.exp(e) - top) * (1.0 - math.exp(epsilon) / top) / math.expm1(e)
    assert composed_delta([e], epsilon) == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("ranges", [[1.0, 1.0], [1.5, 0.4], [0.4, 1.5], [3.0, 2.0]])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_two_mechanisms_by_brute_force_over_windows(ranges: list[float], share: float) -> None:
    epsilon = share * sum(ranges)
    brute = float(by_windows(np.zeros(()), ranges, epsilon))
    assert brute <= composed_delta(ranges, epsilon) * (1 + 1e-9)
    assert composed_delta(ranges, epsilon) <= 1.01 * brute


def random_law(e: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """P and Q on five outcomes whose log ratio has range e, two of them at the ends."""
    ratio = np.concatenate([[0.0, e], rng.uniform(0.0, e, 3)])
    q = rng.dirichlet(np.full(5, 0.3)) + 1e-12
    p = q * np.exp(ratio)
    return p / p.sum(), q / q.sum()


def test_no_adaptive_sequence_of_laws_exceeds_it() -> None:
    """2,000 random adversaries of three mechanisms, each law chosen anew by all outcomes before."""
    rng, ranges = np.random.default_rng(0), (1.2, 0.5, 0.9)
    bounds = {epsilon: composed_delta(ranges, epsilon) for epsilon in (0.3, 1.0, 1.8)}
    closest = 0.0
    for _ in range(2000):
        p, q = np.ones(1), np.ones(1)
        for e in ranges:
            laws = [random_law(e, rng) for _ in p]
            p = np.concatenate([mass * law for mass, (law, _) in zip(p, laws, strict=True)])
            q = np.concatenate([mass * law for mass, (_, law) in zip(q, laws, strict=True)])
        for epsilon, bound in bounds.items():
            delta = float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())
            assert delta <= bound
            closest = max(closest, delta / bound)
    assert closest > 0.5


def test_draws_of_the_exponential_mechanism_are_covered() -> None:
    """Two draws from three scores, each of which moves by at most 1 either way, so that 2·exponent is the range."""
    exponent, epsilon = 0.6, 1.0
    bound = composed_delta([2.0 * exponent] * 2, epsilon)
    found = 0.0
    for base in itertools.product((-1.0, 0.0, 1.0, 3.0), repeat=2):
        for move in itertools.product((-1.0, 0.0, 1.0), repeat=3):
            score = np.array([0.0, *base])
            laws = [np.exp(exponent * each) / np.exp(exponent * each).sum() for each in (score, score + np.array(move))]
            p, q = (np.outer(law, law) for law in laws)
            found = max(found, float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum()))
    assert 0.5 * bound < found <= bound


@pytest.mark.parametrize(("e", "times"), [(2.0, 3), (0.8, 10), (0.3, 40)])
def test_between_one_window_for_all_and_the_older_bounds(e: float, times: int) -> None:
    rho, ranges = bounded_range_zcdp(e, times), [e] * times
    epsilon = composed_epsilon(ranges, 1e-5)
    assert epsilon <= min(times * e, zcdp_epsilon(rho, 1e-5))
    assert one_window(e, times, 0.95 * epsilon) > 1e-5
    assert one_window(e, times, epsilon) <= composed_delta(ranges, epsilon) <= 1e-5
    assert composed_delta(ranges, epsilon / 1.01) > 1e-5


def test_a_finer_grid_only_lowers_it_and_more_privacy_is_less_delta() -> None:
    ranges = [1.0, 0.7, 0.5, 0.35]
    by_cells = [composed_delta(ranges, 1.5, cells) for cells in (4, 8, 16, 32, 64)]
    assert by_cells == sorted(by_cells, reverse=True)
    assert by_cells[-1] > 0.9 * by_cells[-2]
    by_epsilon = [composed_delta(ranges, epsilon) for epsilon in np.linspace(0.0, 2.5, 11)]
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    assert composed_delta(ranges, 2.55) == 0.0
    assert composed_delta([1.01 * e for e in ranges], 1.5) > composed_delta(ranges, 1.5)


def test_the_order_matters() -> None:
    """The sharp mechanism last is worse: by then the adversary knows what is still to gain."""
    assert composed_delta([0.5, 1.0, 2.0], 2.2) > 1.05 * composed_delta([2.0, 1.0, 0.5], 2.2)


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.6, 0.36], [1.0] * 12])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_the_largest_factor_is_valid_and_tight(shares: list[float], epsilon: float) -> None:
    factor = largest_factor(shares, epsilon, 1e-5)
    assert composed_delta([factor * share for share in shares], epsilon) <= 1e-5
    assert composed_delta([1.01 * factor * share for share in shares], epsilon) > 1e-5
    assert factor >= epsilon / sum(shares)
    assert zcdp_epsilon(sum(bounded_range_zcdp(factor * share) for share in shares), 1e-5) >= epsilon


def test_large_and_small_delta() -> None:
    """Where the grid has nothing to add, the older bounds stay; a δ that covers everything leaves ε = 0."""
    assert composed_epsilon([0.2, 0.1], 0.5) == 0.0
    assert 0.29 < composed_epsilon([0.25, 0.125], 1e-12) <= 0.375
    assert largest_factor([2.0, 1.0], 3.0, 1e-30) >= 1.0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: composed_delta([], 1.0), "ranges"),
        (lambda: composed_delta([1.0, 0.0], 1.0), "ranges"),
        (lambda: composed_delta([math.nan], 1.0), "ranges"),
        (lambda: composed_delta([1.0], -0.1), "epsilon"),
        (lambda: composed_epsilon([1.0], 0.0), "delta"),
        (lambda: largest_factor([1.0], 0.0, 1e-5), "epsilon"),
        (lambda: largest_factor([-1.0], 1.0, 1e-5), "ranges"),
    ],
)
def test_outside_the_assumptions(call: object, name: str) -> None:
    with pytest.raises(OutsideAssumptions, match=f"^{name} "):
        call()  # type: ignore[operator]
