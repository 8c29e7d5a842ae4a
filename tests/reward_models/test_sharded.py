"""A reward backbone trained with weights split over two gloo processes (FSDP2) is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from private_rlhf.core.world import World
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.reward_models.backbone import build_reward_backbone
from support.sharded_reward_worker import KINDS, learn
from support.two_processes import run_two

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "checkpoint").write_text(str(checkpoint))
    return run_two("sharded_reward_worker", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_split_weights_train_as_whole_ones_do(trained: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Losses, held-out likelihoods and, on every process, all weights of the plain model."""
    expected, model = learn(checkpoint, tmp_path, kind, World(0, 1))
    before = build_reward_backbone(checkpoint, pad_token_id=load_tokenizer(checkpoint).pad_token_id).state_dict()
    weights = model.state_dict()
    assert max(float((weights[name] - before[name]).abs().max()) for name in before) > 20 * TOLERANCE
    for rank in (0, 1):
        said = json.loads((trained / f"{kind}-{rank}.json").read_text())
        assert said["split"] > 10
        assert said["history"] == [pytest.approx(row, abs=TOLERANCE) for row in expected["history"]]
        if expected["stopping"]:
            assert said["stopping"]["kept_step"] == expected["stopping"]["kept_step"]
            for ours, theirs in zip(said["stopping"]["evaluations"], expected["stopping"]["evaluations"], strict=True):
                assert ours == pytest.approx(theirs, abs=TOLERANCE)
        found = torch.load(trained / f"{kind}-{rank}.pt", weights_only=True)
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
