"""The person-level composition: known values, scipy, brute force over two levels, and refusals."""

from __future__ import annotations

import itertools
import math

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.person import largest_person_epsilon, person_epsilon
from scipy.optimize import brentq
from scipy.stats import binom


def test_by_hand() -> None:
    """One event at delta 0+ costs epsilon; the brief's m = 100 at epsilon 0.5 costs 33.3 at delta 1e-6, not 50."""
    assert person_epsilon([(2.0, 1)], 1e-12) == pytest.approx(2.0, abs=1e-9)
    assert person_epsilon([(0.5, 100)], 1e-6) == pytest.approx(33.3, abs=0.05)
    assert person_epsilon([(0.1, 1)], 0.5) == 0.0


def test_the_largest_of_several_persons() -> None:
    """Exact where each has one ε; no smaller than any of them, and no larger than the largest sum, where they mix."""
    persons = [[(0.05, 100)], [(4.0, 1)], [(0.05, 60)]]
    assert largest_person_epsilon(persons, 1e-6) == person_epsilon([(4.0, 1)], 1e-6)
    mixed = [[(0.5, 9), (1.0, 1)], [(0.5, 1), (1.0, 5)]]
    assert max(person_epsilon(levels, 1e-6) for levels in mixed) <= largest_person_epsilon(mixed, 1e-6) <= 5.5
    assert largest_person_epsilon([], 1e-6) == 0.0


@pytest.mark.parametrize(("epsilon", "events", "delta"), [(0.5, 20, 1e-5), (2.0, 7, 1e-3), (0.1, 300, 1e-6)])
def test_one_level_against_scipy(epsilon: float, events: int, delta: float) -> None:
    total = person_epsilon([(epsilon, events)], delta)
    alpha = 1 / (1 + math.exp(-epsilon))
    spill = sum(
        max(0.0, binom.pmf(k, events, alpha) - math.exp(total) * binom.pmf(k, events, 1 - alpha))
        for k in range(events + 1)
    )
    assert spill == pytest.approx(delta, rel=1e-6)
    assert total < events * epsilon


@pytest.mark.parametrize("levels", [((0.5, 3), (1.0, 2)), ((0.1, 4), (0.7, 3), (2.0, 2)), ((0.3, 40), (0.9, 25))])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_several_levels_against_brute_force(levels: tuple[tuple[float, int], ...], delta: float) -> None:
    """Never below the exact value, and above it by no more than the grid allows."""
    ranges = [range(events + 1) for _, events in levels]
    outcomes = []
    for kept in itertools.product(*ranges):
        mass = math.prod(
            binom.pmf(k, m, 1 / (1 + math.exp(-epsilon))) for k, (epsilon, m) in zip(kept, levels, strict=True)
        )
        outcomes.append((mass, sum((2 * k - m) * epsilon for k, (epsilon, m) in zip(kept, levels, strict=True))))
    most = sum(epsilon * m for epsilon, m in levels)

    def excess(total: float) -> float:
        return math.fsum(mass * -math.expm1(min(0.0, total - loss)) for mass, loss in outcomes) - delta

    exact = brentq(excess, 0.0, most, xtol=1e-13) if excess(0.0) > 0 > excess(most) else 0.0
    found = person_epsilon(levels, delta)
    assert exact - 1e-9 <= found <= min(most, exact + len(levels) * most / 2**16 + 1e-9)


@pytest.mark.parametrize("levels", [((0.5, 100),), ((2.0, 7),), ((0.5, 30), (1.0, 20))])
def test_as_dp_accounting_has_it(levels: tuple[tuple[float, int], ...]) -> None:
    """Its privacy loss distributions round each loss up to a grid: never below ours, and above by that at most."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    grid = 1e-4
    whole = pld.identity(value_discretization_interval=grid)
    for epsilon, events in levels:
        one = pld.from_randomized_response(2 / (1 + math.exp(epsilon)), 2, value_discretization_interval=grid)
        whole = whole.compose(one.self_compose(events))
    ours, theirs = person_epsilon(levels, 1e-6), whole.get_epsilon_for_delta(1e-6)
    ours_above = len(levels) * sum(epsilon * events for epsilon, events in levels) / 2**16 if len(levels) > 1 else 0.0
    assert ours - ours_above - 1e-6 <= theirs <= ours + grid * sum(events for _, events in levels) + 1e-6


def test_equal_levels_are_one_level() -> None:
    assert person_epsilon([(0.5, 40), (0.5, 60)], 1e-6) == pytest.approx(person_epsilon([(0.5, 100)], 1e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("levels", "delta"), [([(1.0, 0)], 1e-6), ([(1.0, 3)], 0.0), ([(1.0, 3)], 1.0), ([], 1e-6), ([(0.0, 3)], 1e-6)]
)
def test_nonsense_is_refused(levels: list[tuple[float, int]], delta: float) -> None:
    with pytest.raises(UserError, match="needs events >= 1 and 0 < delta < 1"):
        person_epsilon(levels, delta)
