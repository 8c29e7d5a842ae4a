"""Data sets as counts over record types, and the utilities that are fitted to them. Batched numpy; b batch, A actions.

Enumerating multisets of a finite list of record types enumerates data sets, and a neighbour is one count more or less
(or moved, for a flipped label).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from private_rlhf.validation.lab import Array, Integers, minimise
from scipy.special import expit

TOLERANCE = 1e-26  # nats; only rounding keeps a decrement above it


def multisets(types: int, largest: int, smallest: int = 0) -> Array:
    """All counts over `types` record types with smallest..largest records, (b, types)."""
    rows = [
        np.bincount(np.array(chosen, dtype=np.int64), minlength=types)
        for size in range(smallest, largest + 1)
        for chosen in combinations_with_replacement(range(types), size)
    ]
    return np.array(rows, dtype=np.float64)


def bandit_utility(counts: Array, sums: Array, pessimism: float, *, optional: bool = False) -> Array:
    """u(a) = mean − β/√N, (b, K); −∞ for an arm without records, unless `optional`: then mean 0 and N = 1."""
    seen = np.maximum(counts, 1.0)
    utility = sums / seen - pessimism / np.sqrt(seen)
    return utility if optional else np.where(counts > 0, utility, -np.inf)


def gram(counts: Array, features: Array, ridge: float) -> Array:
    """λI + Σ c_t φ_t φ_tᵀ, (b, T), (T, d) -> (b, d, d)."""
    return np.einsum("bt,ti,tj->bij", counts, features, features) + ridge * np.eye(features.shape[1])


def least_eigenvalue(matrix: Array) -> Array:
    """λ_min of symmetric matrices, (b, d, d) -> (b,)."""
    return np.asarray(np.linalg.eigvalsh(matrix)[:, 0], dtype=np.float64)


def width(actions: Array, matrix: Array) -> Array:
    """‖φ_a‖_{Σ^−1}, (A, d), (b, d, d) -> (b, A)."""
    solved = np.linalg.solve(matrix, np.broadcast_to(actions.T, (len(matrix), *actions.T.shape)))
    return np.asarray(np.sqrt(np.einsum("ai,bia->ba", actions, solved)))


def ridge_estimate(counts: Array, features: Array, rewards: Array, ridge: float) -> Array:
    """θ̂ = Σ^−1 Σ c φ r, (b, d)."""
    moments = np.einsum("bt,ti,t->bi", counts, features, rewards)
    return np.asarray(np.linalg.solve(gram(counts, features, ridge), moments[..., None])[..., 0])


def bradley_terry(counts: Array, signed: Array, ridge: float, radius: float) -> Array:
    """The minimiser of Σ c_t log(1 + exp(−θᵀ(y x)_t)) + (κ/2)‖θ‖² over ‖θ‖ ≤ B, (b, T), (T, d) -> (b, d).

    By Newton's method; where the free minimiser leaves the ball, the ridge grows until its norm is B (the multiplier of
    the constraint is a ridge). κ = 0 is allowed with radius < ∞. Residuals are at rounding level.
    """
    batch, dimension = len(counts), signed.shape[1]
    least = max(ridge, 1e-9)
    start = np.zeros((batch, dimension))
    theta, _ = minimise(_Logistic(counts, signed, np.full(batch, least)), start, tolerance=TOLERANCE)
    outside = np.flatnonzero(np.linalg.norm(theta, axis=1) > radius)
    if not len(outside):
        return theta
    few, inner = counts[outside], theta[outside]
    # The gradient of the loss is at most Σ c‖x‖, so this multiplier holds the minimiser inside.
    low, high = np.zeros(len(outside)), few @ np.linalg.norm(signed, axis=1) / radius + 1e-9
    for _ in range(60):
        middle = 0.5 * (low + high)
        inner, _ = minimise(_Logistic(few, signed, least + middle), inner, steps=6, tolerance=TOLERANCE)
        large = np.linalg.norm(inner, axis=1) > radius
        low, high = np.where(large, middle, low), np.where(large, high, middle)
    theta[outside] = inner * (radius / np.linalg.norm(inner, axis=1, keepdims=True))
    return theta


@dataclass(frozen=True)
class _Logistic:
    """Ridge-penalised logistic losses; counts (b, T), signed (T, d), ridge (b,)."""

    counts: Array
    signed: Array
    ridge: Array

    def value(self, theta: Array, rows: Integers) -> Array:
        losses = (self.counts[rows] * np.logaddexp(0.0, -(theta @ self.signed.T))).sum(axis=1)
        return np.asarray(losses + 0.5 * self.ridge[rows] * (theta**2).sum(axis=1))

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        missing = expit(-(theta @ self.signed.T))
        ridge, counts = self.ridge[rows, None], self.counts[rows]
        hessian = gram(counts * missing * (1.0 - missing), self.signed, 0.0) + ridge[..., None] * np.eye(len(theta[0]))
        return ridge * theta - (counts * missing) @ self.signed, hessian
