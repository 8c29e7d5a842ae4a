"""The SFT loss on shared rows against TRL's own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.hf_trainer import RowSftTrainer
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from support.families import family_checkpoint
from trl import SFTConfig, SFTTrainer

ROWS = [([5, 6, 7], [8, 9, 2]), ([5, 6, 7], [8, 2]), ([5, 9], [11, 12, 13, 2]), ([20], [21, 2])]


def trainer(kind: Any, checkpoint: Path, folder: Path, **more: Any) -> SFTTrainer:
    rows = [{"input_ids": p + r, "labels": [-100] * len(p) + r} for p, r in ROWS]
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
        logging_steps=1,
        learning_rate=1e-2,
        seed=0,
        **{"disable_tqdm": True, "save_strategy": "no", **more},
    )
    tokenizer, model = load_tokenizer(checkpoint), load_causal_lm(checkpoint, "float32")
    return kind(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def losses(made: SFTTrainer) -> list[float]:
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_is_that_of_trl(checkpoint: Path, tmp_path: Path, accumulation: int) -> None:
    how = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    found, expected = (
        losses(trainer(kind, checkpoint, tmp_path, max_steps=5, **how)) for kind in (RowSftTrainer, SFTTrainer)
    )
    assert len(expected) == 5
    assert expected[0] - expected[-1] > 0.1
    assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.usefixtures("kernels")
def test_prompts_are_not_learnt_and_the_switch_leaves_the_loss_to_trl(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = trainer(RowSftTrainer, checkpoint, tmp_path, per_device_train_batch_size=4)
    batch = next(iter(made.get_train_dataloader()))
    ours = made.compute_loss(made.model, dict(batch))
    with torch.no_grad():
        logits = made.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    exact = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(hf_trainer, "plain", lambda: True)
    torch.testing.assert_close(made.compute_loss(made.model, dict(batch)), exact, atol=1e-5, rtol=1e-5)


def test_what_is_resumed_after_its_last_step_makes_no_other(checkpoint: Path, tmp_path: Path) -> None:
    """Within an epoch, where transformers would make one more."""
    results = []
    for _ in range(2):
        how: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
        made: Any = trainer(RowSftTrainer, checkpoint, tmp_path, per_device_train_batch_size=2, **how)
        hf_trainer.train(made, tmp_path, lambda *_: nullcontext())
        results.append((made.model.state_dict(), hf_trainer.loss_history(made.state)))
    assert (tmp_path / "checkpoint-3" / hf_trainer.COMPLETE).exists()
    assert results[0][1] == results[1][1]
    assert all(torch.equal(results[0][0][name], value) for name, value in results[1][0].items())


@pytest.mark.parametrize("strategy", ["random", "sequential"])
def test_steps_are_those_of_whole_global_batches(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """11 rows by 4, in any micro-batches over one process or two: two steps of an epoch, each of the same rows."""

    def steps(processes: int, micro: int) -> list[set[int]]:
        accumulation = 4 // (processes * micro)
        batches: dict[int, list[set[int]]] = {}
        for rank in range(processes):
            how = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
            made: Any = trainer(
                RowSftTrainer, checkpoint, tmp_path, dataloader_drop_last=True, train_sampling_strategy=strategy, **how
            )
            made.train_dataset = Dataset.from_list([{"input_ids": [5 + n, 2], "labels": [-100, 2]} for n in range(11)])
            made.train = lambda **_: None
            hf_trainer.train(made, tmp_path, lambda *_: nullcontext())
            for state in (PartialState._shared_state, AcceleratorState._shared_state):
                monkeypatch.setitem(state, "num_processes", processes)
                monkeypatch.setitem(state, "process_index", rank)
            for place, batch in enumerate(made.get_train_dataloader()):
                batches.setdefault(place // accumulation, []).append(set(batch["input_ids"][:, 0].tolist()))
            monkeypatch.undo()
        assert {len(rows) for rows in batches.values()} == {4 // micro}
        return [set().union(*rows) for rows in batches.values()]

    expected = steps(1, 4)
    assert [len(rows) for rows in expected] == [4, 4]
    assert [steps(*how) for how in ((1, 2), (1, 1), (2, 2), (2, 1))] == [expected] * 4


def test_the_bar_carries_the_loss_and_nothing_else_is_printed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(RowSftTrainer, checkpoint, tmp_path, max_steps=2, disable_tqdm=False)
    hf_trainer.train(made, tmp_path, lambda *_: nullcontext())
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loss=" in printed.err


@pytest.mark.usefixtures("kernels")
def test_experts_are_trained_on_the_likelihood_alone_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our products and with plain ones; `router_aux_loss_coef` brings TRL's load balancing back."""
    source = family_checkpoint("Mixtral", tmp_path / "source", ["the quick brown fox", "a lazy dog"])
    found = []
    for coefficient, kernels in ((None, True), (None, False), (10.0, True)):
        monkeypatch.setattr(hf_trainer, "plain", lambda kernels=kernels: not kernels)
        made: Any = trainer(RowSftTrainer, source, tmp_path, max_steps=1, router_aux_loss_coef=coefficient)
        assert made.model.config.output_router_logits == (coefficient is not None)
        found += losses(made)
    assert found[0] == pytest.approx(found[1], abs=2e-5)
    assert found[2] > found[0] + 1
