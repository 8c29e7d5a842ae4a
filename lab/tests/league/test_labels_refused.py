"""The league's losses refuse labels that are not -1 or +1, as the product's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf_lab.league.arms import smoothed_loss, smoothed_slope


@pytest.mark.parametrize("act", [smoothed_loss, smoothed_slope])
@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan")])
def test_labels(act: Callable[..., Any], wrong: float) -> None:
    z = torch.ones(4, dtype=torch.float64)
    z[2] = wrong
    with pytest.raises((UserError, ValueError), match=r"must be (\d+ of )?-1 or \+1"):
        act(torch.zeros(4, dtype=torch.float64), z, LabelNoise.of(1.0))
