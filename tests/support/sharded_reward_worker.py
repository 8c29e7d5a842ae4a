"""One of two processes that train a reward backbone with weights split by FSDP2: says what came out, and leaves it.

Usage: sharded_reward_worker FOLDER RANK
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.world import World
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.distributed import make_accelerator, whole_tensor
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.training import Pairs, train_backbone

from support.recipes import recipe_of
from support.two_processes import FSDP, gloo_pair

KINDS: dict[str, dict[str, Any]] = {
    "lora": {
        "lora": {"rank": 2},
        "early_stopping": {"every": 2, "standard_errors": 0.0},
        "max_steps": 4,
        "save_steps": 2,
    },
    "full": {"max_steps": 3, "learning_rate": 2e-3, "trainer_args": {"gradient_checkpointing": True}},
}


def recipe(kind: str) -> Recipe:
    own = {"mode": kind, "reward_bound": 4.0, "batch_size": 4, "learning_rate": 1e-2, **KINDS[kind]}
    model = {"source": "tiny", "dtype": "float32"}
    return recipe_of(model=model, reward=own)


def pairs(count: int, seed: int) -> Pairs:
    """Token ids 5 to 20, never the padding of the tiny tokenizer."""
    generator = torch.Generator().manual_seed(seed)

    def text() -> list[int]:
        length = int(torch.randint(3, 9, (1,), generator=generator))
        return torch.randint(5, 21, (length,), generator=generator).tolist()

    return [(text(), text()) for _ in range(count)]


def learn(checkpoint: Path, folder: Path, kind: str, world: World) -> tuple[dict[str, Any], Any]:
    """(losses and what early stopping saw, the plain model) of a short training; 7 held-out pairs do not divide."""
    tokenizer = load_tokenizer(checkpoint)

    def load() -> Any:
        return build_reward_backbone(checkpoint, pad_token_id=tokenizer.pad_token_id)

    backbone = load()
    warm = 0.3 * torch.randn(backbone.config.hidden_size, generator=torch.Generator().manual_seed(2))
    own = recipe(kind)
    result = train_backbone(
        backbone,
        pairs(16, seed=0),
        pairs(7, seed=1),
        1.0,
        own.reward,
        tokenizer=tokenizer,
        dtype=own.model.dtype,
        seed=own.seed,
        checkpoints=folder / f"{kind}-checkpoints",
        world=world,
        warm_weight=warm,
        reload=load,
        track=lambda *_: nullcontext(),
    )
    return {"history": result.history, "stopping": result.early_stopping}, result.model


def watch_whole_weights() -> list[int]:
    """Fills up with the number of split weights of each trained model."""
    split: list[int] = []
    train = hf_trainer.train

    def watched(trainer: Any, *arguments: Any) -> None:
        train(trainer, *arguments)
        split.append(sum(whole_tensor(each) is not each for each in trainer.model.parameters()))

    hf_trainer.train = watched
    return split


def main(folder: Path, rank: int) -> None:
    with gloo_pair(folder, rank, **FSDP) as world:
        split = watch_whole_weights()
        for kind in KINDS:
            make_accelerator(world)  # as the stage does
            said, model = learn(Path((folder / "checkpoint").read_text()), folder, kind, world)
            (folder / f"{kind}-{rank}.json").write_text(json.dumps({**said, "split": split[-1]}))
            torch.save(model.state_dict(), folder / f"{kind}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
