"""Every test of the attacks starts its bundles' randomness from its own name."""

from __future__ import annotations

import random

import pytest
from audit.worlds import COINS


@pytest.fixture(autouse=True)
def _coins(request: pytest.FixtureRequest) -> None:
    COINS.generator = random.Random(f"bundles of {request.node.name}")
