"""Does a cumulative curve grow like log T or like √T: two least-squares fits of two parameters each, compared."""

from __future__ import annotations

import math

import numpy as np

from pipeline.validation.bandits import Array, Integers, log_slope

WINDOW = 100  # the fits use the last two decades of rounds: the burn-in before them is neither law's


def late(rounds: Integers, window: int = WINDOW) -> Integers:
    """Indices of the rounds in the last two decades."""
    return np.flatnonzero(rounds * window >= rounds[-1])


def residual(basis: Array, curve: Array) -> float:
    """Σ (curve − a − b·basis)², least squares, (K,) each."""
    design = np.stack([np.ones_like(basis), basis], axis=1)
    fitted = design @ np.linalg.lstsq(design, curve, rcond=None)[0]
    return float(((curve - fitted) ** 2).sum())


def log_over_root(rounds: Integers, curves: Array) -> float:
    """log(RSS of a + b√T / RSS of a + b log T) of the mean curve (K, R), over the last two decades; > 0: log T fits.

    With two parameters each, AIC and BIC choose the same law as the smaller residual: their difference is K times
    this. The points of a cumulative curve are not independent, so that no likelihood is claimed for it; its interval
    comes from resampling the worlds.
    """
    chosen = late(rounds)
    mean, at = curves[chosen].mean(axis=1), rounds[chosen].astype(np.float64)
    return math.log(residual(np.sqrt(at), mean) / residual(np.log(at), mean))


def slope_per_log(rounds: Integers, curves: Array) -> float:
    """b of the fit a + b log T to the mean curve, regret a factor e of rounds."""
    chosen = late(rounds)
    return float(np.polyfit(np.log(rounds[chosen]), curves[chosen].mean(axis=1), 1)[0])


def late_exponent(rounds: Integers, curves: Array) -> float:
    """Slope of log mean curve in log T over the last decade: ½ for √T, towards 0 for log T, 1 for no learning."""
    chosen = late(rounds, 10)
    return log_slope(rounds[chosen], curves[chosen].mean(axis=1))
