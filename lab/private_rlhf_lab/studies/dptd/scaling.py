"""Eq. 4 against n·ε at the theorem's own number of steps: does the utility fall like (nε)^(−1/4)?

With the network, κ, η and ν of the paper's experiments, which break the theorem's conditions; `inside` meets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap
from private_rlhf.validation.bandits import slope_of_mean
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.dptd.algorithms import momentum_runs, sampled_rows
from private_rlhf_lab.studies.dptd.metrics import Utility, subset, utility
from private_rlhf_lab.studies.dptd.network import dimension, initial
from private_rlhf_lab.studies.dptd.noise import Budget, Kind, deviations
from private_rlhf_lab.studies.dptd.trajectories import Transitions

CONSTANT = 4.0  # C of T = C·nε/√(d log 1/δ); the theorem leaves it open
MOMENTS = 8
BOUND = -0.25


@dataclass(frozen=True)
class Point:
    """One (n, ε) with its steps T, the deviation of the first noise, and Eq. 4 of R runs."""

    rows: int
    epsilon: float
    steps: int
    sigma: float
    utility: Utility

    @property
    def product(self) -> float:
        """nε."""
        return self.rows * self.epsilon


def measure(pool: Transitions, grid: Sequence[tuple[int, float]], kind: Kind, runs: int, clip: float) -> list[Point]:
    """DPTD on the first n transitions of the shuffled `pool` for every (n, ε) of `grid`; bit-reproducible."""
    generator = np.random.default_rng(11)
    order = generator.permutation(len(pool))
    size = pool.state.shape[1]
    points = []
    for rows, epsilon in grid:
        data = replace(pool.take(order[:rows]), trajectory=np.zeros(rows, dtype=np.int64))
        budget = Budget(epsilon, 1e-5, 1, clip, rows, 1, rows)
        steps = max(1, round(CONSTANT * budget.theorem_steps(dimension(size))))
        deviation = deviations(kind, replace(budget, steps=steps))
        start = (initial(runs, size, generator), initial(runs, size, generator))
        moments = np.unique(np.linspace(0, steps - 1, MOMENTS).astype(int)).tolist()
        path = momentum_runs(
            data,
            start,
            sampled_rows(data, steps, runs, "transition", generator),
            np.repeat(deviation[:, None], runs, axis=1),
            np.full(runs, clip),
            moments,
            generator,
        )
        points.append(Point(rows, epsilon, steps, float(deviation[0]), utility(path, subset(data))))
    return points


def slope(points: Sequence[Point]) -> Estimate:
    """Least-squares slope of log mean Eq. 4 in log nε; bootstrap over runs."""
    totals = np.array([point.utility.total for point in points])
    return bootstrap(slope_of_mean(np.array([point.product for point in points])), totals, 12)


def claim(points: Sequence[Point], kind: Kind) -> Claim:
    """The exponent of Theorem 5.2 on this range."""
    low, high = points[0].product, points[-1].product
    return within(f"Eq. 4 falls at least like (n epsilon)^(-1/4) at the experiments' settings, calibration {kind}",
                  "DPTD Theorem 5.2", slope(points), high=BOUND, kind="reading", paper="-1/4",
                  what=f"slope of log utility in log(n epsilon), {low:g} to {high:g}")


def rows(points: Sequence[Point], kind: Kind) -> list[dict[str, object]]:
    """For scaling.csv."""
    return [
        {"calibration": kind, "rows": point.rows, "epsilon": point.epsilon, "steps": point.steps,
         "first_sigma": point.sigma, "movement": point.utility.movement.mean(),
         "estimate": point.utility.estimate.mean(), "dual": point.utility.dual.mean(),
         "utility": point.utility.total.mean(), "utility_sd": point.utility.total.std(ddof=1)}
        for point in points
    ]
