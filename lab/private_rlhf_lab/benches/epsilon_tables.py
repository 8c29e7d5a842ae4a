"""What the tables over ε share: intervals over seeds, shares of one gain in another, and how cells are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap_mean
from scipy import stats


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % t interval)."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, math.nan
    return mean, float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))


def cell(values: Sequence[float]) -> str:
    """mean ± half width."""
    mean, half = interval(values)
    return f"{mean:+.2f} ± {half:.2f}"


def name_of(epsilon: float) -> str:
    """ε as printed."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


@dataclass(frozen=True)
class Share:
    """One mean gain as a share of another.

    Attributes:
        value: ratio of the means over seeds and prompts.
        prompts: its 95 % interval by the bootstrap over prompts, for the seeds that were run.
        seeds: half width of its 95 % interval over seeds (delta method, Student's t); NaN with a single one.
    """

    value: float
    prompts: tuple[float, float]
    seeds: float


def share_of(gain: np.ndarray, whole: np.ndarray, resamples: int = 4000) -> Share | None:
    """Mean of `gain` over that of `whole`, (seeds, prompts) each, rows and columns paired.

    A resample takes the same prompts in every row of both. None where `whole` is not clearly above 0 over the prompts:
    a share of nothing says nothing.
    """
    if over_prompts(whole).ci_low <= 0:
        return None
    top, bottom = gain.mean(axis=0), whole.mean(axis=0)
    picks = np.random.default_rng(0).integers(0, top.size, size=(resamples, top.size))
    low, high = np.percentile(top[picks].mean(axis=1) / bottom[picks].mean(axis=1), [2.5, 97.5])
    value = float(top.mean() / bottom.mean())
    _, half = interval(((gain - value * whole).mean(axis=1) / bottom.mean()).tolist())
    return Share(value, (float(low), float(high)), half)


def over_prompts(gain: np.ndarray) -> Estimate:
    """Mean of (seeds, prompts) with the 95 % bootstrap interval over prompts, for the seeds that were run."""
    return bootstrap_mean(gain.mean(axis=0), seed=0)


def mean_sd(values: Sequence[float], form: str = ".2f") -> str:
    """mean ± standard deviation over seeds; the value alone for a single seed."""
    mean = format(float(np.mean(values)), form)
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):{form.lstrip('+')}}"
