"""A search over neighbouring data sets for the largest measured loss relative to its bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from private_rlhf.accounting.epsilon_delta import Guarantee
from private_rlhf.validation.kl_dp import OURS as OURS
from private_rlhf.validation.kl_dp import ROUNDING as ROUNDING
from private_rlhf.validation.kl_dp import Array, hockey_stick
from private_rlhf.validation.kl_dp import Search as Search
from private_rlhf.validation.kl_dp import joined as joined

from private_rlhf_lab.accounting.draws import Thresholds


def threshold_ratios(
    first: Array,
    second: Array,
    core: Array,
    spread: Array,
    log_reference: Array,
    actions: Array,
    promise: Callable[[int, Thresholds], Guarantee],
) -> Array:
    """Measured δ over promised δ where that is below 1, for an approximate statement with thresholds.

    first, second (b, A): log policies of the pairs. core, spread (b, A): widths ‖φ_a‖ under the smaller and the larger
    set. actions (A, d): their features. promise: of pair i for a split. The core level is the smallest width; τ lies
    just above it, or half way up.
    """
    ratios = []
    reference = np.exp(log_reference)
    for i in range(len(first)):
        inner = core[i].min()
        for tau in (1.001 * inner, 0.5 * (spread[i].min() + spread[i].max())):
            outer, centre = spread[i] > tau, core[i] <= inner
            if not outer.any() or tau <= inner:
                continue
            odds = reference[outer].sum() / reference[centre].sum()
            apart = np.linalg.norm(actions[outer][:, None] - actions[centre][None], axis=2).max()
            result = promise(i, Thresholds(float(tau), float(inner), float(odds), float(apart)))
            if result.delta < 1.0:
                ratios.append(float(hockey_stick(first[i], second[i], result.epsilon)) / max(result.delta, 1e-12))
    return np.array(ratios)
