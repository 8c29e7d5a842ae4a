"""The learner and the search for a sorted file, on cases worked out by hand and at random."""

from __future__ import annotations

import numpy as np
import pytest
from private_rlhf.audit.learn import bins, categories, cell_guesses, crossed
from private_rlhf.audit.released import sorted_choice


def test_a_cell_guesses_what_its_known_half_shows() -> None:
    cells = np.array([0] * 20 + [1] * 20 + [-1] * 5)
    known = np.array(([1] * 10 + [0] * 10) + ([-1] * 9 + [1] + [0] * 10) + [0] * 5, dtype=np.int8)
    picked, guess = cell_guesses(cells, known, alpha=0.8)
    assert picked.tolist() == [*range(10, 20), *range(30, 40)]
    assert guess.tolist() == [1] * 10 + [-1] * 10
    picked, _ = cell_guesses(cells, known, alpha=0.95)  # nine of ten promise less than that
    assert picked.tolist() == [*range(10, 20)]


def test_a_cell_with_few_known_events_says_nothing() -> None:
    picked, _ = cell_guesses(np.zeros(9, dtype=np.int64), np.array([1] * 7 + [0] * 2, dtype=np.int8), alpha=0.5)
    assert not picked.size


def test_bins_hold_equal_shares_and_keep_the_order() -> None:
    values = np.random.default_rng(0).normal(size=6400)
    values[:10] = np.nan
    found = bins(values)
    assert (found[:10] == -1).all()
    assert np.bincount(found[10:]).tolist() == pytest.approx([6390 / 32] * 32, abs=2)
    order = np.argsort(values[10:])
    assert (np.diff(found[10:][order]) >= 0).all()
    assert bins(np.array([3.0, 1.0, 3.0])).tolist() == [1, 0, 1]


def test_categories_are_by_value() -> None:
    found = categories(["x", "y", None, "x", ""])
    assert found[0] == found[3] != found[1] != found[4]
    assert found[2] == -1


def test_crossed_cells_are_distinct() -> None:
    cells, sign = np.repeat([0, 1, -1], 3), np.tile([-1, 0, 1], 3)
    found = crossed(cells, sign)
    assert len(set(found[:6].tolist())) == 6
    assert (found[6:] == -1).all()


def test_the_sorting_choice_is_found() -> None:
    """Two candidates per place, one of them in rising order: nearly all are told apart."""
    generator = np.random.default_rng(1)
    rising, other = np.sort(generator.integers(0, 10_000, 500)), generator.integers(0, 10_000, 500)
    truth = generator.choice([-1, 1], 500)
    keys = np.where(truth > 0, np.stack([rising, other]), np.stack([other, rising]))
    choice = sorted_choice(keys)
    said = choice != 0
    assert said.mean() > 0.9
    assert (choice[said] == truth[said]).mean() > 0.99


def test_nothing_is_read_into_an_unsorted_file() -> None:
    generator = np.random.default_rng(2)
    truth, keys = generator.choice([-1, 1], 4000), generator.integers(0, 10**6, (2, 4000))
    choice = sorted_choice(keys)
    said = choice != 0
    assert abs((choice[said] == truth[said]).mean() - 0.5) < 4 * 0.5 / said.sum() ** 0.5
