"""The reward stage at the size of a real data set, on two processes: as on one, in memory that grows with the pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pipeline_runs import run_two
from reward_features_worker import DIM, SIZES, compute

from pipeline.core.world import World


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    return run_two("reward_features_worker.py", tmp_path_factory.mktemp("features"))


def test_features_are_those_of_one_process(left: Path, tmp_path: Path) -> None:
    alone = compute(tmp_path, World(0, 1), SIZES[-1])
    for rank in (0, 1):
        chosen, rejected = torch.load(left / f"features-{rank}.pt", weights_only=True)
        assert torch.equal(chosen, alone.chosen)
        assert torch.equal(rejected, alone.rejected)


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_grows_with_the_pairs_and_not_with_their_square(left: Path, rank: int) -> None:
    """With the pairs of one rank's tensor sent one by one, 500 of them took 1.8 GB."""
    small, large = json.loads((left / f"taken-{rank}.json").read_text())
    assert SIZES == (2500, 5000)
    data = 2 * SIZES[-1] * DIM * 4
    assert data < large < 10 * data
    assert large < 3 * small
