"""One of two processes that learn by PPO and by GVPO, each on a pretended GPU: says what it waited for and shared.

Usage: pretended_pair FOLDER RANK

Objects go from host to host by gloo; of what is on a GPU the backend sends nothing, as it has no numbers. The reducer
of DistributedDataParallel is C++ that cannot take fake tensors: another, which reduces every gradient as it comes,
stands in for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from gpu.throughput import Ours
from private_rlhf.recipe import GvpoConfig
from private_rlhf.rl.answer_learner import AnswerLearner, held_out_gains
from private_rlhf.rl.replay import Answers
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from support.pretended_gpu import GPU, PretendedGpu, pretended_gpu
from support.pretended_tasks import task_of
from support.two_processes import gloo_pair

gather_objects = dist.all_gather_object


class Wrapped(nn.parallel.DistributedDataParallel):
    """A model whose gradients are summed over the processes, but within `no_sync`."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = module, True
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _reduce(self, parameter: torch.Tensor) -> None:
        if self.require_backward_grad_sync:
            dist.all_reduce(parameter.grad)


def on_hosts(*args: Any, **kwargs: Any) -> None:
    """`all_gather_object`, whose bytes are real."""
    with _disable_current_modes():
        gather_objects(*args, **kwargs)


@contextmanager
def gpus() -> Iterator[PretendedGpu]:
    """Within, each of the processes has a GPU."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", Wrapped))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", on_hosts))
        gpu, _ = stack.enter_context(pretended_gpu())
        PartialState(cpu=True).device = GPU  # accelerate joins what it takes for CPUs
        yield gpu


def counts(gpu: PretendedGpu) -> dict[str, Any]:
    """Waits, sends and talks since the last call."""
    found = {name: dict(getattr(gpu, name)) for name in ("waits", "sends", "talks")}
    for counter in (gpu.waits, gpu.sends, gpu.talks):
        counter.clear()
    return found


def learn(prompts: int, answers: int) -> dict[str, Any]:
    """Return what an iteration of PPO, and one step and one estimate of GVPO, took."""
    with gpus() as gpu:
        trainer = Ours(task_of(prompts, 16, minibatch=prompts)).trainer
        assert isinstance(trainer.model, Wrapped)
        counts(gpu)
        rollout, entry = trainer.improve(0)
        assert entry["rollouts"] == prompts
        found = {"ppo": counts(gpu)}
        settings = GvpoConfig(samples_per_prompt=answers, batch_size=prompts * answers, max_age=0)
        learner = AnswerLearner(trainer, settings, 1.0)
        keys = list(range(prompts * answers))
        rollout, _ = trainer.draw([prompt for prompt in trainer.prompts for _ in range(answers)], keys)
        drawn = Answers.of(rollout, 0)
        steps = learner.steps(drawn, 0)
        counts(gpu)
        learner.step(drawn, steps[0], 1, 0.0)
        found["step"] = counts(gpu)
        held_out_gains(trainer, trainer.prompts[:2], answers, 1.0, [0.0, 0.0])
        found["held out"] = counts(gpu)
        assert {each.device for each in trainer.model.parameters()} == {GPU}
        return found | {"trained": sum(each.requires_grad for each in trainer.model.parameters())}


def main(folder: Path, rank: int) -> None:
    """Learn from few and from more answers."""
    dist.Backend.register_backend("pretended", lambda common, options: FakeProcessGroup._create_internal(
        common.group_rank, common.group_size, options), extended_api=True, devices=["gpu"])  # fmt: skip
    with gloo_pair(folder, rank, backend="cpu:gloo,gpu:pretended", ACCELERATE_USE_CPU="false"):
        found = {"few": learn(2, 2), "more": learn(4, 4)}
        (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
