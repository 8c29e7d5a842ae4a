"""Accountants without a condition on the data: by hand, and searches that catch a bound a tenth too low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from private_rlhf_lab.accounting.draws import bandit_unconditional
from private_rlhf_lab.studies.kl_dp import conventions


def test_unconditional_by_hand() -> None:
    """R alone where rewards weigh most, R/2 + β(1 − 1/√2) where the penalty does; over η."""
    assert bandit_unconditional(2.0, 1.0, 3.0).epsilon == pytest.approx(1.5)
    assert bandit_unconditional(2.0, 8.0, 3.0).epsilon == pytest.approx((1.5 + 8.0 * (1.0 - 0.5**0.5)) / 2.0)
    assert bandit_unconditional(2.0, 8.0, 3.0).delta == 0.0


def test_the_ball_ridge_is_the_best_on_a_grid() -> None:
    generator = np.random.default_rng(0)
    root = generator.normal(size=(20, 2, 2))
    matrix = root @ root.swapaxes(1, 2) + 0.1 * np.eye(2)
    moments = generator.normal(size=(20, 2))
    found = conventions.ball_ridge(matrix, moments, 0.5)
    angle, radius = np.meshgrid(np.linspace(0.0, 2.0 * np.pi, 721), np.linspace(0.0, 0.5, 101))
    grid = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1, 2)

    def value(theta: np.ndarray) -> np.ndarray:
        square = np.einsum("ngi,nij,ngj->ng", theta, matrix, theta)
        return np.asarray(square - 2.0 * (theta @ moments[..., None])[..., 0])

    best = value(np.repeat(grid[None], 20, axis=0)).min(axis=1)
    assert (value(found[:, None])[:, 0] <= best + 1e-9).all()
    assert (np.linalg.norm(found, axis=1) <= 0.5 + 1e-9).all()
    assert (np.linalg.norm(found, axis=1) > 0.499).any()


def test_searches_hold_and_catch_a_bound_a_tenth_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [search.verdict().verdict for search in conventions.searches(1)] == ["holds"] * 2
    assert [claim.verdict for claim in conventions.claims()] == ["refuted"]

    def lower(name: str) -> Callable[..., Any]:
        true = getattr(conventions, name)

        def low(*given: Any, **named: Any) -> Any:
            made = true(*given, **named)
            return 0.9 * made if isinstance(made, float) else replace(made, epsilon=0.9 * made.epsilon)

        return low

    for name in ("bandit_unconditional", "linear_epsilon", "linear_draw"):
        monkeypatch.setattr(conventions, name, lower(name))
    assert [search.verdict().verdict for search in conventions.searches(1)] == ["refuted"] * 2
