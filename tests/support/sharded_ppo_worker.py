"""One of two processes that learn by PPO with weights split by FSDP2: says what came out, saves it, and resumes.

Usage: sharded_ppo_worker FOLDER RANK
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from private_rlhf.core.world import World
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.lm.distributed import is_sharded, make_accelerator
from private_rlhf.lm.saving import save_merged
from private_rlhf.reward_models.checkpoint import RewardCheckpoint
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.rl import resume_state
from private_rlhf.rl.nonfinite import NonFiniteError
from private_rlhf.rl.ppo_trainer import PpoTrainer
from torch.distributed.tensor import DTensor
from transformers import LlamaForSequenceClassification

from support.ppo_problem import EOS, PAD, VOCABULARY, Problem, StubRenderer, make_problem
from support.two_processes import FSDP, gloo_pair

# One process has two responses of each minibatch in two micro-batches, the other has one.
SETTINGS = {
    "rollouts": 6,
    "minibatch_size": 3,
    "micro_batch_size": 1,
    "ppo_epochs": 2,
    "learning_rate": 1e-2,
    "value_learning_rate": 1e-2,
    "entropy_coef": 0.01,
    "kl_coef": 0.05,
}
NARROW = {**SETTINGS, "minibatch_size": 1, "micro_batch_size": None}
ITERATIONS = 3


def learn(trainer: PpoTrainer, first: int, last: int) -> list[dict[str, float]]:
    """Iterations `first`, …, `last` − 1: their losses, and the log-probabilities that π_ref gave the responses."""
    seen = []
    for iteration in range(first, last):
        rollout, _ = trainer.collect(iteration)
        reference = float(rollout.reference_logprobs.sum())
        seen.append({**trainer.update(rollout, iteration), "reference": reference, "kl": float(rollout.kl.sum())})
    return seen


def with_references(problem: Problem) -> Problem:
    """So that completions of π_ref are drawn before the policy runs for the first time."""
    problem.references = {}
    return problem


@contextlib.contextmanager
def gathers() -> Iterator[list[int]]:
    """Within, the list grows by the bytes of each all-gather of this process."""
    seen: list[int] = []
    original = torch.distributed.all_gather_single

    def counted(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(output.nbytes)
        return original(output, *arguments, **named)

    torch.distributed.all_gather_single = counted
    try:
        yield seen
    finally:
        torch.distributed.all_gather_single = original


def collected(trainer: PpoTrainer) -> dict[str, Any]:
    """How often a part of the weights was gathered for a rollout, what was sampled in it, and what it leaves whole."""
    with gathers() as seen:
        rollout, _ = trainer.collect(0)
    whole = sum(not isinstance(parameter, DTensor) for parameter in trainer.bare.parameters())
    return {"gathers": len(seen), "responses": rollout.responses, "whole": whole}


def refused(trainer: PpoTrainer) -> dict[str, Any]:
    """What a gradient that is not finite in one process's part of a tensor leads to, on this process."""
    rollout, _ = trainer.collect(0)
    backward = trainer._backward

    def spoiled(*arguments: Any) -> torch.Tensor:
        sums = backward(*arguments)
        gradient: Any = trainer.bare.value_head.weight.grad  # one row, which one process holds
        gradient.to_local().fill_(float("nan"))
        return sums

    trainer._backward = spoiled  # type: ignore[method-assign]
    try:
        trainer.update(rollout, 0)
    except NonFiniteError as error:
        return {"message": str(error), "tensor": error.facts["tensor"], "rows": len(error.rows)}
    return {}


def work(folder: Path, rank: int, lora: bool) -> dict[str, Any]:
    """Learns, with a checkpoint after the first iteration; saves the policy; learns again from the checkpoint on."""
    name = "lora" if lora else "full"
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda target: None, eos_token_id=1)

    def make(**more: Any) -> PpoTrainer:
        problem = with_references(make_problem())
        trainer = problem.trainer(lora, accelerator=lambda: make_accelerator(World(rank, 2)), **SETTINGS, **more)
        resume_state.install_hooks(trainer.accelerator)
        return trainer

    trainer = make()
    said: dict[str, Any] = {"split": sum(isinstance(each, DTensor) for each in trainer.bare.parameters())}
    resume_state.save(trainer.accelerator, folder / f"{name}-first", 0, {})
    said["steps_before"] = [len(trainer.optimizer.state)]
    said["seen"] = learn(trainer, 0, 1)
    resume_state.save(trainer.accelerator, folder / name, 1, {}, trainer.scorer.references)
    said["seen"] += learn(trainer, 1, ITERATIONS)
    target = folder / f"{name}-model"
    save_merged(trainer.accelerator, trainer.policy, tokenizer, target, "float32", read=trainer.bare.read)
    ends = [trainer.accelerator.get_state_dict(trainer.model)]
    resumed = make()
    resume_state.load_latest(resumed.accelerator, folder / f"{name}-first")
    said["steps_before"].append(len(resumed.optimizer.state))
    resumed.scorer.references.update(resume_state.latest_references(folder / name))
    resume_state.load_latest(resumed.accelerator, folder / name)
    said["resumed"] = learn(resumed, 1, ITERATIONS)
    ends.append(resumed.accelerator.get_state_dict(resumed.model))
    if rank == 0:
        torch.save([{key: tensor.clone() for key, tensor in end.items()} for end in ends], folder / f"{name}.pt")
    said["refused"] = refused(make())
    said["reference_split"] = trainer.reader.reference is not None and is_sharded(trainer.reader.reference)
    said["once"], said["each_time"] = (collected(make(gather_once=once)) for once in (True, False))
    return said


def narrow(folder: Path, rank: int) -> dict[str, Any]:
    """Whole weights (DDP), minibatches of fewer responses than processes; a checkpoint after the first iteration."""
    problem = with_references(make_problem())
    trainer = problem.trainer(accelerator=lambda: make_accelerator(World(rank, 2)), **NARROW)
    resume_state.install_hooks(trainer.accelerator)
    drawn: list[str] = []
    add = problem.add_reference
    problem.add_reference = lambda prompt, features: (drawn.append(prompt), add(prompt, features))  # type: ignore
    seen = learn(trainer, 0, 1)
    resume_state.save(trainer.accelerator, folder / "narrow", 1, {}, trainer.scorer.references)
    references = {prompt: kept.flatten().tolist() for prompt, kept in trainer.scorer.references.items()}
    return {"seen": seen + learn(trainer, 1, ITERATIONS), "references": references, "drawn": drawn}


class Words(StubRenderer):
    """Responses are token ids as well."""

    def response_ids(self, response: str) -> list[int]:
        return [*self.prompt_ids(response), EOS]


def scored(rank: int) -> dict[str, Any]:
    """What a reward model split over the processes makes of five texts of one process and none of the other, of one
    and three; beside what it made of them before it was split.
    """
    torch.manual_seed(0)
    config = tiny_config(VOCABULARY, EOS, PAD)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config).eval().requires_grad_(False)
    set_score_weight(model, torch.randn(config.hidden_size))
    renderer: Any = Words()
    scorer = RewardScorer(RewardCheckpoint(RewardModel(model, reward_bound=8.0), None, None), renderer, 2, False)
    texts = [("3 4", "5"), ("3 4", "6 7"), ("5 6 7 2", "3"), ("2", "4 4"), ("7 7", "2")]
    shares = [texts if rank == 0 else [], texts[:1] if rank == 0 else texts[1:4]]

    def scores() -> list[list[float]]:
        return [scorer.score([p for p, _ in share], [r for _, r in share]).reward.tolist() for share in shares if share]

    alone = scores()
    scorer.place(make_accelerator(World(rank, 2)))
    if rank == 0:
        found = scores()
    else:
        empty = scorer.features([], [])
        found = scores()
        assert empty.shape == (0, config.hidden_size)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    whole = sum(not isinstance(parameter, DTensor) for parameter in model.parameters())
    return {"alone": alone, "split": found, "share": held / sum(p.numel() for p in model.parameters()), "whole": whole}


def main(folder: Path, rank: int) -> None:
    with gloo_pair(folder, rank, **FSDP):
        said = {name: work(folder, rank, name == "lora") for name in ("lora", "full")}
        said["scored"] = scored(rank)
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        said["narrow"] = narrow(folder, rank)
        (folder / f"ppo-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
