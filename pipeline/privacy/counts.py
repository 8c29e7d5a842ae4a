"""Noisy counts of true labels, drawn exactly: the discrete Laplace mechanism.

A *rule* says for every event which label it expects, or abstains; it may depend on everything that was released, and on
no label otherwise. Its count is the number of events whose label is the one expected, which one label changes by at
most 1. So K counts of the same events, each with noise P(X = k) proportional to q^|k|, q = e^(-epsilon/K), are
epsilon-DP together for the label of one event, on top of all other releases of it.

The noise of a count is a function of the key and of the count's name, which holds what was asked: the same question
gets the same answer, at no further cost. Drawn from integers and coins only (Canonne, Kamath and Steinke, "The Discrete
Gaussian for Differential Privacy", 2020, algorithms 1 and 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import check_epsilon
from private_rlhf.privacy.prf import BLOCK_BYTES, Prf

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
        """Noise of each of `counts` counts of the same events that together cost `epsilon`; UserError for a bad one."""
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
