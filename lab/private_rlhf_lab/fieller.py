"""The interval of a ratio of two means, by Fieller's theorem."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats


def fieller(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """95 % interval of mean(top) / mean(bottom), paired units (n,) each, by Fieller's theorem (1954) with Student's t.

    ValueError where the interval of the mean of `bottom` contains 0.
    """
    count = len(top)
    t = float(stats.t.ppf(0.975, count - 1))
    covariance = np.cov(top, bottom, ddof=1) / count
    above, below = float(top.mean()), float(bottom.mean())
    square = below**2 - t**2 * covariance[1, 1]
    if square <= 0:
        raise ValueError("the interval of the denominator must exclude 0: otherwise the ratio has no bounded interval")
    linear = above * below - t**2 * covariance[0, 1]
    root = math.sqrt(max(linear**2 - square * (above**2 - t**2 * covariance[0, 0]), 0.0))
    return (linear - root) / square, (linear + root) / square
