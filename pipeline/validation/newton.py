"""Many small convex fits at once: Newton's method, or Fisher scoring, with backtracking."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_ARMIJO = 1e-4
_MAX_HALVINGS = 30


class Objectives(Protocol):
    """R convex functions of d parameters each; `rows` (r,) chooses some of them, theta (r, d)."""

    def value(self, theta: Array, rows: Integers) -> Array:
        """(r,)."""

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        """Gradient (r, d) and positive definite curvature (r, d, d)."""


def minimise(
    problem: Objectives, start: Array, *, steps: int = 60, tolerance: float = 1e-8
) -> tuple[Array, NDArray[np.bool_]]:
    """Minimisers from `start` (R, d), and whether each converged, (R,): whether its Newton decrement gᵀH⁻¹g/2 is at
    most `tolerance`, in the unit of the objective.
    """
    theta, active = start.copy(), np.arange(len(start))
    converged = np.zeros(len(start), dtype=np.bool_)
    for _ in range(steps):
        gradient, curvature = problem.derivatives(theta[active], active)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        decrement = 0.5 * (gradient * step).sum(axis=1)
        left = decrement > tolerance
        converged[active] = ~left
        active = active[left]
        if not len(active):
            break
        theta[active] = _backtrack(problem, theta[active], active, step[left], decrement[left])
    return theta, converged


def _backtrack(problem: Objectives, theta: Array, rows: Integers, step: Array, decrement: Array) -> Array:
    """θ − 2^−j step with the smallest j that satisfies Armijo's condition; θ itself where none does."""
    best, value = theta.copy(), problem.value(theta, rows)
    waiting, size = np.arange(len(theta)), 1.0
    for _ in range(_MAX_HALVINGS):
        candidate = theta[waiting] - size * step[waiting]
        rounding = 1e-13 * np.abs(value[waiting])
        enough = value[waiting] - 2.0 * _ARMIJO * size * decrement[waiting] + rounding
        good = problem.value(candidate, rows[waiting]) <= enough
        best[waiting[good]] = candidate[good]
        waiting, size = waiting[~good], 0.5 * size
        if not len(waiting):
            break
    return best
