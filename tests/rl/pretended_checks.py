"""What `test_pretended_gpu.py` starts in a process of its own: devices, waits and memory of a GPU that is not there."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pretended_ppo
import pytest
import torch
from datasets import Dataset
from gpu.throughput import Ours, Task, model_config
from private_rlhf.commands.memory import GIB, PROCESS, Machine, estimate
from private_rlhf.core.world import World
from private_rlhf.lm import generate, hf_trainer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import add_lora, load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig, Recipe, SftConfig
from private_rlhf.recipe.load import load_recipe
from private_rlhf.rl.ppo_trainer import PpoTrainer
from support.pipeline_runs import ROOT
from support.pipeline_runs import TINY as TINY_RECIPE
from support.pretended_gpu import GPU, PretendedGpu, pretended_gpu
from transformers import AutoModelForCausalLM
from trl import SFTConfig

with (ROOT / "docs" / "results" / "data" / "gpu-throughput.csv").open(encoding="utf-8") as lines:
    MEASURED = [row for row in csv.DictReader(lines) if row["loop"] == "ours LoRA"]
COLUMNS = ("model", "minibatch", "prompt_tokens", "response_tokens")
TINY = Task(
    model_config("llama", "tiny"), GPU, argparse.Namespace(rollouts=4, minibatch=2, epochs=1, prompt=24, response=48)
)


def sampled(trainer: PpoTrainer, gpu: PretendedGpu, tokens: int) -> Counter[str]:
    """Waits of sampling as many tokens in each of four responses."""
    gpu.waits.clear()
    prompts, keys = [[5, 6, 7, 8]] * 4, [1, 2, 3, 4]
    rows, _ = trainer.engine.sample(trainer.bare, prompts, keys, Sampling(tokens))
    assert [len(row) for row in rows] == [tokens] * 4
    return gpu.waits.copy()


def test_numbers_are_made_up_and_shapes_are_not() -> None:
    with pretended_gpu() as (gpu, operations):
        square = torch.ones(256, 256, device=GPU)
        assert (gpu.live, gpu.peak) == (256 * 1024, 256 * 1024)
        product = square @ square
        assert operations.get_total_flops() == 2 * 256**3
        assert float(product.sum()) == 0.0
        assert product.isfinite().all()
        assert torch.arange(3).to(GPU).tolist() == [0, 1, 2]
        assert gpu.waits.total() == 3
        del product
        assert (gpu.live, gpu.peak > 2 * 256 * 1024) == (256 * 1024, True)


def test_an_operation_on_two_devices_fails() -> None:
    with pretended_gpu(), pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=GPU) + torch.ones(2)


def test_an_iteration_of_ppo_stays_on_its_device_and_seldom_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling waits once for the tokens, and at every 16th for whether responses have ended."""
    with pretended_gpu() as (gpu, _):
        trainer = Ours(TINY).trainer
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        assert {each.dtype for each in trainer.model.parameters() if each.requires_grad} == {torch.float32}
        _, entry = trainer.improve(0)
        assert entry["rollouts"] == 4
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in states} == {torch.float32}
        assert sampled(trainer, gpu, 16) == {"lm.generate._decode": 1}
        assert sampled(trainer, gpu, 48) == {"lm.generate._decode": 3}

        plain = generate.draw

        def waiting(logits: torch.Tensor, *given: Any) -> torch.Tensor:
            assert float(logits.sum()) == 0.0
            return plain(logits, *given)

        monkeypatch.setattr(generate, "draw", waiting)
        assert sampled(trainer, gpu, 48).total() == 3 + 48
        monkeypatch.setattr(generate, "draw", lambda logits, uniform, given: plain(logits, uniform.cpu(), given))
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            sampled(trainer, gpu, 2)


@pytest.mark.parametrize(
    ("model", "minibatch", "prompt", "response"), [("1b", 16, 256, 128), ("8b", 8, 256, 128), ("8b", 2, 1700, 300)]
)
def test_the_peak_is_what_a_gpu_measured_and_the_plan_says(
    tmp_path: Path, model: str, minibatch: int, prompt: int, response: int
) -> None:
    """PPO on an H200 (docs/results/gpu.md), within a thirtieth; long texts were not measured there."""
    peaks = pretended_ppo.peaks("llama", model, minibatch, prompt, response)
    assert peaks.scoring < peaks.learning
    for row in MEASURED:
        if [row[name] for name in COLUMNS] == [model, str(minibatch), str(prompt), str(response)]:
            assert peaks.learning == pytest.approx(float(row["peak_gib"]), rel=1 / 30)
    model_config("llama", model).to_json_file(tmp_path / "config.json", use_diff=False)
    sizes = dict.fromkeys(("ppo.rollouts", "ppo.generate_batch_size", "ppo.minibatch_size"), minibatch)
    sizes |= {"model.max_prompt_tokens": prompt, "model.max_response_tokens": response}
    sizes["model.max_text_tokens"] = prompt + response
    others = ["model.dtype=bfloat16", "reward.num_layers=null", "ppo.lora={}"]
    recipe = load_recipe(Recipe, TINY_RECIPE, [*others, *(f"{key}={value}" for key, value in sizes.items())])
    terms = estimate(recipe, Machine("cuda", 80 * GIB, 1), tmp_path / "config.json").peaks["ppo"]
    assert 0.99 < (sum(terms.values()) - PROCESS) / GIB / peaks.learning < 1.03


def test_steps_of_sft(tmp_path: Path) -> None:
    """Neither batches nor the loss leave the GPU, but for the ids that are read back to lay out rows."""
    settings = SftConfig(batch_size=2, max_steps=2, lora=LoraSettings())
    tokenizer = load_tokenizer(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    rows = [{"input_ids": [7 + i] * 24, "labels": [-100] * 8 + [7 + i] * 16} for i in range(4)]
    with pretended_gpu() as (gpu, _):
        config = hf_trainer.trainer_config("sft", settings, SFTConfig, tmp_path, 0, World(0, 1), max_length=None,
                                           dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
        config.save_strategy = "no"  # type: ignore[assignment]
        policy = add_lora(TINY.make(AutoModelForCausalLM), LoraSettings(), 0)
        data = Dataset.from_list(rows)
        trainer = hf_trainer.RowSftTrainer(policy, config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        assert gpu.waits["lm.hf_trainer.compute_loss"] == 2 * 3
        assert gpu.waits.total() < 20
