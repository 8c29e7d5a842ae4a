"""Growth of a cumulative curve: the power p of a + b (T^p − 1)/p, which is a + b log T at p = 0."""

from __future__ import annotations

import numpy as np
from private_rlhf.validation.bandits import Array, Integers

WINDOW = 100  # the fits use the last two decades of rounds: the burn-in before them is neither law's
POWERS = np.round(np.linspace(-1.0, 1.0, 401), 3)
# log² T looks like T^.09 over the last two decades before 10⁶, and log T itself like p = 0: the line lies between them.
LOGARITHMIC = 0.05


def late(rounds: Integers, window: int = WINDOW) -> Integers:
    """Indices of the rounds in the last two decades."""
    return np.flatnonzero(rounds * window >= rounds[-1])


def bases(rounds: Integers) -> Array:
    """(T^p − 1)/p for POWERS, log T at p = 0, centred and of length 1: (401, K)."""
    at = np.log(rounds.astype(np.float64) / rounds[-1])
    safe = np.where(POWERS == 0.0, 1.0, POWERS)[:, None]
    curved = np.where(POWERS[:, None] == 0.0, at, np.expm1(safe * at) / safe)
    curved -= curved.mean(axis=1, keepdims=True)
    return np.asarray(curved / np.linalg.norm(curved, axis=1, keepdims=True))


def power(rounds: Integers, curves: Array) -> float:
    """The p of POWERS whose a + b (T^p − 1)/p is nearest to the mean curve (K, R), least squares over two decades: ½
    for √T, 0 for log T, below 0 for what levels off. Its interval comes from resampling worlds."""
    places = late(rounds)
    mean = curves[places].mean(axis=1)
    if np.ptp(mean) <= 1e-9 * max(1.0, abs(float(mean[-1]))):
        return float(POWERS[0])
    return float(POWERS[np.abs(bases(rounds[places]) @ (mean - mean.mean())).argmax()])
