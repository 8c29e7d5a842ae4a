"""Theorem 5.2 where all of its conditions are met, on the transitions of the committed behaviour policy.

The experiment is `private_rlhf.validation.temporal_differences`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from private_rlhf.validation import temporal_differences
from private_rlhf.validation.temporal_differences import Linear, Point, point
from private_rlhf.validation.temporal_differences import claims as claims
from private_rlhf.validation.temporal_differences import rows as rows

from private_rlhf_lab.studies.dptd.noise import Kind
from private_rlhf_lab.studies.dptd.trajectories import Transitions


def linear(data: Transitions) -> Linear:
    """Features: the state within its public scale, and 1; divided by √d, so that |φ| ≤ 1. Rewards of size ≤ 1."""
    return temporal_differences.linear(data.state, data.following, data.discount, data.reward)


def measure(pool: Transitions, grid: Sequence[tuple[int, float]], kind: Kind, runs: int) -> list[Point]:
    """DPTD inside the theorem on the first n rows of the shuffled `pool` for every (n, ε) of `grid`; seeded."""
    generator = np.random.default_rng(17)
    order = generator.permutation(len(pool))
    return [point(linear(pool.take(order[:rows])), epsilon, kind, runs, generator) for rows, epsilon in grid]
