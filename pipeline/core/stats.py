"""Intervals for what evaluation and validation report: shares (Wilson) and statistics of iid units (bootstrap)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval and the number of independent units behind it."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def mapped(self, increasing: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the value."""
        return Estimate(increasing(self.value), increasing(self.ci_low), increasing(self.ci_high), self.n)

    def __truediv__(self, unit: float) -> Estimate:
        """In multiples of a positive unit."""
        return self.mapped(lambda value: value / unit)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}] (n={self.n})"


def wilson(wins: float, n: int, confidence: float = 0.95) -> Estimate:
    """Share wins/n with its Wilson score interval. wins: in [0, n]; a tie counts 0.5, which is conservative. n >= 1."""
    if n < 1 or not 0 <= wins <= n:
        raise ValueError(f"wins must lie in [0, n] with n >= 1, got wins={wins}, n={n}")
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    share = wins / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding may put an end of the interval beside a share of exactly 0 or 1.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), n)


def percentile_interval(value: float, draws: np.ndarray, n: int) -> Estimate:
    """`value` of n units with the central 95 % of its bootstrap `draws`, widened to contain the value: a percentile
    interval of a biased statistic may miss it. Infinite draws count as such; without draws the interval is NaN.
    """
    if not len(draws) or math.isnan(value):
        return Estimate(float(value), math.nan, math.nan, n)
    if np.isfinite(draws).all():
        low, high = np.percentile(draws, [2.5, 97.5])
    else:  # nothing lies halfway to infinity: the ends are draws themselves
        last = len(draws) - 1
        low, high = np.sort(draws)[[math.floor(0.025 * last), math.ceil(0.975 * last)]]
    return Estimate(float(value), min(float(low), float(value)), max(float(high), float(value)), n)


def bootstrap(
    statistic: Callable[[np.ndarray], float], samples: np.ndarray, seed: int, resamples: int = 400
) -> Estimate:
    """A statistic of samples (..., n) with its 95 % percentile-bootstrap interval.

    The columns, iid over n, are resampled together: paired where rows are paired. Resamples on which the
    statistic is undefined (NaN) are left out. ValueError without samples.
    """
    count = samples.shape[-1]
    if count == 0:
        raise ValueError("the bootstrap needs at least one value")
    generator = np.random.default_rng(seed)
    draws = np.array([statistic(samples[..., generator.integers(0, count, count)]) for _ in range(resamples)])
    return percentile_interval(statistic(samples), draws[~np.isnan(draws)], count)


def bootstrap_mean(values: np.ndarray, seed: int, resamples: int = 4000) -> Estimate:
    """Mean of `values` (n,) with its interval; pass differences for a paired comparison."""
    return bootstrap(lambda drawn: float(drawn.mean()), np.asarray(values, dtype=np.float64), seed, resamples)


def alike(values: np.ndarray) -> bool:
    """True where values (n,) are equal but for rounding, so that their mean has no spread to be compared with."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def student_mean(values: np.ndarray) -> Estimate:
    """Mean of unbounded `values` (n,) with Student's t interval; pass differences for a paired comparison.

    Where the values are alike the interval is a point: they say nothing of others. ValueError without values.
    """
    values, count = np.asarray(values, dtype=np.float64), len(values)
    if count == 0:
        raise ValueError("a mean needs at least one value")
    mean = float(values.mean())
    half = 0.0 if alike(values) else float(stats.t.ppf(0.975, count - 1) * standard_error(values))
    return Estimate(mean, mean - half, mean + half, count)


def paired_p(differences: np.ndarray) -> float:
    """Two-sided p of no difference between two sides, from their paired differences (n,): Student's t; where all are
    the same, which leaves t without a spread, the exact sign test, 2^(1−n); 1 where all are 0.
    """
    differences = np.asarray(differences, dtype=np.float64)
    if not differences.any():
        return 1.0
    if alike(differences):
        return float(2.0 ** (1 - len(differences)))
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def standard_error(samples: np.ndarray) -> np.ndarray:
    """Of the mean over the last axis, (..., n) -> (...)."""
    return np.asarray(samples.std(axis=-1, ddof=1) / math.sqrt(samples.shape[-1]))


def ratio_of_means(samples: np.ndarray) -> float:
    """For `bootstrap`: mean of the first row over mean of the second, (2, n), paired. Over 0: infinite or NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(samples[0].mean() / samples[1].mean())


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below a level errs with at most that probability, in all."""
    order = np.argsort(p_values, kind="stable")
    steps = np.arange(len(order), 0, -1) * np.asarray(p_values, dtype=np.float64)[order]
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted.tolist()


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """The hypotheses that Holm's step-down rejects at a family-wise `level`."""
    return [value <= level for value in holm_adjusted(p_values)]


def win_rate(scores: np.ndarray, baseline: np.ndarray) -> Estimate:
    """Share of units where `scores` (n,) beats `baseline` (n,), ties counted half, with its Wilson interval."""
    scores, baseline = np.asarray(scores), np.asarray(baseline)
    wins = float((scores > baseline).sum() + 0.5 * (scores == baseline).sum())
    return wilson(wins, int(scores.size))
