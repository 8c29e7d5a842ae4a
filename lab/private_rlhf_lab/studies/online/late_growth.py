"""Slopes of a cumulative curve over its last rounds, beside the power that `private_rlhf.validation.growth` fits."""

from __future__ import annotations

import numpy as np
from private_rlhf.validation.bandits import Array, Integers, log_slope
from private_rlhf.validation.growth import late


def slope_per_log(rounds: Integers, curves: Array) -> float:
    """b of the fit a + b log T to the mean curve, regret a factor e of rounds."""
    chosen = late(rounds)
    return float(np.polyfit(np.log(rounds[chosen]), curves[chosen].mean(axis=1), 1)[0])


def late_exponent(rounds: Integers, curves: Array) -> float:
    """Slope of log mean curve in log T over the last decade: ½ for √T, towards 0 for log T, 1 for no learning."""
    chosen = late(rounds, 10)
    return log_slope(rounds[chosen], curves[chosen].mean(axis=1))
