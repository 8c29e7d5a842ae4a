"""Private primal-dual temporal differences: T Gaussian steps on one record each, by privacy-loss distributions."""

from __future__ import annotations

import math

from private_rlhf.accounting.epsilon_delta import (
    Guarantee,
    OutsideAssumptions,
    count,
    guarantee,
    positive,
    probability,
)
from private_rlhf.accounting.subset_sampling import composed_epsilon


def joint_sensitivity(clip: float) -> float:
    """2√2·G: the largest ℓ2 change of the joint gradients (g_θ, g_ω), each of norm ≤ G, when a record changes."""
    return 2.0 * math.sqrt(2.0) * positive("clip", clip)


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
    """All T iterates of DPTD, both players: (ε, target_delta) by privacy-loss distributions.

    Theorem: a step is one Gaussian release of the concatenated query (α ν_t g_θ, α ν_t g_ω) on one transition drawn
    uniformly, of sensitivity 2√2·α ν_t·G, with noise of deviation α ν_t·σ on each player: a noise multiplier
    σ/(2√2·G) at every t (at t = 0 without the factor α ν_t). transition: one of n, replaced; T steps compose as in
    `accounting.subset_sampling`, proved in docs/explanation/subset-sampling.md. trajectory: a trajectory is
    drawn uniformly, then a transition of it, so the population is m = `trajectories`; the sensitivity stays 2√2·G,
    since a step uses one transition (divergences are jointly convex, so the draw inside the trajectory costs nothing).
    Source: DPTD Algorithm 1; the paper's Theorem 5.1 does not give the ε that it claims, as its side conditions fail
    at the settings of its experiments.
    Assumes each player's per-sample gradient clipped to ℓ2 norm G = `clip`, and equal momentum factors of the players
    (else pass the smaller ratio of noise to sensitivity). Units: σ and G per player, in gradient units, before the
    factor α ν_t. Fails: curves, utilities and objective values read raw data and are not covered.
    """
    count("steps", steps)
    positive("sigma", sigma)
    probability("target_delta", target_delta)
    population = _population(neighbors, rows, trajectories)
    multiplier = sigma / joint_sensitivity(clip)
    epsilon = composed_epsilon(population, [(multiplier, steps)], target_delta)
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
