"""Training of a reward backbone (LoRA, 4-bit LoRA or full) on privatised pairs with TRL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.world import World, check_rows
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.distributed import whole_model
from private_rlhf.lm.models import DTYPES, lora_config
from private_rlhf.recipe import EarlyStoppingSettings, RewardConfig
from private_rlhf.reward_models.early_stopping import HeldOutStopping
from private_rlhf.reward_models.model import merge_adapters, set_score_weight
from private_rlhf.reward_models.trainer import PrivateRewardTrainer
from trl import RewardConfig as TrlRewardConfig

Pairs = list[tuple[list[int], list[int]]]

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


@dataclass(frozen=True)
class TrainedBackbone:
    """A plain model in eval mode, [[step, loss], …] of its training, and the evaluations of early stopping, if any."""

    model: Any
    history: list[list[float]]
    early_stopping: dict[str, Any] | None


def train_backbone(
    backbone: Any,
    pairs: Pairs,
    held_out: Pairs,
    noise: LabelNoise,
    settings: RewardConfig,
    *,
    tokenizer: Any,
    dtype: str,
    seed: int,
    checkpoints: Path,
    world: World,
    warm_weight: torch.Tensor | None,
    reload: Callable[[], Any],
) -> TrainedBackbone:
    """The backbone after the recipe's `lora` or `full` training.

    Args:
        backbone: sequence-classification model with a zero head.
        pairs: (chosen, rejected) token ids, `chosen` being what z prefers.
        held_out: the same of pairs that early stopping judges by; not read without it.
        noise: of the labels, as their release states it.
        settings: mode, optimiser and loss of the training.
        tokenizer: pads.
        dtype: of the trained model, a key of `DTYPES`.
        seed: of the order of pairs and of fresh adapters.
        checkpoints: where resume state is kept.
        world: the process group.
        warm_weight: (d,) head to start from, or None for zeros.
        reload: makes a backbone like the first; called where weights were split over processes, to gather them in.
    """
    check_rows(len(pairs), "reward", settings.batch_size)
    optional: dict[str, Any] = {"optim": OPTIMIZERS[settings.optimizer]} if settings.optimizer else {}
    if settings.group_by_length:
        optional["train_sampling_strategy"] = "group_by_length"
    arguments = hf_trainer.trainer_config(
        "reward",
        settings,
        TrlRewardConfig,
        checkpoints,
        seed,
        world,
        max_length=None,
        remove_unused_columns=False,
        **optional,
    )
    if warm_weight is not None:
        set_score_weight(backbone, warm_weight)
    stopping = held_out_stopping(held_out, settings.early_stopping)
    trainer = PrivateRewardTrainer(
        trainable(backbone, settings, seed),
        arguments,
        noise=noise,
        loss=settings.loss,
        reward_bound=settings.reward_bound,
        train_dataset=as_dataset(pairs),
        processing_class=tokenizer,
        # The marker comes last: it says that a checkpoint is whole.
        callbacks=[*([stopping] if stopping else []), hf_trainer.CompletionMarker(), hf_trainer.StopOnNonFinite()],
    )
    if stopping:
        stopping.attach(trainer)
    hf_trainer.train(trainer, checkpoints)
    trained = whole_model(trainer.accelerator.unwrap_model(trainer.model), lambda: trainable(reload(), settings, seed))
    return TrainedBackbone(
        merge_adapters(trained, DTYPES[dtype]).eval(),
        hf_trainer.loss_history(trainer.state),
        describe(stopping) if stopping else None,
    )


def trainable(backbone: Any, settings: RewardConfig, seed: int) -> Any:
    """The backbone for training: under a fresh adapter, or in float32."""
    if settings.mode != "lora":
        return backbone.float()
    config = lora_config(settings.lora, "SEQ_CLS", backbone)
    config.modules_to_save = ["score"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(backbone, config, autocast_adapter_dtype=True)


def as_dataset(pairs: Pairs) -> Dataset:
    """Pairs as the trainer takes them."""
    return Dataset.from_list([{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs])


def held_out_stopping(held_out: Pairs, settings: EarlyStoppingSettings | None) -> HeldOutStopping | None:
    """Early stopping by the held-out pairs, or None without settings.

    Raises:
        UserError: one held-out pair, which has no standard error.
    """
    if settings is None:
        return None
    if len(held_out) < 2:
        raise UserError("reward.early_stopping needs two held-out pairs: raise reward.validation_fraction")
    # Similar lengths together: evaluation pads less.
    rows = sorted(held_out, key=lambda pair: max(len(pair[0]), len(pair[1])))
    return HeldOutStopping(
        as_dataset(rows), every=settings.every, patience=settings.patience, standard_errors=settings.standard_errors
    )


def describe(stopping: HeldOutStopping) -> dict[str, Any]:
    """The kept step and [step, held-out log-likelihood, its gain over the kept one, paired standard error], as JSON."""
    record = stopping.record
    return {
        "kept_step": record.kept_step,
        "stopped": record.done,
        "evaluations": [[entry.step, -entry.loss, entry.gain, entry.standard_error] for entry in record.evaluations],
    }
