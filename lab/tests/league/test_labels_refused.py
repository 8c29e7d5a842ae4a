"""The league's losses and sums refuse labels that are not -1 or +1, as the product's do."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf_lab.league.arms import smoothed_loss, smoothed_slope
from private_rlhf_lab.league.noisy_sum import DiscreteGaussian, exact_statistic, noisy_statistic
from private_rlhf_lab.league.noisy_sum_fit import release_statistic


@pytest.mark.parametrize("act", [smoothed_loss, smoothed_slope])
@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan")])
def test_labels(act: Callable[..., Any], wrong: float) -> None:
    z = torch.ones(4, dtype=torch.float64)
    z[2] = wrong
    with pytest.raises((UserError, ValueError), match=r"must be (\d+ of )?-1 or \+1"):
        act(torch.zeros(4, dtype=torch.float64), z, LabelNoise.of(1.0))


ROWS = np.arange(12).reshape(4, 3)
SUMS: dict[str, Callable[[np.ndarray], Any]] = {
    "exact": lambda labels: exact_statistic(ROWS, labels),
    "noisy": lambda labels: noisy_statistic(ROWS, labels, DiscreteGaussian(Fraction(4))),
    "released": lambda labels: release_statistic(torch.from_numpy(ROWS), torch.from_numpy(labels), 1.0, 1e-6),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("wrong", [0, 3])
def test_labels_of_sums(name: str, wrong: int) -> None:
    labels = np.array([1, -1, 1, -1])
    SUMS[name](labels)
    labels[2] = wrong
    with pytest.raises((UserError, ValueError), match=r"must be (\d+ of )?-1 or \+1"):
        SUMS[name](labels)
