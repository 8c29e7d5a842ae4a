"""The loops of `reward_peers.py`, one a process: `python peer_reward_loops.py LOOP SETTINGS.json` with LOOP one of
`plain` (two forward passes), `trl` (its RewardTrainer) and `ours`. An iteration is one epoch over all pairs.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_inputs
import torch
from datasets import Dataset
from peer_processes import Measured, serve
from peft import LoraConfig, get_peft_model
from private_rlhf.lm.generate import pad_rows
from private_rlhf.lm.models import load_tokenizer, lora_config
from private_rlhf.recipe import LoraSettings
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.reward_models.trainer import PrivateRewardTrainer
from private_rlhf.reward_models.training import as_dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl import RewardConfig, RewardTrainer

EPSILON = 2.0
RATE = 1e-5


def plain_model(settings: dict[str, Any], pad_token_id: int) -> Any:
    """A sequence-classification model as transformers loads it."""
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["path"], dtype=peer_inputs.DTYPES[settings["dtype"]], num_labels=1
    )
    model.config.pad_token_id = pad_token_id
    model.score.weight.data.copy_(peer_inputs.random_head(model.config.hidden_size)[None])
    return model


def adapter(model: Any) -> LoraConfig:
    """The recipes' default adapter with a trained head."""
    config = lora_config(LoraSettings(), "SEQ_CLS", model)
    config.modules_to_save = ["score"]
    return config


class PlainLoop:
    """Chosen and rejected texts in forward passes of their own, each padded to its batch's longest; default AdamW."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.pad = load_tokenizer(settings["path"]).pad_token_id
        model = plain_model(settings, self.pad)
        self.model = get_peft_model(model, adapter(model)) if settings["lora"] else model
        self.model.train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trainable = peer_inputs.trainable(self.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE)
        self.keep = math.log(1 / (1 + math.exp(-EPSILON))), math.log(1 / (1 + math.exp(EPSILON)))

    def rewards(self, rows: list[list[int]]) -> Tensor:
        """(B,) float32."""
        ids, mask = pad_rows(rows, self.pad, torch.device("cpu"))
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.squeeze(-1).float()

    def iterate(self, number: int) -> Measured:
        """One epoch in a random order."""
        pairs, size = self.settings["pairs"], self.settings["batch"]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(number)).tolist()
        started = time.monotonic()
        for first in range(0, len(order), size):
            picked = [pairs[index] for index in order[first : first + size]]
            margin = self.rewards([pair[0] for pair in picked]) - self.rewards([pair[1] for pair in picked])
            kept = self.keep[0] + nn.functional.logsigmoid(margin)
            flipped = self.keep[1] + nn.functional.logsigmoid(-margin)
            loss = -torch.logaddexp(kept, flipped).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            loss.item()
        return {"seconds": {"train": time.monotonic() - started}, "pairs": len(pairs)}


class EpochTime(TrainerCallback):
    """Seconds of an epoch, its data loading included and the trainer's own start left out."""

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.monotonic()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.monotonic() - self.started


class TrainerLoop:
    """A RewardTrainer, TRL's or the project's; `train` once an iteration."""

    def __init__(self, settings: dict[str, Any], build: Callable[..., RewardTrainer], folder: str) -> None:
        self.clock, self.count = EpochTime(), len(settings["pairs"])
        self.trainer = build(settings, folder)
        self.trainer.add_callback(self.clock)
        self.trainable = peer_inputs.trainable(self.trainer.model)

    def iterate(self, number: int) -> Measured:
        """One epoch."""
        self.trainer.train()
        return {"seconds": {"train": self.clock.seconds}, "pairs": self.count}


def arguments(settings: dict[str, Any], folder: str, **more: Any) -> RewardConfig:
    """TRL's defaults but for what a CPU and a benchmark need: float types as loaded, no checkpoints, no bars."""
    return RewardConfig(
        output_dir=folder,
        per_device_train_batch_size=settings["batch"],
        num_train_epochs=1,
        learning_rate=RATE,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def trl_trainer(settings: dict[str, Any], folder: str) -> RewardTrainer:
    """TRL's own, with its random batches and its loss."""
    tokenizer = load_tokenizer(settings["path"])
    model = plain_model(settings, tokenizer.pad_token_id)
    return RewardTrainer(
        model=model,
        args=arguments(settings, folder),
        train_dataset=rows_of(settings),
        processing_class=tokenizer,
        peft_config=adapter(model) if settings["lora"] else None,
    )


def our_trainer(settings: dict[str, Any], folder: str) -> RewardTrainer:
    """The project's, as its reward stage puts it together."""
    model: Any = build_reward_backbone(settings["path"], dtype=peer_inputs.DTYPES[settings["dtype"]])
    set_score_weight(model, peer_inputs.random_head(model.config.hidden_size))
    if settings["lora"]:
        model = get_peft_model(model, adapter(model), autocast_adapter_dtype=True)
    grouped = {"train_sampling_strategy": "group_by_length"} if settings["grouped"] else {}
    return PrivateRewardTrainer(
        model,
        arguments(settings, folder, remove_unused_columns=False, max_length=None, **grouped),
        noise=EPSILON,
        reward_bound=8.0,
        train_dataset=rows_of(settings),
        processing_class=load_tokenizer(settings["path"]),
    )


def rows_of(settings: dict[str, Any]) -> Dataset:
    """The pairs as trainers take them."""
    return as_dataset([(chosen, rejected) for chosen, rejected in settings["pairs"]])


def main() -> None:
    """Serve the loop that the command line names."""
    name, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        builds = {"trl": trl_trainer, "ours": our_trainer}
        loop = PlainLoop(settings) if name == "plain" else TrainerLoop(settings, builds[name], folder)
        facts = {"trainable": loop.trainable, "threads": torch.get_num_threads(), "torch": torch.__version__}
        serve(loop.iterate, facts)


if __name__ == "__main__":
    main()
