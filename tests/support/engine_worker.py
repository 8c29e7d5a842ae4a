"""One of two processes that learn by PPO from the responses of a server; says what came out.

Usage: engine_worker FOLDER RANK, with the server's address in FOLDER/url
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from private_rlhf.core.world import World
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.recipe import RolloutConfig
from private_rlhf.rl.engines import VllmEngine
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.sync_proof import SyncProof

from support.ppo_problem import CAP, make_problem
from support.two_processes import gloo_pair

SETTINGS: dict[str, Any] = {
    "rollouts": 32,
    "minibatch_size": 16,
    "learning_rate": 1e-2,
    "value_learning_rate": 1e-2,
    "reference_samples": 2,
}
TOKENS = 4 + CAP


def serve(trainer: PpoTrainer, folder: Path, urls: Sequence[str]) -> PpoTrainer:
    """Gives the trainer servers in place of its own sampler."""
    settings = RolloutConfig(engine="vllm", urls=list(urls), patience=1.5)
    tokenizer, temperature = trainer.renderer.tokenizer, trainer.config.temperature
    call, together = trainer.bare.read, trainer.together
    proof = SyncProof(
        trainer.accelerator, trainer.policy, tokenizer, temperature, settings.bounds("float32"), call, together
    )
    trainer.engine = VllmEngine(trainer.accelerator, settings, proof, folder, trainer.ends, TOKENS, 8)
    return trainer


def steps(trainer: PpoTrainer, first: int, last: int) -> list[dict[str, Any]]:
    """Iterations `first`, …, `last` − 1: losses, responses and proofs."""
    seen = []
    for iteration in range(first, last):
        trainer.proofs = {}
        rollout, _ = trainer.collect(iteration)
        losses = trainer.update(rollout, iteration)
        seen.append({"losses": losses, "responses": rollout.responses, "proofs": dict(trainer.proofs)})
    return seen


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    with gloo_pair(folder, rank):
        trainer = make_problem().trainer(accelerator=lambda: make_accelerator(World(rank, 2)), **SETTINGS)
        found = steps(serve(trainer, folder / "adapters", [(folder / "url").read_text()]), 0, 3)
        (folder / f"said-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
