"""The trainer on a tiny Llama: its loss against a naive one, LoRA and full steps, 2 processes = 1 process."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.world import join_world
from private_rlhf.reward_models.backbone import build_reward_backbone, merge_adapters
from private_rlhf.reward_models.losses import SMOOTHING_REFUSED, get_loss
from private_rlhf.reward_models.model import RewardModel, score_layer, set_score_weight
from support.reward_checkpoints import raw_scores, rewards
from support.reward_trainers import make_rows, make_tokenizer, make_trainer, step_losses
from trl import RewardTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["score"], task_type="SEQ_CLS")


@pytest.mark.parametrize("loss", ["private_likelihood", "private_least_squares"])
def test_loss_and_metrics_equal_a_naive_computation(tiny_causal_lm: Path, tmp_path: Path, loss: str) -> None:
    rows = make_rows(8)
    trainer = make_trainer(tiny_causal_lm, tmp_path, loss=loss, eval_dataset=rows, per_device_eval_batch_size=8)
    metrics = trainer.evaluate()
    reward_model = RewardModel(trainer.model, reward_bound=4.0)
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([rewards(reward_model, [ids]) for ids in rows[column]])
            for column in ("chosen_ids", "rejected_ids")
        )
    margin = chosen - rejected
    assert float(margin.abs().max()) > 0.5
    expected = get_loss(loss).value(margin, torch.ones(8), 1.0).mean()
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    accuracy = float((margin > 0).float().mean())
    assert metrics["eval_private_accuracy"] == pytest.approx(accuracy)
    alpha = LabelNoise.of(1.0).keep_prob
    assert metrics["eval_debiased_accuracy"] == pytest.approx((accuracy - 1 + alpha) / (2 * alpha - 1))
    assert metrics["eval_margin"] == pytest.approx(float(margin.mean()), abs=1e-5)


def test_full_training_moves_every_weight_and_lowers_the_loss(tiny_causal_lm: Path, tmp_path: Path) -> None:
    rows = make_rows(8)
    trainer = make_trainer(
        tiny_causal_lm, tmp_path, train_dataset=rows, max_steps=6, lr_scheduler_type="constant", learning_rate=3e-3
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    losses = step_losses(trainer)
    assert losses[-1] < losses[0] - 0.02
    assert all(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    # No private loss can fall below that of a label kept for sure, −log α.
    assert losses[-1] > -math.log(LabelNoise.of(1.0).keep_prob)


def test_lora_trains_adapter_and_head_and_merges_into_an_ordinary_model(tiny_causal_lm: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_causal_lm, tmp_path, peft_config=LORA)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(before[name], parameter)}
    assert moved == {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert any("score" in name for name in moved)
    assert any("lora_A" in name for name in moved)
    model = trainer.model.eval()
    ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        expected = raw_scores(RewardModel(model), ids.tolist())
        merged = merge_adapters(model)
        assert type(merged).__name__ == "LlamaForSequenceClassification"
        torch.testing.assert_close(merged(ids).logits[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_accumulation_equals_one_large_batch(tiny_causal_lm: Path, tmp_path: Path) -> None:
    weights = []
    for size, accumulation in ((8, 1), (2, 4)):
        trainer = make_trainer(
            tiny_causal_lm,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
        )
        trainer.train()
        weights.append((step_losses(trainer), score_layer(trainer.model).weight.detach().clone()))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-5)
    torch.testing.assert_close(weights[0][1], weights[1][1], rtol=1e-4, atol=1e-6)


def test_bfloat16_base_with_lora_keeps_float32_margins(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm, dtype=torch.bfloat16)
    set_score_weight(model, 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(4)))
    trainer = make_trainer(tiny_causal_lm, tmp_path, model=model, peft_config=LORA, bf16=True)
    trainer.train()
    assert all(math.isfinite(loss) for loss in step_losses(trainer))
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = trainer.model(torch.tensor([[5, 6, 2]])).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_legacy_column_names_are_accepted(tiny_causal_lm: Path, tmp_path: Path) -> None:
    rows = make_rows().rename_columns({"chosen_ids": "chosen_input_ids", "rejected_ids": "rejected_input_ids"})
    trainer = make_trainer(tiny_causal_lm, tmp_path, train_dataset=rows)
    assert set(trainer.train_dataset.column_names) == {"chosen_ids", "rejected_ids"}


def trl_rows() -> dict[str, Dataset]:
    """Preferences in each of TRL's formats; one text is over a `max_length` of 24."""
    words = [f"w{3 + i} w{20 + i}" for i in range(7)] + [" ".join(f"w{i}" for i in range(3, 40))]
    other = [f"w{40 - i} w7 w{9 + i}" for i in range(8)]

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    answers = {"chosen": [f" {text}" for text in words], "rejected": [f" {text}" for text in other]}
    talks = {name: [said("assistant", text) for text in texts] for name, texts in answers.items()}
    asked = [said("user", f"w{50 + i}") for i in range(8)]
    whole = {name: [ask + talk for ask, talk in zip(asked, talks[name], strict=True)] for name in talks}
    tables = {
        "text": {"prompt": [f"w{50 + i}" for i in range(8)], **answers},
        "text, implicit prompt": answers,
        "messages": {"prompt": asked, **talks},
        "messages, implicit prompt": whole,
    }
    return {name: Dataset.from_dict(table) for name, table in tables.items()}


@pytest.mark.parametrize("name", trl_rows())
def test_without_noise_and_bound_it_is_trl_s_trainer(tiny_causal_lm: Path, tmp_path: Path, name: str) -> None:
    """TRL's preference columns by TRL's own processing: token ids, losses and weights after two steps."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ bos_token + ' ' + m['content'] + ' ' + eos_token + ' ' }}{% endfor %}"
    )
    how: dict[str, Any] = {"train_dataset": trl_rows()[name], "processing_class": tokenizer, "max_length": 24}
    how |= {"per_device_train_batch_size": 4, "optim": "sgd"}
    ours = make_trainer(tiny_causal_lm, tmp_path / "ours", noise=math.inf, reward_bound=None, **how)
    theirs = make_trainer(tiny_causal_lm, tmp_path / "theirs", kind=RewardTrainer, **how)
    assert len(ours.train_dataset) == 7
    assert list(ours.train_dataset["chosen_ids"]) == list(theirs.train_dataset["chosen_ids"])
    assert list(ours.train_dataset["rejected_ids"]) == list(theirs.train_dataset["rejected_ids"])
    for trainer in (ours, theirs):
        trainer.train()
    assert step_losses(ours) == pytest.approx(step_losses(theirs), abs=1e-5)
    assert step_losses(ours)[0] != pytest.approx(step_losses(ours)[1], abs=1e-4)
    weights = dict(theirs.model.named_parameters())
    for parameter, weight in ours.model.named_parameters():
        torch.testing.assert_close(weight, weights[parameter], rtol=1e-4, atol=1e-6)


def test_errors_name_the_culprit(tiny_causal_lm: Path, tmp_path: Path) -> None:
    text = Dataset.from_dict({"chosen": ["w5 w6"], "text": ["w7"]})
    no_pad = make_tokenizer()
    no_pad.pad_token = "</s>"
    margins = make_rows(2).add_column("margin", [0.0, 1.0])
    too_long = {"train_dataset": trl_rows()["text, implicit prompt"], "max_length": 1}
    for changes, message in (
        ({"noise": 0.0}, "epsilon must be above 0"),
        ({"reward_bound": -1.0}, "reward_bound must be"),
        ({"loss": "bt"}, "loss must be one of"),
        ({"label_smoothing_factor": 0.1}, f"label_smoothing_factor must be 0: {SMOOTHING_REFUSED}"),
        ({"train_dataset": text}, "has no rejected: pass preferences, or token ids as chosen_ids and rejected_ids"),
        ({"train_dataset": Dataset.from_list([])}, "has no chosen, rejected: pass preferences"),
        ({"train_dataset": margins}, "has a margin column"),
        (too_long, "8 rows of the train dataset are longer than max_length 1 and would be dropped"),
        ({"max_length": 7}, "rows of the train dataset are longer than max_length 7"),
        ({"processing_class": no_pad}, "pad_token_id of the tokenizer must be 0, that of the model, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tiny_causal_lm, tmp_path, **changes)
    for ids, message in (([5, 0], "ends in the pad token 0"), ([], "is empty")):
        rows = Dataset.from_dict({"chosen_ids": [ids] * 8, "rejected_ids": [[5, 6]] * 8})
        with pytest.raises(ValueError, match=message):
            make_trainer(tiny_causal_lm, tmp_path, train_dataset=rows).train()


def test_two_processes_give_the_losses_of_one(tiny_causal_lm: Path, tmp_path: Path) -> None:
    """Batch 4 on each of two gloo processes = batch 8 on one, for losses, metrics and weights."""
    single = make_trainer(tiny_causal_lm, tmp_path / "one", optim="sgd")
    single.train()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, __file__, str(tiny_causal_lm), str(tmp_path / "two")]
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    record = json.loads((tmp_path / "two" / "record.json").read_text())
    assert record["world_size"] == 2
    assert record["losses"] == pytest.approx(step_losses(single), abs=1e-6)
    assert len(record["losses"]) == 2
    assert record["losses"][0] != pytest.approx(record["losses"][1], abs=1e-4)
    expected = [entry["private_accuracy"] for entry in single.state.log_history if "loss" in entry]
    assert record["accuracy"] == pytest.approx(expected)
    torch.testing.assert_close(
        torch.tensor(record["weight"]), score_layer(single.model).weight[0].detach(), rtol=1e-4, atol=1e-6
    )


def _worker(causal_lm: Path, output: Path) -> None:
    join_world()
    trainer = make_trainer(causal_lm, output, per_device_train_batch_size=4, optim="sgd")
    trainer.train()
    if trainer.accelerator.is_main_process:
        record = {
            "world_size": trainer.accelerator.num_processes,
            "losses": step_losses(trainer),
            "accuracy": [entry["private_accuracy"] for entry in trainer.state.log_history if "loss" in entry],
            "weight": score_layer(trainer.accelerator.unwrap_model(trainer.model)).weight[0].tolist(),
        }
        output.mkdir(parents=True, exist_ok=True)
        (output / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), Path(sys.argv[2]))
