"""The exact adaptive composition of bounded-range mechanisms: draws by the exponential mechanism, Gibbs draws.

A mechanism has bounded range e if under neighbours P and Q its loss L = log P/Q lies in [t − e, t] for some t, whatever
came before. E_P[exp(−L)] = 1, so t is in [0, e]. Write δ(x) for the largest E_P[(1 − exp(ε − x − losses to come))₊]
when x was lost already. Without a mechanism to come it is convex in w = exp(−x). One more mechanism takes a supremum,
over t and laws, of E_P[δ(x + L)], which is w ↦ E_P[W(w·exp(−L))], convex again; and given t, as exp(−L) has mean 1, no
law is worse than the one on the two ends of the window, L = t with p = (exp(e) − exp(t))/(exp(e) − 1), else t − e. So

    δ_j(x) = max over t in [0, e_j] of p·δ_{j+1}(x + t) + (1 − p)·δ_{j+1}(x + t − e_j),

and the answer is δ_1(0). It is attained, by randomised responses that choose t by what was lost, so no accountant that
knows the ranges alone is sharper. Non-adaptive and equal ranges, one t for all: Dong, Durfee and Rogers (2020).

Here δ_{j+1} is interpolated linearly in w, which overstates a convex function, and the maximum over t between two grid
points is then in closed form: what comes out is never below the exact δ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np
from private_rlhf.accounting.conversions import zcdp_epsilon, zcdp_rho
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions, not_negative, positive, probability
from scipy.optimize import brentq

from private_rlhf_lab.accounting.steps import bounded_range_zcdp

Array = np.ndarray
FEWEST, MOST = 16, 256  # cells of the grid in the root mean square of the ranges: of many, of one
PRECISION = 1e-4  # relative, of ε and of the largest factor
SMALLEST = 1e-300  # of a δ whose logarithm is taken


def composed_delta(ranges: Iterable[float], epsilon: float, cells: int | None = None) -> float:
    """δ at ε of mechanisms with these bounded ranges, in the order in which they run, each chosen by what came before.

    ranges: (k,), nats, above 0. ε ≥ 0, nats. cells: of the grid in the root mean square of the ranges. An upper bound,
    within some 1 % of the exact value at the default; exact at k = 1. OutsideAssumptions if a number is out of range.
    """
    each = _checked(ranges)
    not_negative("epsilon", epsilon)
    if math.fsum(each) <= epsilon:
        return 0.0
    finest = math.sqrt(math.fsum(e * e for e in each) / len(each)) / (cells or max(FEWEST, MOST // len(each)))
    # The grid holds 0, and ε, where δ without a mechanism to come has its kink.
    whole = max(1, math.ceil(epsilon / finest))
    cell = epsilon / whole if epsilon > 0.0 else finest
    steps = [math.ceil(e / cell - 1e-9) for e in each]
    lost = (np.arange(-sum(steps), sum(steps) + 1)) * cell
    value = np.maximum(-np.expm1(epsilon - lost), 0.0)
    for e, step in zip(reversed(each), reversed(steps), strict=True):
        value = _before(value, e, step, cell)
    return float(value[0])


def _before(value: Array, e: float, step: int, cell: float) -> Array:
    """δ before a mechanism of range e from δ after it, (n,) to (n − 2·step,), on a grid with steps of `cell`."""
    grid = np.arange(step + 1) * cell
    ends = np.unique(np.round(np.clip(np.concatenate([grid, e - grid]), 0.0, e), 12))
    first, second = ends[:-1], ends[1:]

    def at(offset: Array) -> Array:
        """δ after the mechanism at x + offset, (offsets, n − 2·step); linear in exp(−x) between grid points."""
        place = np.clip(np.floor(offset / cell + 1e-9).astype(int), -step, step - 1)
        share = np.clip(np.expm1(place * cell - offset) / math.expm1(-cell), 0.0, 1.0)[:, None]
        windows = np.lib.stride_tricks.sliding_window_view(value, len(value) - 2 * step)
        return (1.0 - share) * windows[place + step] + share * windows[place + step + 1]

    high, low = at(ends), at(ends - e)
    chance = (np.expm1(e - ends) / np.expm1(e) * np.exp(ends))[:, None]
    best = (chance * high + (1.0 - chance) * low).max(axis=0)
    # Between two ends both are a + b/y in y = exp(t), and the mean is const + rise·y + fall/y, all over exp(e) − 1.
    drop = (np.exp(-second) - np.exp(-first))[:, None]
    high_slope, low_slope = np.diff(high, axis=0) / drop, np.diff(low, axis=0) / drop
    start = np.exp(-first)[:, None]
    rise = (low[:-1] - low_slope * start) - (high[:-1] - high_slope * start)
    fall = math.exp(e) * high_slope - low_slope
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = np.sqrt(fall / rise)
    inside = (rise < 0.0) & (fall < 0.0) & (peak > np.exp(first)[:, None]) & (peak < np.exp(second)[:, None])
    row, column = np.nonzero(inside)
    y = peak[row, column]
    chance = (math.exp(e) - y) / math.expm1(e)
    from_start = 1.0 / y - start[row, 0]
    inner = chance * (high[row, column] + high_slope[row, column] * from_start) + (1.0 - chance) * (
        low[row, column] + low_slope[row, column] * from_start
    )
    np.maximum.at(best, column, inner)
    return best


def composed_epsilon(ranges: Iterable[float], delta: float) -> float:
    """ε at δ of mechanisms with these bounded ranges, as `composed_delta`; to 1e-4 and from above.

    Never above what basic composition and zCDP charge. 0 < δ < 1; OutsideAssumptions otherwise.
    """
    each = _checked(ranges)
    probability("delta", delta)
    known = min(math.fsum(each), zcdp_epsilon(math.fsum(map(bounded_range_zcdp, each)), delta))

    def excess(epsilon: float) -> float:
        return math.log(max(composed_delta(each, epsilon), SMALLEST) / delta)

    if known == 0.0 or excess(0.0) <= 0.0:
        return 0.0
    if excess(known) >= 0.0:  # the grid overstates more than there is to gain
        return known
    low, high = 0.9 * known, known
    while excess(low) <= 0.0:
        low, high = 0.8 * low, low
    root = float(brentq(excess, low, high, xtol=PRECISION * known, rtol=PRECISION))
    while excess(root) > 0.0:
        root *= 1.0 + PRECISION
    return min(root, known)


def largest_factor(shares: Iterable[float], epsilon: float, delta: float) -> float:
    """The largest c for which ranges c·shares are (ε, δ)-private together; to 1e-4 and from below.

    shares: (k,), above 0, in the order in which the mechanisms run. Never below what basic composition and zCDP allow.
    ε > 0, 0 < δ < 1; OutsideAssumptions otherwise. Takes a second at k = 100 and grows like k² or faster.
    """
    return _largest_factor(_checked(shares), positive("epsilon", epsilon), probability("delta", delta))


@functools.lru_cache(maxsize=4096)
def _largest_factor(shares: tuple[float, ...], epsilon: float, delta: float) -> float:
    squares = math.fsum(share * share for share in shares)
    known = max(epsilon / math.fsum(shares), math.sqrt(8.0 * zcdp_rho(epsilon, delta) / squares))

    def excess(factor: float) -> float:
        return math.log(max(composed_delta([factor * share for share in shares], epsilon), SMALLEST) / delta)

    low = high = known
    while excess(high) <= 0.0:
        low, high = high, 1.1 * high
    if high == known:  # the grid overstates more than there is to gain
        return known
    root = float(brentq(excess, low, high, xtol=PRECISION * known, rtol=PRECISION))
    while excess(root) > 0.0:
        root *= 1.0 - PRECISION
    return max(root, known)


def _checked(ranges: Iterable[float]) -> tuple[float, ...]:
    each = tuple(float(e) for e in ranges)
    if not each or not all(0.0 < e < 700.0 for e in each):
        raise OutsideAssumptions("ranges", f"must be numbers above 0 and below 700, got {each!r}; leave zeros out")
    return each
