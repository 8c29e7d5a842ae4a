"""Under the autocast of the launch files π, π_ref and the sampler compute alike: the KL is 0 before learning."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from private_rlhf.evaluation.evaluation_sampler import Sampler
from private_rlhf.lm import generate
from private_rlhf.lm.drawing import TransformersEngine
from private_rlhf.lm.generate import Sampling
from private_rlhf.recipe import LoraSettings
from private_rlhf.reward_models.scorer import Scores
from private_rlhf.rl.ppo_trainer import PpoTrainer
from support.ppo_problem import Problem
from support.two_processes import run_two

SETTINGS = {"rollouts": 16, "minibatch_size": 8, "ppo_epochs": 1, "learning_rate": 1e-2, "value_learning_rate": 1e-2}
TOP = LoraSettings(rank=4, last_layers=1, target_modules=["q_proj", "down_proj"])
ADAPTERS = {"lora": True, "the last layer": TOP, "full": False}
BF16 = (True, torch.bfloat16)
Seen = dict[str, set[tuple[bool, torch.dtype]]]


def autocast() -> Accelerator:
    """As every shipped launch file for GPUs asks for it, on the CPU."""
    return Accelerator(cpu=True, mixed_precision="bf16")


def watch(seen: Seen, name: str, module: torch.nn.Module) -> None:
    """Notes of each call of `module` whether it is made under autocast, and the dtype of what comes out."""

    def note(_: Any, __: Any, output: torch.Tensor) -> None:
        seen.setdefault(name, set()).add((torch.is_autocast_enabled("cpu"), output.dtype))

    module.register_forward_hook(note)


def watched(trainer: PpoTrainer) -> Seen:
    seen: Seen = {}
    watch(seen, "policy", trainer.bare.get_base_model().get_output_embeddings())
    watch(seen, "value", trainer.bare.value_head)
    if trainer.reader.reference is not None:
        watch(seen, "reference", trainer.reader.reference.get_output_embeddings())
    return seen


def with_scores_watched(problem: Problem) -> Seen:
    """Completions of π_ref are drawn too; notes where rewards are computed."""
    problem.references, seen = {}, {}
    features = problem.features

    def watched_features(prompts: Any, responses: Any) -> torch.Tensor:
        found = features(prompts, responses)
        seen.setdefault("scorer", set()).add((torch.is_autocast_enabled("cpu"), found.dtype))
        return found

    problem.features = watched_features  # type: ignore[method-assign]
    problem.score = lambda prompts, responses: problem.score_features(prompts, problem.features(prompts, responses))
    return seen


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_kl_is_0_at_first_and_everything_computes_in_one_context(problem: Any, name: str) -> None:
    scored = with_scores_watched(problem)
    trainer = problem.trainer(ADAPTERS[name], accelerator=autocast, **SETTINGS)
    seen = watched(trainer)
    rollout, _ = trainer.collect(0)
    assert torch.equal(rollout.logprobs, rollout.reference_logprobs)
    assert not rollout.kl.any()
    trainer.update(rollout, 0)
    later, _ = trainer.collect(1)
    assert later.log_ratio.abs().max() > 1e-3
    expected = {"policy": {BF16}, "value": {(False, torch.float32)}}
    assert seen == (expected if trainer.reader.reference is None else expected | {"reference": {BF16}})
    assert scored == {"scorer": {(False, torch.float32)}}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("precision", "most"), [("no", 1e-5), ("bf16", 0.02)])
def test_what_is_sampled_with_a_cache_is_what_is_read(
    problem: Any, monkeypatch: pytest.MonkeyPatch, lora: bool, precision: str, most: float
) -> None:
    """|log π_sampler − log π_read| of a token: products of other shapes add in another order, and bfloat16 rounds."""
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    draw = generate.draw

    def record(logits: torch.Tensor, uniform: torch.Tensor, sampling: Any) -> torch.Tensor:
        tokens = draw(logits, uniform, sampling)
        drawn.append((torch.log_softmax(logits.float(), dim=-1), tokens))
        return tokens

    monkeypatch.setattr(generate, "draw", record)
    make = lambda: Accelerator(cpu=True, mixed_precision=precision)  # noqa: E731
    trainer = problem.trainer(lora, accelerator=make, **SETTINGS)
    trainer.update(trainer.collect(0)[0], 0)
    drawn.clear()
    rollout, _ = trainer.collect(1)
    (first, tokens), *_ = drawn
    order = sorted(range(len(rollout.prompts)), key=lambda i: (len(rollout.prompts[i]), tuple(rollout.prompts[i])))
    assert tokens.tolist() == [rollout.responses[i][0] for i in order]
    sampled = first[torch.arange(len(tokens)), tokens]
    gap = float((sampled - rollout.logprobs[order, 0]).abs().max())
    print(f"\n{precision}, {'lora' if lora else 'full'}: max |log ratio| of sampler and reader {gap:.2e}")
    assert gap < most


def test_the_evaluation_of_a_policy_that_is_pi_ref_says_0(problem: Any) -> None:
    """In the context of the training; policy and reference are two copies of one model."""
    problem.trainer(accelerator=autocast)  # ends the accelerators of other tests
    policy, reference = copy.deepcopy(problem.model), copy.deepcopy(problem.model)
    problem.use_bonus = False
    seen: Seen = {}
    for name, model in (("policy", policy), ("reference", reference)):
        watch(seen, name, model.get_output_embeddings())

    def score(prompts: list[str], responses: list[str], progress: str | None = None) -> Scores:
        assert not torch.is_autocast_enabled("cpu")
        return Scores(*torch.zeros(3, len(responses)))

    problem.score = score
    engine = TransformersEngine(autocast(), problem.renderer.tokenizer, 8)
    sampler = Sampler(autocast(), policy, reference, problem.renderer, problem, None, Sampling(2), 0, engine)
    results = sampler.measure(list(enumerate(problem.prompts)), samples_per_prompt=8, candidates=2)
    assert [answer.kl for result in results for answer in result.policy] == [0.0] * 16
    assert seen == {"policy": {BF16}, "reference": {BF16}}


@pytest.mark.slow
def test_the_kl_is_0_at_first_on_two_processes(tmp_path: Path) -> None:
    """DDP and FSDP2 on gloo, LoRA and full fine-tuning; the second iteration says that something was learnt."""
    folder = run_two("numeric_context_worker", tmp_path)
    for rank in (0, 1):
        said = json.loads((folder / f"kl-{rank}.json").read_text())
        assert said.keys() == {"ddp lora", "ddp full", "fsdp2 lora", "fsdp2 full"}
        for name, found in said.items():
            assert found["contexts"] == ["policy torch.bfloat16", "value torch.float32"], name
            assert found["first"] == 0.0, name
            assert found["second"] > 1e-3, name
