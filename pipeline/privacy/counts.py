"""Noisy counts and sums of true labels, drawn exactly: the discrete Laplace and Gaussian mechanisms.

A *rule* says for every event which label it expects, or abstains; it may depend on everything that was released, and on
no label otherwise. Its count is the number of events whose label is the one expected, which one label changes by at
most 1. So K counts of the same events, each with noise P(X = k) proportional to q^|k|, q = e^(-epsilon/K), are
epsilon-DP together for the label of one event, on top of all other releases of it.

The noise of a count is a function of the key and of the count's name, which holds what was asked: the same question
gets the same answer, at no further cost. Drawn from integers and coins only (Canonne, Kamath and Steinke, "The Discrete
Gaussian for Differential Privacy", 2020, algorithms 1 to 3).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import check_epsilon
from private_rlhf.privacy.prf import BLOCK_BYTES, KEY_BYTES, Prf

COUNT_DOMAIN = b"noisy count/v1"  # of the PRF
NAME_BYTES = 32
LEAST_EPSILON = Fraction(1, 10**120)  # the variance, 2/epsilon^2, is a float far from its largest


class Bits:
    """Unlimited fair bits, a function of the key and a name of 32 bytes. ValueError for a name of another length."""

    def __init__(self, prf: Prf, name: bytes) -> None:
        if len(name) != NAME_BYTES:
            raise ValueError(f"a name must have {NAME_BYTES} bytes, got {len(name)}")
        self._prf, self._name = prf, name
        self._block, self._pool, self._left = 0, 0, 0

    def take(self, count: int) -> int:
        """A uniform number of `count` bits."""
        while self._left < count:
            block = self._prf.block(COUNT_DOMAIN, self._name + self._block.to_bytes(8, "big"))
            self._block += 1
            self._pool = self._pool << 8 * BLOCK_BYTES | int.from_bytes(block, "big")
            self._left += 8 * BLOCK_BYTES
        self._left -= count
        number, self._pool = self._pool >> self._left, self._pool & (1 << self._left) - 1
        return number

    def below(self, bound: int) -> int:
        """Uniform on 0, ..., bound - 1."""
        while True:
            number = self.take((bound - 1).bit_length())
            if number < bound:
                return number

    def survives(self, exponent: Fraction) -> bool:
        """True with probability e^-exponent, exponent >= 0 (algorithm 1)."""
        while exponent > 1:
            if not self.survives(Fraction(1)):
                return False
            exponent -= 1
        tries = 1
        while self.below(exponent.denominator * tries) < exponent.numerator:
            tries += 1
        return tries % 2 == 1


@dataclass(frozen=True)
class DiscreteLaplace:
    """P(X = k) proportional to e^(-epsilon |k|). epsilon: exact, > 0."""

    epsilon: Fraction

    @classmethod
    def shared(cls, epsilon: float, counts: int) -> DiscreteLaplace:
        """Noise of each of `counts` counts of the same events that together cost `epsilon`, or of a sum that a label
        moves by `counts`; UserError for a bad epsilon."""
        each = Fraction(check_epsilon(epsilon)) / counts
        if each < LEAST_EPSILON:
            raise UserError(f"epsilon must leave noise that fits a number, got {epsilon!r}: take a larger one")
        return cls(each)

    def draw(self, bits: Bits) -> int:
        """One draw (algorithm 2)."""
        top, low = self.epsilon.denominator, self.epsilon.numerator
        while True:
            rest = bits.below(top)
            if not bits.survives(Fraction(rest, top)):
                continue
            whole = 0
            while bits.survives(Fraction(1)):
                whole += 1
            size = (rest + top * whole) // low
            negative = bits.take(1)
            if not (negative and size == 0):
                return -size if negative else size

    @property
    def variance(self) -> float:
        """2q/(1-q)^2."""
        ratio = -math.expm1(-float(self.epsilon))
        return 2 * (1 - ratio) / ratio**2

    def half_width(self, miss: float = 0.05) -> int:
        """The least h with P(|X| > h) = 2 q^(h+1)/(1+q) <= miss."""
        epsilon = float(self.epsilon)
        height = miss * (1 + math.exp(-epsilon)) / 2
        return max(0, math.ceil(-math.log(height) / epsilon) - 1)


def noisy_counts(prf: Prf, names: Mapping[str, bytes], counts: Mapping[str, int], epsilon: float) -> dict[str, Any]:
    """The counts (one a rule) with noise, at `epsilon` for all of them, as JSON types.

    names: 32 bytes a rule, different for different questions (rule, events, epsilon).
    """
    noise = DiscreteLaplace.shared(epsilon, len(counts))
    return {
        "mechanism": "discrete Laplace",
        "epsilon": float(epsilon),
        "epsilon_per_count": float(noise.epsilon),
        "counts": {rule: count + noise.draw(Bits(prf, names[rule])) for rule, count in counts.items()},
    }


LARGEST = 1 << 62  # below the range of int64, with room for every sum that is checked


@dataclass(frozen=True)
class DiscreteGaussian:
    """P(X = k) proportional to e^(-k²/(2 variance)). variance: exact, > 0; the variance of X is at most that."""

    variance: Fraction

    def draw(self, bits: Bits) -> int:
        """One draw (algorithm 3): a discrete Laplace draw, kept with a probability that turns its law."""
        scale = math.isqrt(math.floor(self.variance)) + 1
        laplace = DiscreteLaplace(Fraction(1, scale))
        while True:
            number = laplace.draw(bits)
            if bits.survives((abs(number) - self.variance / scale) ** 2 / (2 * self.variance)):
                return number


def fresh_bits() -> Bits:
    """Bits of a new key from the operating system, which nobody keeps: a repeated release has other noise."""
    return Bits(Prf(secrets.token_bytes(KEY_BYTES)), bytes(NAME_BYTES))


def check_rows(rows: np.ndarray) -> np.ndarray:
    """Rows (n, d) as int64. ValueError unless they are integers whose sums and squares int64 can hold."""
    if rows.ndim != 2 or rows.dtype.kind != "i" or not rows.size:
        raise ValueError(f"rows must be a non-empty matrix of integers, got {rows.dtype} {rows.shape}")
    largest = max(int(rows.max()), -int(rows.min()))
    if len(rows) * largest >= LARGEST or rows.shape[1] * largest**2 >= LARGEST:
        raise ValueError(f"entries up to {largest} in {len(rows)} rows of {rows.shape[1]} overflow int64")
    return rows.astype(np.int64)


def squared_l2_sensitivity(rows: np.ndarray) -> int:
    """max ‖X_i‖²: how far one label can move s, squared."""
    return int((check_rows(rows) ** 2).sum(axis=1).max())


def l1_sensitivity(rows: np.ndarray) -> int:
    """max ‖X_i‖₁."""
    return int(np.abs(check_rows(rows)).sum(axis=1).max())


def gaussian_for(rows: np.ndarray, rho: Fraction) -> DiscreteGaussian:
    """The noise at which s is ρ-zCDP, ρ > 0 (for (ε, δ): `private_rlhf.accounting.conversions.zcdp_rho`)."""
    if not rho > 0:
        raise ValueError(f"rho must be above 0, got {rho}")
    return DiscreteGaussian(Fraction(math.ceil(max(squared_l2_sensitivity(rows), 1) / (2 * Fraction(rho)))))


def laplace_for(rows: np.ndarray, epsilon: float) -> DiscreteLaplace:
    """The noise at which s is ε-DP; UserError for a bad ε."""
    return DiscreteLaplace.shared(epsilon, max(l1_sensitivity(rows), 1))


def exact_statistic(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """s (d,) int64, which tells the labels: not to be released. ValueError unless the labels (n,) are ±1."""
    rows = check_rows(rows)
    if labels.shape != (len(rows),) or not bool(np.isin(labels, (-1, 1)).all()):
        raise ValueError(f"labels must be {len(rows)} of -1 or +1")
    return np.asarray(rows[labels == 1].sum(axis=0), dtype=np.int64)


def noisy_statistic(
    rows: np.ndarray, labels: np.ndarray, noise: DiscreteGaussian | DiscreteLaplace, bits: Bits | None = None
) -> list[int]:
    """s + noise (d,), as Python integers. bits: `fresh_bits` unless given; the same bits for other labels of the same
    rows would show the difference of both, so given ones are for tests and simulations.
    """
    bits = fresh_bits() if bits is None else bits
    return [int(value) + noise.draw(bits) for value in exact_statistic(rows, labels)]
