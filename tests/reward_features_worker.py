"""One of two processes that compute the reward stage's features of many pairs: says what that took, and leaves them.

Usage: reward_features_worker.py FOLDER RANK
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pipeline.core.world import World
from pipeline.lm.distributed import make_accelerator
from pipeline.lm.rows import Rows
from pipeline.stages.reward import pair_features
from reward_models.head import PairFeatures

SIZES = (2500, 5000)
DIM = 576
GIVEN = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))


class Backbone:
    """φ of the text [i] is row i of random numbers."""

    sharing = None
    weight = torch.zeros(DIM)

    def row_features(self, rows: Rows) -> torch.Tensor:
        ids = rows.input_ids.flatten()
        return torch.stack([features_of(int(ids[path[0]])) for path in rows.paths])


def features_of(number: int) -> torch.Tensor:
    """(d,) float32."""
    return torch.randn(DIM, generator=torch.Generator().manual_seed(number))


def compute(folder: Path, world: World, count: int) -> PairFeatures:
    """Features of `count` pairs."""
    recipe = SimpleNamespace(reward=SimpleNamespace(feature_batch_size=64))
    context: Any = SimpleNamespace(world=world, recipe=recipe, checkpoints=folder / f"parts-{count}")
    model: Any = Backbone()
    given: Any = GIVEN
    return pair_features(context, model, [([2 * i + 1], [2 * i + 2]) for i in range(count)], given, "frozen")


def peak() -> int:
    """The largest resident memory since the last `reset_peak`, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: Path, rank: int) -> None:
    os.environ.update(
        ACCELERATE_USE_CPU="true", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"
    )
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    make_accelerator(World(rank, 2))
    compute(folder, World(rank, 2), 64)  # what the first call of a library costs is not counted
    taken = []
    for count in SIZES:
        reset_peak()
        before = peak()
        found = compute(folder, World(rank, 2), count)
        taken.append(peak() - before)
    torch.save([found.chosen, found.rejected], folder / f"features-{rank}.pt")
    (folder / f"taken-{rank}.json").write_text(json.dumps(taken))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
