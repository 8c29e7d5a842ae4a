"""Training of a reward backbone (LoRA, 4-bit LoRA or full) on privatised pairs with TRL, and its early stopping.

Every `every` steps, and at step 0, the private loss of each held-out pair is computed. A step replaces the kept one if
its gain exceeds `standard_errors` of the per-pair differences; after `patience` evaluations that do not, training
stops. The kept weights are the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, rows_of
from private_rlhf.core.world import World, check_rows
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.distributed import put_back, whole_model, whole_tensor
from private_rlhf.lm.models import DTYPES, lora_config
from private_rlhf.recipe import EarlyStoppingSettings, RewardConfig
from private_rlhf.reward_models.backbone import merge_adapters
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.reward_models.trainer import PrivateRewardTrainer, with_levels
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import RewardConfig as TrlRewardConfig

Pairs = list[tuple[list[int], list[int]]]

STATE_FILE = "early_stopping.safetensors"
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


@dataclass(frozen=True)
class Evaluation:
    """`loss` (nats per pair) at `step`; `gain` = the kept loss less this one, with its paired standard error."""

    step: int
    loss: float
    gain: float
    standard_error: float


@dataclass
class HeldOutRecord:
    """The kept step, and all evaluations up to now."""

    patience: int
    standard_errors: float
    evaluations: list[Evaluation] = field(default_factory=list)
    kept_step: int = -1
    waited: int = 0

    def judge(self, step: int, best: Tensor | None, losses: Tensor) -> bool:
        """Record `losses` (n,) of `step` against the kept ones (None: the first); True if the step replaces them."""
        gain = error = 0.0
        if best is not None:
            difference = best.double() - losses.double()
            gain, error = float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))
        self.evaluations.append(Evaluation(step, float(losses.double().mean()), gain, error))
        better = best is None or gain > self.standard_errors * error
        self.kept_step, self.waited = (step, 0) if better else (self.kept_step, self.waited + 1)
        return better

    @property
    def done(self) -> bool:
        """True where patience is at its end."""
        return self.waited >= self.patience


class HeldOutStopping(TrainerCallback):
    """The callback; attach it to the trainer before training. `rows`: at least two held-out pairs. Kept weights stay in
    memory and go into each Trainer checkpoint, so that a resumed run decides as an uninterrupted one."""

    def __init__(self, rows: Dataset, settings: EarlyStoppingSettings) -> None:
        self.rows, self.every = rows, settings.every
        self.record = HeldOutRecord(settings.patience, settings.standard_errors)
        self._trainer: Any = None
        self._losses: Tensor | None = None
        self._weights: dict[str, Tensor] = {}

    def attach(self, trainer: Any) -> None:
        """Name the trainer whose model is watched; it has `model` and `pair_losses`, as `PrivateRewardTrainer`."""
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step > 0:
            self._load(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / STATE_FILE)
            control.should_training_stop = self.record.done
        else:
            self._evaluate(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.every == 0 and not self.record.done:
            self._evaluate(state.global_step)
        control.should_training_stop = control.should_training_stop or self.record.done

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self._losses is not None:
            record = {"record": json.dumps(asdict(self.record))}
            path = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / STATE_FILE
            save_file({"losses": self._losses} | self._weights, path, metadata=record)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.record.done and self.record.evaluations[-1].step != state.global_step:
            self._evaluate(state.global_step)
        for name, parameter in self._trainable():
            put_back(parameter, self._weights[name])

    def _evaluate(self, step: int) -> None:
        losses = self._trainer.pair_losses(self.rows).cpu()
        if self.record.judge(step, self._losses, losses):
            self._losses = losses
            self._weights = {name: whole_tensor(value.detach()).cpu().clone() for name, value in self._trainable()}

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, value) for name, value in self._trainer.model.named_parameters() if value.requires_grad]

    def _load(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            record = json.loads(file.metadata()["record"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        evaluations = [Evaluation(**entry) for entry in record.pop("evaluations")]
        self.record = HeldOutRecord(**record, evaluations=evaluations)
        self._losses = tensors.pop("losses")
        self._weights = tensors


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
    noise: LabelNoise | LevelledNoise,
    settings: RewardConfig,
    *,
    held_out_noise: LabelNoise | LevelledNoise = PUBLIC,
    tokenizer: Any,
    dtype: str,
    seed: int,
    checkpoints: Path,
    world: World,
    warm_weight: torch.Tensor | None,
    reload: Callable[[], Any],
    track: hf_trainer.Tracking,
) -> TrainedBackbone:
    """Train the backbone, a sequence classifier with a zero head, as the recipe's mode `lora` or `full` says.

    pairs: (chosen, rejected) token ids, `chosen` being what z prefers; held_out: the same, which early stopping judges
    by. noise, held_out_noise: of their labels; the latter is read where each label has an ε of its own. seed: of the
    order and of fresh adapters. checkpoints: folder of resume state. warm_weight: (d,) head to start from, or None.
    reload: makes a backbone like the first, to gather split weights in. track: as of `hf_trainer.train`.
    """
    check_rows(len(pairs), "reward", settings.batch_size)
    more: dict[str, Any] = {"optim": OPTIMIZERS[settings.optimizer]} if settings.optimizer else {}
    if settings.group_by_length:
        more["train_sampling_strategy"] = "group_by_length"
    more |= {"max_length": None, "remove_unused_columns": False}
    arguments = hf_trainer.trainer_config("reward", settings, TrlRewardConfig, checkpoints, seed, world, **more)
    if warm_weight is not None:
        set_score_weight(backbone, warm_weight)
    stopping = held_out_stopping(held_out, settings.early_stopping, held_out_noise)
    trainer = PrivateRewardTrainer(
        trainable(backbone, settings, seed),
        arguments,
        noise=noise,
        loss=settings.loss,
        reward_bound=settings.reward_bound,
        train_dataset=as_dataset(pairs, noise),
        processing_class=tokenizer,
        callbacks=[stopping] if stopping else None,
    )
    if stopping:
        stopping.attach(trainer)
    hf_trainer.train(trainer, checkpoints, track)
    trained = whole_model(trainer.accelerator.unwrap_model(trainer.model), lambda: trainable(reload(), settings, seed))
    model, history = merge_adapters(trained, DTYPES[dtype]).eval(), hf_trainer.loss_history(trainer.state)
    return TrainedBackbone(model, history, describe(stopping.record) if stopping else None)


def trainable(backbone: Any, settings: RewardConfig, seed: int) -> Any:
    """The backbone for training: under a fresh adapter, or in float32."""
    if settings.mode != "lora":
        return backbone.float()
    config = lora_config(settings.lora, "SEQ_CLS", backbone)
    config.modules_to_save = ["score"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(backbone, config, autocast_adapter_dtype=True)


def as_dataset(pairs: Pairs, noise: LabelNoise | LevelledNoise = PUBLIC) -> Dataset:
    """Pairs as the trainer takes them, with the levels of their labels where each has its own ε."""
    rows: list[dict[str, Any]] = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
    return Dataset.from_list(with_levels(rows, noise))


def held_out_stopping(
    held_out: Pairs, settings: EarlyStoppingSettings | None, noise: LabelNoise | LevelledNoise = PUBLIC
) -> HeldOutStopping | None:
    """Early stopping by the held-out pairs, or None without settings. UserError: one pair has no standard error."""
    if settings is None:
        return None
    if len(held_out) < 2:
        raise UserError("reward.early_stopping must have at least 2 held-out pairs: raise reward.validation_fraction")
    # Similar lengths together: evaluation pads less.
    order = sorted(range(len(held_out)), key=lambda place: max(map(len, held_out[place])))
    return HeldOutStopping(as_dataset([held_out[place] for place in order], rows_of(noise, order)), settings)


def describe(record: HeldOutRecord) -> dict[str, Any]:
    """The kept step and [step, held-out log-likelihood, its gain over the kept one, paired standard error], as JSON."""
    rows = [[entry.step, -entry.loss, entry.gain, entry.standard_error] for entry in record.evaluations]
    return {"kept_step": record.kept_step, "stopped": record.done, "evaluations": rows}
