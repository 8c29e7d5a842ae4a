"""Labels with an ε of their own, and corrupted ones: against a grid search and hand values, verdicts that can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from private_rlhf.validation.bandits import Counts, factor
from private_rlhf_lab.studies.offline import robust


def test_the_mixed_estimate_is_the_best_on_a_grid() -> None:
    rng = np.random.default_rng(0)
    groups = {e: Counts(rng.integers(40, 90, 5).astype(float), np.full(5, 50.0)) for e in (0.5, 3.0)}
    grid = np.linspace(-6.0, 6.0, 24_001)
    total = np.zeros((5, len(grid)))
    for epsilon, n in groups.items():
        likely = 0.5 + 0.5 * factor(epsilon) * np.tanh(grid / 2.0)
        total += n.plus[:, None] * np.log(likely) + n.minus[:, None] * np.log(1.0 - likely)
    assert robust.estimate(groups) == pytest.approx(grid[total.argmax(axis=1)], abs=1e-3)


def test_corruption_by_hand() -> None:
    """Before: mean (1−η)m − η. After: (1−η)m − η/(2α−1). SubOpt is the KL of the two Gibbs policies."""
    mean, share = math.tanh(0.5 * robust.MARGIN), 0.05
    for after, shifted in ((False, 0.95 * mean - share), (True, 0.95 * mean - share / factor(1.0))):
        p, q = (1.0 / (1.0 + math.exp(-m)) for m in (2.0 * math.atanh(shifted), robust.MARGIN))
        expected = p * math.log(p / q) + (1.0 - p) * math.log((1.0 - p) / (1.0 - q))
        assert robust.corrupted(share, 1.0, after=after) == pytest.approx(expected)


def test_verdicts_follow_the_errors() -> None:
    found = robust.budgets(4000, 1)
    good = [claim.verdict for claim in robust.claims(found, 0)]
    assert "refuted" not in good
    worse = {**found, "own": 4.0 * found["own"]}
    bad = [claim.verdict for claim in robust.claims(worse, 0)]
    assert [bad[0], *bad[2:4]] == ["refuted"] * 3
