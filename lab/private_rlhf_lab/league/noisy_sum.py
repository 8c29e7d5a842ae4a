"""The noisy sum of central label-DP, drawn exactly: s = Σ X_i over the labels of +1, X_i public rows of integers.

One label moves s by its row, so noise for the longest row makes s private for the label of one event: discrete Gaussian
in zCDP, discrete Laplace in pure ε (Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy",
2020, algorithm 3). docs/explanation/central-label-dp.md has the proof. A study: no ledger charges what it releases.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from private_rlhf.privacy.counts import NAME_BYTES, Bits, DiscreteLaplace
from private_rlhf.privacy.prf import KEY_BYTES, Prf

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
