"""Private primal-dual temporal differences: T subsampled Gaussian steps, accounted by dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scipy.optimize import brentq

from pipeline.accounting.guarantee import (
    Guarantee,
    OutsideAssumptions,
    count,
    guarantee,
    positive,
    probability,
)

LARGEST_MULTIPLIER = 1e4
# Every order gives a valid bound; large ones serve strong noise, those below 2 weak noise. Cost grows like order².
ORDERS = (1.05, 1.1, 1.25, 1.5, 1.75, *range(2, 41), 44, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024)


def joint_sensitivity(clip: float) -> float:
    """2√2·G: the largest ℓ2 change of the joint gradients (g_θ, g_ω), each of norm ≤ G, when a record changes."""
    return 2.0 * math.sqrt(2.0) * positive("clip", clip)


def subsampled_gaussian_epsilon(
    population: int,
    steps: int,
    noise_multiplier: float,
    delta: float,
    sample_size: int = 1,
    orders: Sequence[float] = ORDERS,
) -> float:
    """ε at δ of `steps` Gaussian releases, each on `sample_size` of `population` records drawn uniformly; replace-one.

    noise_multiplier: standard deviation over ℓ2 sensitivity. dp-accounting's Rényi accountant: Wang, Balle and
    Kasiviswanathan (2019), Theorem 27, for sampling without replacement. Infinite where no order gives a bound.
    """
    return composed_subsampled_gaussian_epsilon(population, [(noise_multiplier, steps)], delta, sample_size, orders)


def composed_subsampled_gaussian_epsilon(
    population: int,
    phases: Iterable[tuple[float, int]],
    delta: float,
    sample_size: int = 1,
    orders: Sequence[float] = ORDERS,
) -> float:
    """As `subsampled_gaussian_epsilon`, for phases (noise multiplier, steps) one after the other, adaptively chosen."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders), neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for noise_multiplier, steps in phases:
        step = dp_accounting.SampledWithoutReplacementDpEvent(
            population, sample_size, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))


def _population(neighbors: str, rows: int | None, trajectories: int | None) -> int:
    if neighbors == "transition":
        if rows is None:
            raise OutsideAssumptions(
                "rows", "is missing: transition neighbours need it; pass the number of transitions"
            )
        return count("rows", rows)
    if neighbors != "trajectory":
        raise OutsideAssumptions("neighbors", f"must be transition or trajectory, got {neighbors!r}; choose one")
    if trajectories is None:
        raise OutsideAssumptions(
            "trajectories", "is missing: trajectory neighbours need it; pass the number of trajectories"
        )
    if rows is not None and count("rows", rows) < trajectories:
        raise OutsideAssumptions("trajectories", f"must not exceed rows = {rows}, got {trajectories}; correct it")
    return count("trajectories", trajectories)


def dptd(
    rows: int | None,
    steps: int,
    clip: float,
    sigma: float,
    target_delta: float,
    neighbors: str,
    trajectories: int | None = None,
) -> Guarantee:
    """All T iterates of DPTD, both players: (ε, target_delta) as dp-accounting certifies it.

    Theorem: a step is one Gaussian release of the concatenated query (α ν_t g_θ, α ν_t g_ω) on one transition drawn
    uniformly, of sensitivity 2√2·α ν_t·G, with noise of deviation α ν_t·σ on each player: a noise multiplier
    σ/(2√2·G) at every t (at t = 0 without the factor α ν_t). transition: `SampledWithoutReplacementDpEvent(n, 1)` under
    REPLACE_ONE. trajectory: a trajectory is drawn uniformly, then a transition of it, so the population is m =
    `trajectories`; the sensitivity stays 2√2·G, since a step uses one transition (divergences are jointly convex, so
    the draw inside the trajectory costs nothing). Source: DPTD Algorithm 1; the paper's Theorem 5.1 does not give
    the ε that it claims, as its side conditions fail at the settings of its experiments.
    Assumes each player's per-sample gradient clipped to ℓ2 norm G = `clip`, and equal momentum factors of the players
    (else pass the smaller ratio of noise to sensitivity). Units: σ and G per player, in gradient units, before the
    factor α ν_t. Fails: curves, utilities and objective values read raw data and are not covered.
    """
    count("steps", steps)
    positive("sigma", sigma)
    probability("target_delta", target_delta)
    population = _population(neighbors, rows, trajectories)
    multiplier = sigma / joint_sensitivity(clip)
    epsilon = subsampled_gaussian_epsilon(population, steps, multiplier, target_delta)
    if not math.isfinite(epsilon):
        raise OutsideAssumptions("sigma", f"= {sigma!r} is too small for any finite bound; raise it, or lower clip")
    single = neighbors == "transition"
    assumptions = (
        f"neighbours differ in one {'transition' if single else 'whole trajectory'}, replaced; their number"
        f" ({population}) is public",
        f"per-sample gradients of each player are clipped to norm {clip:g}; each player's step has Gaussian noise of"
        f" deviation {sigma:g} in the same unit (both times the step's momentum factor)",
        f"every step draws one transition anew, uniformly{'' if single else ' within a uniformly drawn trajectory'},"
        " and both players use it: one joint release a step",
        "only iterates are released: objectives, utilities and plots that read raw data are not covered",
    )
    return guarantee(
        epsilon,
        target_delta,
        f"the sequence of {steps} iterates of both players",
        assumptions,
        noise_multiplier=multiplier,
        sampling_rate=1.0 / population,
    )


def least_noise_multiplier(
    target_epsilon: float,
    population: int,
    steps: int,
    target_delta: float,
    sample_size: int = 1,
    orders: Sequence[float] = ORDERS,
) -> float:
    """The least noise multiplier (to 0.1 %) for which `subsampled_gaussian_epsilon` is at most `target_epsilon`.

    orders: fewer are as valid, quicker and a little looser. OutsideAssumptions if 10⁴ is not enough; never less than
    10⁻⁴.
    """
    positive("target_epsilon", target_epsilon)
    count("steps", steps)
    probability("target_delta", target_delta)

    def excess(log_multiplier: float) -> float:
        multiplier = math.exp(log_multiplier)
        found = subsampled_gaussian_epsilon(population, steps, multiplier, target_delta, sample_size, orders)
        return min(found, 1e6) - target_epsilon

    high = 0.0
    while excess(high) > 0.0:
        high += 1.0
        if high > math.log(LARGEST_MULTIPLIER):
            raise OutsideAssumptions("target_epsilon", f"= {target_epsilon!r} is out of reach; raise it or lower steps")
    low = high - 1.0
    while excess(low) <= 0.0:
        low -= 1.0
        if low < -math.log(LARGEST_MULTIPLIER):
            return math.exp(low)
    root = float(brentq(excess, low, min(high, low + 1.0), xtol=5e-4))
    while excess(root) > 0.0:
        root += 5e-4
    return math.exp(root)
