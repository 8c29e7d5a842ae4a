"""Gaussian steps on a uniform subset of fixed size, neighbours by replacement: privacy-loss distributions.

One step draws m of n records without replacement and adds N(0, σ²I) to a query that moves by at most Δ in ℓ2 norm when
a drawn record is replaced. With γ = m/n, P = N(Δ, σ²) and Q = N(0, σ²), its hockey-stick divergence at any α = e^ε ≥ 1
is at most f(α) = γ·H_{1+(α−1)/γ}(P‖Q), in both directions, hence at most 1 − α + α·f(1/α) for α < 1. These are the
divergences of one pair, so adaptive composition is a convolution of that pair's privacy losses. Proof:
docs/explanation/subset-sampling.md. Poisson sampling under add/remove has f only above 1 and is another mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from private_rlhf.accounting.epsilon_delta import OutsideAssumptions, count, positive, probability
from scipy.optimize import brentq
from scipy.special import ndtr

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import DensePLDPmf

LARGEST_MULTIPLIER = 1e4
FINENESS, MOST_CELLS = 16, 2**17  # cells in a step's root mean square loss, unless more cells than these were needed
REACH = 9.0  # standard deviations of the Gaussian on the grid; what lies beyond (1e-19) counts as an infinite loss

Phases = Iterable[tuple[float, int]]


def _rate(population: int, sample_size: int) -> float:
    if count("sample_size", sample_size) > count("population", population):
        raise OutsideAssumptions("sample_size", f"must not exceed population = {population}, got {sample_size}")
    return sample_size / population


def _largest_loss(rate: float, multiplier: float) -> float:
    ratio = 0.5 / multiplier**2 + REACH / multiplier
    return ratio + math.log(rate - (rate - 1.0) * math.exp(-ratio))


def _cell(rate: float, multiplier: float) -> float:
    """Grid width of one phase: a fraction of the root mean square of a step's finite losses."""
    cells = np.linspace(0.0, REACH + 1.0 / multiplier, 4001)
    z = 0.5 / multiplier + cells[:-1] + 0.5 * np.diff(cells)  # of Q, from the point of equal likelihood
    ratio = np.minimum(z / multiplier - 0.5 / multiplier**2, 700.0)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1.0 else -math.inf, math.log(rate) + ratio)
    square = float((loss**2 * np.exp(loss - 0.5 * z**2)).sum() * (cells[1] - cells[0]) / math.sqrt(2.0 * math.pi))
    return max(math.sqrt(2.0 * square) / FINENESS, 1e-12)


def grid_width(rate: float, phases: Sequence[tuple[float, int]], cells: int) -> float:
    """The finest of the phases' cells, unless the largest loss would need more than `cells` of them."""
    largest = max(_largest_loss(rate, multiplier) for multiplier, _ in phases)
    return max(min(_cell(rate, multiplier) for multiplier, _ in phases), largest / cells)


def _step(rate: float, multiplier: float, cell: float) -> DensePLDPmf:
    """Losses of the dominating pair on multiples of `cell`, never below the true ones in hockey-stick order.

    Each cell's probabilities under both members of the pair are kept by the masses at its two ends (connect the dots,
    Doroshenko et al. 2022).
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    size = math.ceil(_largest_loss(rate, multiplier) / cell) + 1
    ends = np.arange(size + 1) * cell
    # Loss l of the mixture against Q means the Gaussian log ratio log(1 + (e^l − 1)/γ).
    ratio = np.where(ends < 30.0, np.log1p(np.expm1(np.minimum(ends, 30.0)) / rate), ends - math.log(rate))
    below = -multiplier * ratio  # of the standard normal, mirrored so that tails keep their digits
    weak = -np.diff(ndtr(below - 0.5 / multiplier))
    strong = -np.diff(ndtr(below + 0.5 / multiplier))
    first = (1.0 - rate) * weak + rate * strong
    # Capped: where e^l leaves the floats, all of a cell's mass goes to its upper end.
    upper = np.clip((first - weak * np.exp(np.minimum(ends[:-1], 700.0))) / -math.expm1(-cell), 0.0, first)
    positive_side = np.zeros(size + 1)
    positive_side[:-1] += first - upper
    positive_side[1:] += upper
    beyond = float((1.0 - rate) * ndtr(below[-1] - 0.5 / multiplier) + rate * ndtr(below[-1] + 0.5 / multiplier))
    mirrored = positive_side * np.exp(-ends)
    masses = np.concatenate([mirrored[:0:-1], [0.0], positive_side[1:]])
    masses[size] = max(0.0, 1.0 - masses.sum() - beyond)
    return DensePLDPmf(cell, -size, masses, beyond, True)


def composed_losses(population: int, phases: Phases, sample_size: int) -> DensePLDPmf:
    """Distribution of the privacy loss of all phases together; arguments as of `composed_epsilon`."""
    rate, listed = _rate(population, sample_size), list(phases)
    if not listed:
        raise OutsideAssumptions("phases", "is empty; name at least one (noise multiplier, steps)")
    for multiplier, steps in listed:
        positive("noise_multiplier", multiplier)
        count("steps", steps)
    cell = grid_width(rate, listed, MOST_CELLS)
    whole = None
    for multiplier, steps in listed:
        part = _step(rate, multiplier, cell)
        part = part.self_compose(steps) if steps > 1 else part
        whole = part if whole is None else whole.compose(part, 1e-15)
    assert whole is not None
    return whole


def composed_epsilon(population: int, phases: Phases, delta: float, sample_size: int = 1) -> float:
    """ε at δ of phases (noise multiplier, steps) one after the other, adaptively chosen; an upper bound.

    population, sample_size: n and m, m records drawn anew at each step, uniformly, without replacement; neighbours
    replace one record. noise_multiplier: standard deviation over ℓ2 sensitivity of the query. Infinite where the mass
    of unbounded losses exceeds δ. OutsideAssumptions for numbers out of range.
    """
    probability("delta", delta)
    return float(composed_losses(population, phases, sample_size).get_epsilon_for_delta(delta))


def least_noise_multiplier(
    target_epsilon: float,
    population: int,
    steps: int,
    target_delta: float,
    sample_size: int = 1,
    bound: Callable[[int, Phases, float, int], float] = composed_epsilon,
) -> float:
    """The least noise multiplier (to 0.1 %, at least 10⁻⁴) for which `bound` of `steps` is at most `target_epsilon`.
    OutsideAssumptions if 10⁴ is not enough."""
    positive("target_epsilon", target_epsilon)
    count("steps", steps)
    probability("target_delta", target_delta)

    def excess(log_multiplier: float) -> float:
        epsilon = bound(population, [(math.exp(log_multiplier), steps)], target_delta, sample_size)
        return math.log(min(max(epsilon, 1e-9), 1e9) / target_epsilon)

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
