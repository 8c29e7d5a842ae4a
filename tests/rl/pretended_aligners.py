"""Checks of GVPO, RLOO, GRPO and evaluation on a GPU that is not there; `test_pretended_gpu.py` gives them a process.

What the host waits for and sends is counted for small and large batches: neither may grow with answers or tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.throughput import NumberRenderer, Ours, Task
from private_rlhf.core.world import World
from private_rlhf.evaluation.evaluation_sampler import Sampler
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.drawing import TransformersEngine
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.lm.models import add_lora, load_tokenizer
from private_rlhf.recipe import GroupConfig, GvpoConfig, LoraSettings, ModelConfig, PpoConfig
from private_rlhf.reward_models.basis import identity_basis
from private_rlhf.reward_models.uncertainty import FisherBonus
from private_rlhf.rl.answer_learner import AnswerLearner, held_out_gains
from private_rlhf.rl.group import TRAINERS, prompt_dataset, trl_arguments
from private_rlhf.rl.group import Task as GroupTask
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.replay import Answers
from support.pretended_gpu import GPU, PretendedGpu, pretended_gpu
from support.pretended_tasks import task_of
from transformers import AutoModelForCausalLM

PLAIN = LoraSettings()
TOP_LAYER = LoraSettings(last_layers=1, target_modules=["q_proj", "up_proj"])
"""The states that enter it are kept from the first reading of an answer (`lm.logprobs.frozen_layers`)."""


def trainer_of(task: Task, lora: LoraSettings = PLAIN, **settings: Any) -> PpoTrainer:
    """A trainer whose scorer has Γ and baseline, with statistics on the CPU as every checkpoint's are."""
    trainer = Ours(task, lora).trainer
    trainer.config = replace(trainer.config, **settings)
    scorer: Any = trainer.scorer
    size = scorer.checkpoint.model.weight.numel()
    bonus = FisherBonus(torch.zeros(size).double(), identity_basis(size), torch.eye(size).double(), None)
    scorer.checkpoint = replace(scorer.checkpoint, bonus=bonus)
    scorer.use_bonus = scorer.use_baseline = True
    return trainer


def taken(gpu: PretendedGpu) -> tuple[Counter[str], int]:
    """Waits by place and sends in all since the last call."""
    found = gpu.waits.copy(), gpu.sends.total()
    gpu.waits.clear()
    gpu.sends.clear()
    return found


def states_of(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {value.dtype for state in optimizer.state.values() for value in state.values()}


def regressed(prompts: int, answers: int, response: int, lora: LoraSettings) -> dict[str, tuple[Counter[str], int]]:
    """Draws, one round of two passes and the estimate on held-out prompts: what each waited for and sent.

    A step is of all `prompts` groups of `answers`, and draws are read in as many forward passes, whatever the sizes.
    """
    with pretended_gpu() as (gpu, _):
        count = prompts * answers
        trainer = trainer_of(task_of(prompts, response), lora, reference_samples=answers, reference_rollouts=False,
                             rollouts=count, minibatch_size=count)  # fmt: skip
        sizes = {"samples_per_prompt": answers, "batch_size": count, "passes": 2}
        learner = AnswerLearner(trainer, GvpoConfig(max_age=0, huber_delta=1.0, **sizes), 1.0)
        taken(gpu)
        found = {}
        rollout, _ = trainer.draw_references(trainer.prompts)
        found["draws"] = taken(gpu)
        answers_ = Answers.of(rollout, 0)
        assert {getattr(answers_, name).device.type for name in ("score", "logprob", "iteration")} == {"cpu"}
        taken(gpu)
        steps = learner.steps(answers_, 0)
        found["states"] = taken(gpu)
        assert [sum(map(len, groups)) for groups in steps] == [count, count]
        for number, groups in enumerate(steps):
            assert learner.step(answers_, groups, 1, number / 2)["policy_loss"] == 0.0
            found[f"step {number}"] = taken(gpu)
        held_out_gains(trainer, trainer.prompts[:2], answers, 1.0, [0.0, 0.0])
        found["held out"] = taken(gpu)
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        assert states_of(trainer.optimizer) == {torch.float32}
        return found


@pytest.mark.parametrize("lora", [PLAIN, TOP_LAYER], ids=["all layers", "top layer"])
def test_a_round_of_gvpo_waits_as_often_for_many_answers(lora: LoraSettings) -> None:
    small, large = regressed(2, 2, 16, lora), regressed(4, 4, 16, lora)
    assert small == large
    assert small["step 0"] == small["step 1"]
    assert set(small["step 0"][0]) == {"rl.answer_learner.step", "lm.distributed.as_number"}
    assert small["draws"][0]["lm.generate._decode"] == 1
    assert small["draws"][0]["reward_models.scorer._weight"] == 1
    longer = regressed(2, 2, 48, lora)
    for waits in (longer["draws"][0], longer["held out"][0]):
        assert waits.pop("lm.generate._decode") == 3  # at every 16th token
    for each in small.values():
        each[0].pop("lm.generate._decode", None)
    assert longer == small


def aligned(aligner: str, prompts: int, samples: int, folder: Path) -> list[tuple[Counter[str], int]]:
    """References and one iteration of one step by TRL's trainer: what they waited for and sent."""
    tokenizer = load_tokenizer(base_checkpoint(ModelConfig(source="tiny", cache_dir=folder / "cache")))
    with pretended_gpu() as (gpu, _):
        task, count = task_of(prompts, 16), prompts * samples
        scorer: Any = trainer_of(task).scorer
        scorer.renderer = renderer = NumberRenderer(16, tokenizer=tokenizer)
        sizes = {"rollouts": count, "batch_size": count, "samples_per_prompt": samples}
        settings = GroupConfig(iterations=1, trainer_args={"disable_tqdm": True}, **sizes)
        kind, schema = TRAINERS[aligner]
        fixed = trl_arguments(aligner, settings, PpoConfig(), 16)
        arguments = hf_trainer.trainer_config(aligner, settings, schema, folder, 0, World(0, 1), **fixed)
        arguments.save_strategy = "no"
        texts: Any = task.settings["prompts"]
        trainer = kind(
            model=add_lora(task.make(AutoModelForCausalLM), PLAIN, 0),
            args=arguments,
            train_dataset=prompt_dataset(prompts, settings, 0),
            processing_class=tokenizer,
            task=GroupTask(scorer, renderer, texts, Sampling(16), 128, 4, 0.0, 0, has_truth=False),
        )
        taken(gpu)
        trainer.draw_references()
        found = [taken(gpu)]
        trainer.train()
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        assert {each.dtype for each in trainer.model.parameters() if each.requires_grad} == {torch.float32}
        assert trainer.state.log_history[0]["pessimistic/finished"] == 1.0
        return [*found, taken(gpu)]


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_an_iteration_of_trl_waits_as_often_for_many_answers(aligner: str, tmp_path: Path) -> None:
    """TRL itself waits "elsewhere": it reads every number that it logs."""
    small, large = (aligned(aligner, *sizes, tmp_path) for sizes in ((2, 2), (4, 4)))
    assert small == large
    references, iteration = (waits for waits, _ in small)
    once = {"lm.generate._decode": 1, "lm.features.extract_features": 1}
    assert references == {**once, "reward_models.scorer._weight": 1}
    assert iteration == {**once, "elsewhere": iteration["elsewhere"]}


def evaluated(prompts: int, answers: int, response: int) -> list[tuple[Counter[str], int]]:
    """Answers of both policies with their scores and KL, then log-likelihoods of pairs: waits and sends."""
    with pretended_gpu() as (gpu, _):
        task = task_of(prompts, response)
        trainer = trainer_of(task)
        policy, reference = (task.make(AutoModelForCausalLM) for _ in range(2))
        renderer: Any = trainer.renderer
        scorer: Any = trainer.scorer
        engine = TransformersEngine(trainer.accelerator, renderer.tokenizer, 128)
        more = (renderer, scorer, lambda *_: 0.0, trainer.sampling, 0, engine)
        sampler = Sampler(trainer.accelerator, policy, reference, *more)
        taken(gpu)
        results = sampler.measure(list(enumerate(trainer.prompts)), answers, 2 * answers)
        assert [len(result.candidates) for result in results] == [2 * answers] * prompts
        found = [taken(gpu)]
        rows = [(renderer.prompt_ids(prompt), [7] * response) for prompt in task.settings["prompts"]]
        mean_logprobs(policy, rows, pad_token_id=0, batch_size=32, device=GPU)
        return [*found, taken(gpu)]


def test_an_evaluation_waits_as_often_for_many_answers() -> None:
    """Three draws, their features, r̂'s weight, and KL; a long answer is asked at every 16th token if it has ended."""
    small, large, longer = evaluated(2, 1, 16), evaluated(4, 4, 16), evaluated(2, 1, 48)
    assert small == large
    waits = {"lm.features.extract_features": 3, "reward_models.scorer._weight": 1}
    waits |= {"evaluation.evaluation_sampler._kl": 1}
    assert small[0][0] == {**waits, "lm.generate._decode": 3}
    assert longer[0] == ({**waits, "lm.generate._decode": 9}, small[0][1])
    assert small[1][0] == longer[1][0] == {"lm.logprobs.mean_logprobs": 1}
