"""Fieller's interval against a known ratio."""

from __future__ import annotations

import numpy as np
import pytest
from private_rlhf_lab.fieller import fieller


def test_fieller_covers_a_known_ratio() -> None:
    """1,000 draws of a ratio .6 of paired means: 93 to 97 % cover it (of a 95 % interval, 996 of 1,000 times)."""
    generator, covered = np.random.default_rng(3), 0
    for _ in range(1000):
        shared = generator.normal(size=200)
        bottom = 1.0 + 2.0 * shared + generator.normal(size=200)
        low, high = fieller(0.6 + 1.2 * shared + generator.normal(size=200), bottom)
        covered += low <= 0.6 <= high
    assert 930 <= covered <= 970


def test_fieller_of_a_fixed_share_is_a_point() -> None:
    bottom = np.random.default_rng(0).normal(1.0, 0.5, 50)
    assert fieller(0.25 * bottom, bottom) == pytest.approx((0.25, 0.25), abs=1e-6)
    with pytest.raises(ValueError, match="must exclude 0"):
        fieller(bottom, np.random.default_rng(1).normal(0.0, 1.0, 50))
