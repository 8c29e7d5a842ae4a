"""PPO on a 4-bit base, and with other optimisers than AdamW: it learns, π_ref is its own base, and it resumes exactly.

What needs bitsandbytes is skipped where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.lm.models import is_four_bit, load_causal_lm
from private_rlhf.rl import resume_state
from private_rlhf.rl.ppo_trainer import PpoTrainer

Snapshot = Callable[[PpoTrainer], dict[str, torch.Tensor]]
SETTINGS = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 2, "learning_rate": 1e-2, "kl_target": 0.1}
KL_COEF = 0.3
WIDE = 64
"""Rank of adapters of 64 · 64 = 4096 numbers, from which on moments are kept in eight bits."""


@pytest.fixture
def four_bit(problem: Any, tmp_path: Path) -> Any:
    """The problem with π_ref in 4 bits."""
    pytest.importorskip("bitsandbytes")
    problem.model.save_pretrained(tmp_path / "base")
    problem.model = load_causal_lm(tmp_path / "base", "float32", four_bit=True)
    return problem


def train(trainer: PpoTrainer, first: int, last: int) -> list[dict[str, float]]:
    return [trainer.update(trainer.collect(iteration)[0], iteration) for iteration in range(first, last)]


def frozen(trainer: PpoTrainer) -> dict[str, torch.Tensor]:
    named = trainer.policy.named_parameters()
    return {name: value.detach().clone() for name, value in named if not value.requires_grad}


def test_a_four_bit_policy_starts_at_its_reference_and_learns(four_bit: Any, trainable: Snapshot) -> None:
    trainer = four_bit.trainer(
        rollouts=64, minibatch_size=32, ppo_epochs=2, learning_rate=1e-2, value_learning_rate=1e-2, kl_coef=KL_COEF
    )
    assert is_four_bit(trainer.policy.get_base_model())
    before, base = trainable(trainer), frozen(trainer)
    assert {value.dtype for value in before.values()} == {torch.float32}
    packed = {name for name, value in base.items() if value.dtype == torch.uint8}
    assert len(packed) == 2 * 7  # every linear layer of two blocks; the output layer is the embedding's

    rollout, _ = trainer.collect(0)
    assert float(rollout.kl.abs().max()) == 0.0
    assert torch.equal(rollout.logprobs, rollout.reference_logprobs)
    trainer.update(rollout, 0)
    after = trainable(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)

    train(trainer, 1, 6)
    assert four_bit.gain(trainer.policy, KL_COEF) > 0.2  # of what the Gibbs policy gains on the 4-bit π_ref
    assert all(torch.equal(base[name], value) for name, value in frozen(trainer).items())


def test_the_first_step_has_no_ratio_but_one(four_bit: Any) -> None:
    """With a gradient the 4-bit layers take another kernel than without: both must be the same policy."""
    trainer = four_bit.trainer(**{**SETTINGS, "ppo_epochs": 1, "minibatch_size": 8})
    rollout, _ = trainer.collect(0)
    batch = trainer.reader.batch(rollout.prompts, rollout.responses)
    logprobs, _, _ = trainer.model(batch)
    assert logprobs.requires_grad
    difference = (logprobs.detach() - rollout.logprobs[:, : logprobs.shape[1]])[batch.response_mask.bool()]
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor", "sgd"])
@pytest.mark.parametrize("base", ["float32", "4bit"])
def test_resumed_is_never_killed_bit_for_bit(
    request: pytest.FixtureRequest, base: str, optimizer: str, trainable: Snapshot, tmp_path: Path
) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    problem = request.getfixturevalue("four_bit" if base == "4bit" else "problem")
    settings = {**SETTINGS, "optimizer": optimizer, "rank": WIDE}
    whole = problem.trainer(**settings)
    resume_state.install_hooks(whole.accelerator)
    start = trainable(whole)
    history: list[Any] = train(whole, 0, 2)
    assert all(not torch.equal(start[name], value) for name, value in trainable(whole).items())
    folder = tmp_path / "checkpoints"
    resume_state.save(whole.accelerator, folder, 2, {"history": history, "kl_coef": whole.controller.value})
    history += train(whole, 2, 4)

    resumed = problem.trainer(**settings)
    resume_state.install_hooks(resumed.accelerator)
    state = resume_state.load_latest(resumed.accelerator, folder)
    assert state is not None
    resumed.controller.value = state["kl_coef"]
    assert state["history"] + train(resumed, 2, 4) == history  # every loss to the last bit
    for name, tensor in trainable(resumed).items():
        assert torch.equal(tensor, trainable(whole)[name]), name
    ours, theirs = (dict(leaves(each.optimizer.state_dict()["state"])) for each in (resumed, whole))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == ours[path].dtype, path
            assert torch.equal(value, ours[path]), path
        else:
            assert value == ours[path], path
    eight_bit = any(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in theirs.values())
    assert eight_bit == (optimizer == "adamw_8bit")


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf of nested dicts by its path."""
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}/{key}")]


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adafactor", "sgd"])
def test_another_optimiser_learns_with_both_rates(problem: Any, optimizer: str, trainable: Snapshot) -> None:
    """The value head learns at its own rate, and alone while the policy warms up."""
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    trainer = problem.trainer(
        **SETTINGS, optimizer=optimizer, rank=WIDE, value_learning_rate=3e-2, lr_schedule="linear"
    )
    trainer.update(trainer.collect(0)[0], 0)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-2, 3e-2]
    trainer.update(trainer.collect(250)[0], 250)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [5e-3, 1.5e-2]
