"""π is π_ref before anything is learnt: in bfloat16 too, and whatever is shared or left out, the KL is exactly 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.machine import make_trainer
from private_rlhf.recipe import LoraSettings

pytestmark = pytest.mark.gpu

EVERY_PRODUCT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "all layers": {"lora": LoraSettings(rank=8, target_modules=EVERY_PRODUCT)},
    "the last layer": {"lora": LoraSettings(rank=8, target_modules=EVERY_PRODUCT, last_layers=1)},
    "several answers to a prompt": {"samples_per_prompt": 4},
    "small micro-batches": {"micro_batch_size": 1},
}


@pytest.mark.parametrize("precision", ["no", "bf16"], ids=["as it is", "autocast"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kl_is_exactly_0(checkpoint_path: Path, device: torch.device, name: str, precision: str) -> None:
    settings = {"learning_rate": 1e-2, **SETTINGS[name]}
    trainer = make_trainer(checkpoint_path, device, "bfloat16", precision, **settings)
    rollout, _ = trainer.collect(0)
    assert rollout.logprobs.device.type == device.type
    assert bool((rollout.logprobs[rollout.mask.bool()] < 0).all())
    assert torch.equal(rollout.logprobs, rollout.reference_logprobs)
    trainer.update(rollout, 0)
    learnt, _ = trainer.collect(1)
    assert not torch.equal(learnt.logprobs, learnt.reference_logprobs)
