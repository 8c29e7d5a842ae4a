"""The recipe's keys reach the trainer; the backbone comes back plain, at the step that early stopping kept."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.losses import private_likelihood_loss
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.training import Pairs, TrainedBackbone, held_out_stopping, train_backbone
from support.recipes import recipe_of
from support.reward_checkpoints import rewards
from support.sharded_reward_worker import pairs


def recipe(**reward: Any) -> Recipe:
    own = {
        "mode": "lora",
        "reward_bound": 4.0,
        "batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lora": {"rank": 2},
        **reward,
    }
    return recipe_of(model={"source": "tiny", "dtype": "float32"}, reward=own)


def trained(backbone: Any, held_out: Pairs, recipe: Recipe, checkpoint: Path, folder: Path) -> TrainedBackbone:
    """The backbone after training on 16 pairs from a head of ones."""
    return train_backbone(
        backbone,
        pairs(16, seed=0),
        held_out,
        1.0,
        recipe.reward,
        tokenizer=load_tokenizer(checkpoint),
        dtype=recipe.model.dtype,
        seed=recipe.seed,
        checkpoints=folder,
        world=World(0, 1),
        warm_weight=torch.ones(backbone.config.hidden_size),
        reload=lambda: None,
        track=lambda *_: nullcontext(),
    )


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_everything_asked_of_a_lora_backbone(checkpoint: Path, tmp_path: Path, quantize: str | None) -> None:
    if quantize:
        pytest.importorskip("bitsandbytes")
    tokenizer = load_tokenizer(checkpoint)
    backbone = build_reward_backbone(checkpoint, pad_token_id=tokenizer.pad_token_id, four_bit=quantize is not None)
    asked = recipe(
        quantize=quantize, optimizer="adafactor", group_by_length=True, early_stopping={"every": 2, "patience": 1}
    )
    held_out = pairs(6, seed=1)
    result = trained(backbone, held_out, asked, checkpoint, tmp_path)
    stopping = result.early_stopping
    assert stopping is not None
    steps = [entry[0] for entry in stopping["evaluations"]]
    assert steps[:2] == [0, 2]
    assert [step for step, _ in result.history] == list(range(1, steps[-1] + 1))
    # The model that comes back is the kept one, through the plain model's own forward pass.
    model = RewardModel(result.model, reward_bound=4.0)
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([rewards(model, [ids]) for ids in side]) for side in zip(*held_out, strict=True)
        )
    kept = next(entry for entry in stopping["evaluations"] if entry[0] == stopping["kept_step"])
    found = -float(private_likelihood_loss(chosen - rejected, torch.ones(6), 1.0).mean())
    assert found == pytest.approx(kept[1], abs=1e-4)
    assert not hasattr(result.model, "peft_config")


def test_one_held_out_pair_cannot_stop_anything() -> None:
    assert held_out_stopping(pairs(1, seed=0), recipe().reward.early_stopping) is None
    with pytest.raises(UserError, match=r"reward\.early_stopping must have at least 2 held-out pairs"):
        held_out_stopping(pairs(1, seed=0), recipe(early_stopping={}).reward.early_stopping)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_checkpointed_activations_are_computed_twice_and_change_nothing(
    checkpoint: Path, tmp_path: Path, mode: str
) -> None:
    """`reward.trainer_args.gradient_checkpointing`: layers run once more in the backward pass of each step."""
    tokenizer = load_tokenizer(checkpoint)
    found = []
    for asked in ({}, {"gradient_checkpointing": True}):
        backbone = build_reward_backbone(checkpoint, pad_token_id=tokenizer.pad_token_id)
        runs: list[int] = []
        for layer in backbone.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        own = recipe(mode=mode, trainer_args=asked)
        result = trained(backbone, [], own, checkpoint, tmp_path / str(len(found)))
        found.append((result.history, {name: value.clone() for name, value in result.model.state_dict().items()}))
        assert len(runs) == 3 * (2 if asked else 1) * len(backbone.model.layers)
    (plain, weights), (checkpointed, same) = found
    assert plain[0][1] != plain[1][1]
    assert checkpointed == [pytest.approx(row, abs=1e-6) for row in plain]
    for name, value in weights.items():
        torch.testing.assert_close(same[name], value, atol=1e-6, rtol=1e-5)
