"""Gaussian steps on a random subset: δ of composed steps, ε of one legal pair from below, the Rényi bound.

`private_rlhf.accounting.subset_sampling` has the mechanism and its ε from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from private_rlhf.accounting.epsilon_delta import not_negative, probability
from private_rlhf.accounting.subset_sampling import MOST_CELLS, Phases, composed_losses, grid_width
from scipy.optimize import brentq
from scipy.special import ndtr

FAR = 35.0  # standard deviations, above which a Gaussian's masses are not divided by each other
REACH = 9.0  # standard deviations, beyond which outputs are left out
# Rényi orders: every one gives a valid bound; those below 2 serve weak noise. Cost grows like order².
ORDERS = (1.05, 1.1, 1.25, 1.5, 1.75, *range(2, 41), 44, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024)


def composed_delta(population: int, phases: Phases, epsilon: float, sample_size: int = 1) -> float:
    """δ at ε ≥ 0; as `composed_epsilon`."""
    not_negative("epsilon", epsilon)
    return float(composed_losses(population, phases, sample_size).get_delta_for_epsilon(epsilon))


def pair_epsilon(rate: float, phases: Phases, delta: float, cell: float | None = None) -> float:
    """ε that one legal pair spends at δ, the larger of both directions: what any true statement must concede.

    The pair: n − 1 records answer with one end of the query's range in every step, the last with the same end or the
    other: N(0, σ²) against (1 − γ)N(0, σ²) + γN(Δ, σ²), γ = `rate`. Rounded downwards: of a step's output only its
    bucket is seen, which can only hide. cell: grid width in loss; smaller is finer.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    probability("rate", rate, one=True)
    probability("delta", delta)
    listed = list(phases)
    width = cell or grid_width(rate, listed, MOST_CELLS)
    whole: list[DensePLDPmf] = []
    for multiplier, steps in listed:
        places, masses = _buckets(rate, multiplier, width)
        for direction, (at, mass) in enumerate(zip(places, masses, strict=True)):
            part = DensePLDPmf(width, int(at.min()), np.bincount(at - at.min(), weights=mass), 0.0, False)
            if steps > 1:
                part = part.self_compose(steps)
            whole[direction:] = [whole[direction].compose(part)] if direction < len(whole) else [part]
    return max(float(part.get_epsilon_for_delta(delta)) for part in whole)


def _buckets(rate: float, multiplier: float, cell: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Intervals of a step's output, each with a log ratio of masses, mixture over Gaussian, that is a multiple of
    `cell` wherever one can be had. (2, K): the losses in cells of the mixture and of the Gaussian, rounded down, and
    their masses. What lies beyond REACH is left out.
    """
    shift = 1.0 / multiplier

    def loss(z: float) -> float:  # at one output, in standard deviations
        ratio = z * shift - 0.5 * shift**2
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio)) if rate < 1.0 else ratio

    def masses(low: float, high: float) -> tuple[float, float]:
        plain, moved = (
            float(ndtr(high - at) - ndtr(low - at) if low + high < 2.0 * at else ndtr(at - low) - ndtr(at - high))
            for at in (0.0, shift)
        )
        return (1.0 - rate) * plain + rate * moved, plain

    rows = []
    low, top = -math.inf if rate < 1.0 else -REACH, REACH + shift
    while low < top:
        start = low + 1e-9 if math.isfinite(low) else -REACH
        here = loss(start)
        # The tail's buckets are wider: little of the mass is there.
        far = low > FAR  # the Gaussian's own mass leaves the floats: a bucket's loss is taken from its lower end
        place = math.floor(here / cell) + 1 + math.floor((0.001 if far else 0.003) * abs(here) / cell)

        def above(high: float, low: float = low, target: float = place * cell) -> float:
            first, second = masses(low, high)
            return math.log(first / second) - target if min(first, second) > 0.0 and low <= FAR else loss(high) - target

        if above(top) > 0.0:
            exact = above(start) < 0.0
            end = float(brentq(above, start, top, xtol=1e-13, rtol=1e-14)) if exact else start
            rows.append((math.floor(here / cell) if far else place, -place - (not exact), *masses(low, end)))
        else:  # no multiple lies ahead of these outputs, or the cell is too wide for one below 0
            end = 0.5 * shift if low < 0.5 * shift else top
            first, second = masses(low, end)
            ratio = math.log(first / second) / cell if min(first, second) > 0.0 else here / cell
            rows.append((math.floor(ratio), math.floor(-ratio), first, second))
        low = end
    table = np.array(rows)
    return table[:, :2].T.astype(np.int64), table[:, 2:].T


def renyi_epsilon(
    population: int, phases: Phases, delta: float, sample_size: int = 1, orders: Sequence[float] = ORDERS
) -> float:
    """ε at δ by dp-accounting's Rényi bound (Wang, Balle and Kasiviswanathan 2019, Theorem 27): valid, and looser."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders), neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for multiplier, steps in phases:
        noise = dp_accounting.GaussianDpEvent(multiplier)
        step = dp_accounting.SampledWithoutReplacementDpEvent(population, sample_size, noise)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))
