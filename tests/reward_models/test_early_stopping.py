"""Early stopping: the paired rule by hand, the weights it returns, and a run that is killed and resumed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.lm.hf_trainer import train
from private_rlhf.recipe import EarlyStoppingSettings
from private_rlhf.reward_models.losses import private_likelihood_loss
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.trainer import PrivateRewardTrainer
from private_rlhf.reward_models.training import HeldOutRecord, HeldOutStopping
from support.reward_checkpoints import rewards
from support.reward_trainers import make_rows, make_trainer, step_losses
from transformers import TrainerCallback


def test_the_paired_error_is_that_of_the_differences() -> None:
    """Losses that vary by 1 between pairs, and by 0.01 between two steps: the pairing makes a gain of 0.01 visible."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(400, generator=generator)
    new = kept - 0.01 + 0.01 * torch.randn(400, generator=generator)
    record = HeldOutRecord(patience=1, standard_errors=1.0)
    assert record.judge(1, kept, new)
    gain, error = record.evaluations[0].gain, record.evaluations[0].standard_error
    assert gain == pytest.approx(float((kept - new).mean()), rel=1e-5)
    assert error == pytest.approx(float((kept - new).std()) / 20, rel=1e-5)
    assert error < 0.001
    assert gain > 5 * error
    assert float(kept.std()) / 20 > 40 * error


def test_only_a_gain_beyond_the_noise_replaces_the_kept_step() -> None:
    record = HeldOutRecord(patience=2, standard_errors=1.0)
    kept = torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert record.judge(0, None, kept)
    assert not record.judge(5, kept, kept - torch.tensor([0.4, -0.4, 0.3, -0.2]))  # mean .025, standard error .19
    assert not record.done
    assert record.judge(10, kept, kept - torch.tensor([0.4, 0.2, 0.3, 0.1]))  # mean .25, standard error .065
    assert (record.kept_step, record.waited) == (10, 0)
    better = kept - torch.tensor([0.4, 0.2, 0.3, 0.1])
    assert not record.judge(15, better, better)
    assert not record.judge(20, better, torch.full((4,), math.nan))
    assert record.done
    assert record.kept_step == 10
    assert [entry.step for entry in record.evaluations] == [0, 5, 10, 15, 20]
    assert record.evaluations[2].gain == pytest.approx(0.25)
    assert record.evaluations[2].standard_error == pytest.approx(0.0645, abs=1e-4)


def build(causal_lm: Path, output: Path, callback: HeldOutStopping, **changes: Any) -> PrivateRewardTrainer:
    more: list[TrainerCallback] = changes.pop("more", [])
    trainer = make_trainer(causal_lm, output, callbacks=[callback, *more], **changes)
    callback.attach(trainer)
    return trainer


def weights(trainer: PrivateRewardTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_pair_losses_are_those_of_a_naive_computation(tiny_causal_lm: Path, tmp_path: Path) -> None:
    rows = make_rows(5)
    trainer = make_trainer(tiny_causal_lm, tmp_path, per_device_eval_batch_size=2, loss="debiased")
    trainer.model.train()
    losses = trainer.pair_losses(rows)
    assert trainer.model.training
    model = RewardModel(trainer.model.eval(), reward_bound=4.0)
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([rewards(model, [ids]) for ids in rows[column]])
            for column in ("chosen_ids", "rejected_ids")
        )
    # The judge is the private log-likelihood, whatever is trained on.
    expected = private_likelihood_loss(chosen - rejected, torch.ones(5), 1.0)
    torch.testing.assert_close(losses.float(), expected, rtol=1e-5, atol=1e-6)


def test_training_that_only_harms_gives_back_the_weights_it_started_with(tiny_causal_lm: Path, tmp_path: Path) -> None:
    """Trained on swapped pairs, so the held-out loss rises from step 0 on."""
    rows = make_rows(16)
    swapped = rows.rename_columns({"chosen_ids": "rejected_ids", "rejected_ids": "chosen_ids"})
    callback = HeldOutStopping(rows, EarlyStoppingSettings(every=2, patience=2))
    trainer = build(tiny_causal_lm, tmp_path, callback, train_dataset=swapped, max_steps=20, learning_rate=3e-3)
    before = weights(trainer)
    trainer.train()
    assert (callback.record.kept_step, callback.record.done, trainer.state.global_step) == (0, True, 4)
    assert callback.record.evaluations[-1].gain < -callback.record.evaluations[-1].standard_error
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


def test_training_that_helps_goes_on_and_keeps_the_best_step(tiny_causal_lm: Path, tmp_path: Path) -> None:
    rows = make_rows(16)
    callback = HeldOutStopping(rows, EarlyStoppingSettings(every=2, patience=2))
    trainer = build(
        tiny_causal_lm,
        tmp_path,
        callback,
        train_dataset=rows,
        max_steps=5,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
    )
    trainer.train()
    record = callback.record
    assert [entry.step for entry in record.evaluations] == [0, 2, 4, 5]
    assert record.kept_step > 0
    assert not record.done
    kept = next(entry for entry in record.evaluations if entry.step == record.kept_step)
    assert kept.loss < record.evaluations[0].loss - 0.005
    # What is handed back is the kept step.
    assert float(trainer.pair_losses(rows).mean()) == pytest.approx(kept.loss, rel=1e-6)


class Killed(TrainerCallback):
    """Raises once a checkpoint of the step is written."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("grouped", [False, True])
def test_killed_and_resumed_is_never_killed(tiny_causal_lm: Path, tmp_path: Path, grouped: bool) -> None:
    rows = make_rows(24)
    own: dict[str, Any] = {
        "train_dataset": rows,
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 3e-3,
        "remove_unused_columns": False,
    }
    if grouped:
        own["train_sampling_strategy"] = "group_by_length"
    callbacks = [HeldOutStopping(make_rows(8), EarlyStoppingSettings(2, 9, 0.5)) for _ in range(3)]
    whole = build(tiny_causal_lm, tmp_path / "whole", callbacks[0], **own)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        build(tiny_causal_lm, tmp_path / "killed", callbacks[1], more=[Killed()], **own).train()
    resumed = build(tiny_causal_lm, tmp_path / "killed", callbacks[2], **own)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    assert callbacks[2].record == callbacks[0].record
    assert len(callbacks[0].record.evaluations) == 5
    expected = weights(whole)
    assert all(torch.equal(expected[name], value) for name, value in weights(resumed).items())


def test_what_is_resumed_after_its_patience_makes_no_step(tiny_causal_lm: Path, tmp_path: Path) -> None:
    rows = make_rows(16)
    swapped = rows.rename_columns({"chosen_ids": "rejected_ids", "rejected_ids": "chosen_ids"})
    how: dict[str, Any] = {"train_dataset": swapped, "max_steps": 20, "save_strategy": "steps", "save_steps": 1}
    results = []
    for _ in range(2):
        callback = HeldOutStopping(rows, EarlyStoppingSettings(every=1, patience=3))
        trainer = build(tiny_causal_lm, tmp_path, callback, learning_rate=3e-3, **how)
        train(trainer, tmp_path, lambda *_: nullcontext())
        results.append((weights(trainer), callback.record, step_losses(trainer)))
    assert results[0][1].done
    assert len(results[0][2]) == 3
    assert results[0][1:] == results[1][1:]
    assert all(torch.equal(results[0][0][name], value) for name, value in results[1][0].items())
