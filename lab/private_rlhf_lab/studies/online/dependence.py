"""What Theorem 5.2 says of everything but T and ε: regret <= c β d_F e^{2B} log(N_F T/δ)/(2α−1)², one factor at a time.

An upper bound, so the claim is that regret grows no faster than the factor. d_F is not known; the realised
Σ min(1, U²) of the same run stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import bootstrap, standard_error
from private_rlhf.validation.bandits import Array, log_slope
from private_rlhf.validation.lab import COLOURS, Claim, new_figure, within
from private_rlhf.validation.regret import grid_world

from private_rlhf_lab.studies.online.arms import Arm, Trace, simulate

EPSILON = 1.0
ARM = Arm("optimism, c = 0.2", "optimism")
BETAS = (2.0, 5.0, 10.0, 20.0)
BOUNDS = (0.5, 1.0, 2.0, 3.0)
SIDES = (3, 5, 8, 12)  # of the grid of parameters: N = side²
SHAPES = ((1, 64), (2, 8), (3, 4), (6, 2))  # dimension and side of 64 members


@dataclass(frozen=True)
class Sweep:
    """Regret of π² at the horizon (K, R) where one factor is `values` (K,), or (K, R) if it is measured a world."""

    name: str
    values: Array
    regret: Array

    @staticmethod
    def slope(samples: Array) -> float:
        """Log-log slope of the mean of the second in the mean of the first, (2, K, R)."""
        return log_slope(samples[0].mean(axis=1), samples[1].mean(axis=1))

    @property
    def samples(self) -> Array:
        """For `slope`."""
        values = self.values if self.values.ndim == 2 else np.repeat(self.values[:, None], self.regret.shape[1], axis=1)
        return np.stack([values, self.regret])


def measure(worlds: int, horizon: int, seed: int) -> list[Sweep]:
    """Four sweeps in `worlds` random worlds each, by optimism at ε = 1; β = 10, B = 1, N = 64, d = 2 where fixed."""

    def run(**options: float) -> Trace:
        world = grid_world(np.random.default_rng(seed), worlds, **options)  # type: ignore[arg-type]
        return simulate(world, ARM, EPSILON, horizon, seed)

    def final(traces: list[Trace]) -> Array:
        return np.stack([trace.regret[-1] for trace in traces])

    shaped = [run(dimension=dimension, side=side) for dimension, side in SHAPES]
    eluder = np.stack([trace.eluder[-1] for trace in shaped])
    return [
        Sweep("beta", np.array(BETAS), final([run(kl_coef=1.0 / beta) for beta in BETAS])),
        Sweep("e^(2B)", np.exp(2.0 * np.array(BOUNDS)), final([run(bound=bound) for bound in BOUNDS])),
        Sweep("log N", np.log(np.array(SIDES) ** 2.0), final([run(side=side) for side in SIDES])),
        Sweep("realised sum of min(1, U^2)", eluder, final(shaped)),
    ]


def claims(sweeps: list[Sweep], seed: int) -> Iterator[Claim]:
    """The exponent of every factor is at most 1."""
    for sweep in sweeps:
        yield within(f"Regret of pi2 grows no faster than {sweep.name}", "POKL Theorem 5.2",
                     bootstrap(Sweep.slope, sweep.samples, seed), high=1.0, paper="exponent 1",
                     what=f"the exponent of {sweep.name}, optimism (c = 0.2), epsilon = {EPSILON:g}")


def figure(sweeps: list[Sweep]) -> Figure:
    """Regret in units of its value at the smallest factor; grey: in proportion."""
    drawing, (axes,) = new_figure()
    for place, sweep in enumerate(sweeps):
        factor, regret = sweep.samples.mean(axis=2)
        axes.plot(factor / factor[0], regret / regret[0], "o-", color=COLOURS[place], label=sweep.name)
    axes.plot([1.0, 10.0], [1.0, 10.0], color=COLOURS[5], linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="factor / its first value", title="regret of π² / its first value")
    axes.legend(fontsize=6)
    return drawing


def rows(sweeps: list[Sweep]) -> list[dict[str, object]]:
    """For dependence.csv."""
    return [
        {"factor": sweep.name, "value": value.mean(), "regret": regret.mean(), "worlds": len(regret),
         "standard_error": float(standard_error(regret))}
        for sweep in sweeps
        for value, regret in zip(sweep.samples[0], sweep.regret, strict=True)
    ]
