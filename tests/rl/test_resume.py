"""Resume state: killed and resumed is never killed, bit for bit; half a checkpoint does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_rlhf.rl import resume_state
from private_rlhf.rl.ppo_trainer import PpoTrainer
from safetensors.torch import load_file

Snapshot = Callable[[PpoTrainer], dict[str, torch.Tensor]]
SETTINGS = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 2, "learning_rate": 1e-2, "kl_target": 0.1}


def train(trainer: PpoTrainer, first: int, last: int) -> list[dict[str, float]]:
    return [trainer.update(trainer.collect(iteration)[0], iteration) for iteration in range(first, last)]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resumed_is_never_killed_bit_for_bit(problem: Any, lora: bool, trainable: Snapshot, tmp_path: Path) -> None:
    whole = problem.trainer(lora, **SETTINGS)
    resume_state.install_hooks(whole.accelerator)
    history: list[Any] = train(whole, 0, 2)
    resume_state.save(whole.accelerator, tmp_path, 2, {"history": history, "kl_coef": whole.controller.value})
    saved = trainable(whole)
    history += train(whole, 2, 4)

    resumed = problem.trainer(lora, **SETTINGS)
    resume_state.install_hooks(resumed.accelerator)
    state = resume_state.load_latest(resumed.accelerator, tmp_path)
    assert state is not None
    for name, tensor in trainable(resumed).items():
        assert torch.equal(tensor, saved[name]), name
    resumed.controller.value = state["kl_coef"]
    assert state["history"] + train(resumed, 2, 4) == history  # every loss to the last bit
    for name, tensor in trainable(resumed).items():
        assert torch.equal(tensor, trainable(whole)[name]), name
    first, second = (t.optimizer.state_dict()["state"] for t in (resumed, whole))
    assert all(torch.equal(first[k][m], second[k][m]) for k in second for m in ("exp_avg", "exp_avg_sq", "step"))


def test_only_trainable_weights_are_kept(problem: Any, trainable: Snapshot, tmp_path: Path) -> None:
    trainer = problem.trainer(**SETTINGS)
    resume_state.install_hooks(trainer.accelerator)
    resume_state.save(trainer.accelerator, tmp_path, 1, {"history": [], "kl_coef": 0.1})
    assert load_file(tmp_path / "step-1" / resume_state.WEIGHTS).keys() == trainable(trainer).keys()
    assert not list((tmp_path / "step-1").glob("model*"))


def test_the_newest_whole_checkpoint_counts_and_older_ones_go(problem: Any, tmp_path: Path) -> None:
    trainer = problem.trainer(**SETTINGS)
    resume_state.install_hooks(trainer.accelerator)
    assert resume_state.load_latest(trainer.accelerator, tmp_path) is None
    assert resume_state.load_latest(trainer.accelerator, tmp_path / "absent") is None
    for step in (9, 10):  # 10 < 9 as text
        resume_state.save(trainer.accelerator, tmp_path, step, {"step": step})
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
    (tmp_path / ".step-11.tmp").mkdir()  # a kill while writing
    assert resume_state.load_latest(trainer.accelerator, tmp_path) == {"step": 10}


def test_a_failure_while_saving_leaves_the_older_checkpoint(
    problem: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = problem.trainer(**SETTINGS)
    resume_state.install_hooks(trainer.accelerator)
    resume_state.save(trainer.accelerator, tmp_path, 1, {"step": 1})

    def full_disk(folder: str) -> None:
        (Path(folder) / "optimizer.bin").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer.accelerator, "save_state", full_disk)
    with pytest.raises(OSError, match="no space"):
        resume_state.save(trainer.accelerator, tmp_path, 2, {"step": 2})
    assert resume_state.load_latest(trainer.accelerator, tmp_path) == {"step": 1}


def hooks_of(model: torch.nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
    """(save, load) as registered on an accelerator that trains `model` in several processes."""
    registered: list[Callable[..., None]] = []
    accelerator: Any = SimpleNamespace(
        unwrap_model=lambda _: model,
        is_main_process=True,
        register_save_state_pre_hook=registered.append,
        register_load_state_pre_hook=registered.append,
    )
    resume_state.install_hooks(accelerator)
    return registered[0], registered[1]


def test_weights_are_kept_under_data_parallelism_too(tmp_path: Path) -> None:
    """accelerate hands the hook the state of the wrapped model, whose names begin with `module.`."""
    model = torch.nn.Linear(2, 2)
    wrapped = torch.nn.Sequential()
    wrapped.add_module("module", model)
    save, load = hooks_of(model)
    save([wrapped], [wrapped.state_dict()], str(tmp_path))
    other = torch.nn.Linear(2, 2)
    assert not torch.equal(other.weight, model.weight)
    load_other = hooks_of(other)[1]
    load_other([wrapped], str(tmp_path))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert load is not load_other


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save, _ = hooks_of(torch.nn.Linear(2, 2, bias=False))
    model = torch.nn.Linear(2, 2, bias=False)
    save([model], [model.state_dict()], str(tmp_path))
    _, load = hooks_of(torch.nn.Linear(2, 2, bias=True))
    with pytest.raises(RuntimeError, match="bias"):
        load([model], str(tmp_path))
