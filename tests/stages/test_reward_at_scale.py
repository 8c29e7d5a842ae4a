"""The reward stage at the size of a real data set, on two processes: as on one, in memory that grows with the pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from private_rlhf.core.world import World
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.reward_models.head import PairFeatures
from support.reward_features_worker import DIM, SIZES, compute, fitted
from support.two_processes import run_two


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    return run_two("reward_features_worker", tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> PairFeatures:
    """The features of one process."""
    return compute(tmp_path_factory.mktemp("alone"), SIZES[-1], make_accelerator(World(0, 1)))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_holds_its_share_of_the_features(left: Path, alone: PairFeatures, rank: int) -> None:
    chosen, rejected, numbers = torch.load(left / f"features-{rank}.pt", weights_only=True)
    assert numbers.tolist() == list(range(rank, SIZES[-1], 2))
    assert torch.equal(chosen, alone.chosen[numbers])
    assert torch.equal(rejected, alone.rejected[numbers])


def test_two_processes_fit_what_one_fits(left: Path, alone: PairFeatures) -> None:
    """Heads, ridges, every kind of Γ, and the held-out check; both processes to the last bit the same."""
    expected = fitted(alone, SIZES[-1])
    first, second = (torch.load(left / f"fitted-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert float(expected["fit"].norm()) > 0.1
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_grows_with_the_pairs_and_not_with_their_square(left: Path, rank: int) -> None:
    """With the pairs of one rank's tensor sent one by one, 500 of them took 1.8 GB."""
    small, large = json.loads((left / f"taken-{rank}.json").read_text())
    assert SIZES == (2500, 5000)
    data = 2 * SIZES[-1] * DIM * 4
    assert large < 2.5 * data  # half of the data, read part by part
    assert large < 3 * small
