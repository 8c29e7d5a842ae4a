"""Checks of devices, waits and memory on a GPU that is not there; `test_pretended_gpu.py` gives them a process."""

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
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.core.world import World
from private_rlhf.lm import generate, hf_trainer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import add_lora, load_tokenizer
from private_rlhf.recipe import DpoConfig, LoraSettings, ModelConfig, Recipe, RewardConfig, SftConfig
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.trainer import PrivateRewardTrainer
from private_rlhf.reward_models.training import as_dataset, trainable
from private_rlhf.rl.dpo_trainer import PrivateDpoTrainer, pair_dataset
from private_rlhf.rl.ppo_trainer import PpoTrainer
from support.pipeline_runs import ROOT
from support.pipeline_runs import TINY as TINY_RECIPE
from support.pretended_gpu import GPU, PretendedGpu, pretended_gpu
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, SFTConfig
from trl import RewardConfig as TrlRewardConfig

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
        assert (gpu.waits.total(), gpu.sends.total()) == (3, 1)
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


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_steps_of_a_trainer_of_trl(tmp_path: Path, stage: str) -> None:
    """All that learns is on the GPU, in float32. Labels of two levels; a step waits a few times, not for each text."""
    tokenizer = load_tokenizer(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    prompt, answers = [7] * 8, [[8 + number] * 16 for number in range(16)]
    noise = LevelledNoise.of([1.0, 2.0], [1.0, 2.0] * 8)

    def config(settings: Any, schema: Any, **fixed: Any) -> Any:
        made = hf_trainer.trainer_config(stage, settings, schema, tmp_path, 0, World(0, 1), max_length=None, **fixed)
        made.save_strategy = "no"
        return made

    with pretended_gpu() as (gpu, _):
        common: dict[str, Any] = {"processing_class": tokenizer}
        policy = add_lora(TINY.make(AutoModelForCausalLM), LoraSettings(), 0)
        trainer: Any
        if stage == "sft":
            rows = [{"input_ids": prompt + each, "labels": [-100] * 8 + each} for each in answers]
            arguments = config(SftConfig(batch_size=8, max_steps=2), SFTConfig,
                               dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
            trainer = hf_trainer.RowSftTrainer(policy, arguments, train_dataset=Dataset.from_list(rows), **common)
        elif stage == "dpo":
            data = pair_dataset([(prompt, each, [6] * 16) for each in answers], noise)
            arguments = config(DpoConfig(batch_size=8, max_steps=2), DPOConfig, beta=0.1)
            trainer = PrivateDpoTrainer(model=policy, ref_model=None, args=arguments, loss="private_likelihood",
                                        noise=noise, train_dataset=data, **common)  # fmt: skip
        else:
            settings = RewardConfig(mode="lora", batch_size=8, max_steps=2)
            model = TINY.make(AutoModelForSequenceClassification)
            model.score.float()
            model.config.pad_token_id = tokenizer.pad_token_id
            data = as_dataset([(prompt + each, [*prompt, 6]) for each in answers], noise)
            arguments = config(settings, TrlRewardConfig, remove_unused_columns=False)
            trainer = PrivateRewardTrainer(trainable(model, settings, 0), arguments, noise=noise, train_dataset=data,
                                           **common)  # fmt: skip
        trainer.train()
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        assert {each.dtype for each in trainer.model.parameters() if each.requires_grad} == {torch.float32}
        assert 0 < gpu.waits.total() < 2 * 16
