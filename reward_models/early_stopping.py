"""Early stopping of reward training by the held-out private log-likelihood and its paired standard error.

Every `every` steps, and at step 0 (a warm start may be better than anything that follows), the loss of each held-out
pair is computed; it reads only z, so the choice is post-processing. Two evaluations share their pairs, so the
standard error of their difference is that of the per-pair differences, which is far below that of either mean. A step
replaces the kept one only if it is better by more than `standard_errors` of them; after `patience` evaluations in a row
that are not, training stops. Either way the kept weights are the result: the earliest step that no later one beats
beyond noise. The held-out loss of the kept step has been selected on, and estimates made on the same pairs say so.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from private_rlhf.lm.distributed import put_back, whole_tensor
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

STATE_FILE = "early_stopping.safetensors"


@dataclass(frozen=True)
class Evaluation:
    """`loss` (nats per pair) at `step`; `gain` = the kept loss less this one, with its paired standard error."""

    step: int
    loss: float
    gain: float
    standard_error: float


def paired_gain(kept: Tensor, new: Tensor) -> tuple[float, float]:
    """(mean, standard error) of kept − new, (n,) each, n ≥ 2."""
    difference = kept.double() - new.double()
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


@dataclass
class HeldOutRecord:
    """The kept step, and all evaluations up to now."""

    patience: int
    standard_errors: float
    evaluations: list[Evaluation] = field(default_factory=list)
    kept_step: int = -1
    waited: int = 0

    def judge(self, step: int, kept: Tensor | None, losses: Tensor) -> bool:
        """Record `losses` (n,) of `step` against the kept ones (None: the first); True if the step replaces them."""
        gain, error = (0.0, 0.0) if kept is None else paired_gain(kept, losses)
        self.evaluations.append(Evaluation(step, float(losses.double().mean()), gain, error))
        better = kept is None or gain > self.standard_errors * error
        self.kept_step, self.waited = (step, 0) if better else (self.kept_step, self.waited + 1)
        return better

    @property
    def done(self) -> bool:
        """True where patience is at its end."""
        return self.waited >= self.patience


class HeldOutStopping(TrainerCallback):
    """The callback; give it the trainer with `attach` before training.

    `rows` are held-out pairs as `PrivateRewardTrainer` takes them, disjoint from training by record; at least two. Kept
    weights (trainable ones) stay in memory and go into each Trainer checkpoint, so that a resumed run decides as an
    uninterrupted one. Put it before callbacks that mark a checkpoint as complete.
    """

    def __init__(self, rows: Dataset, *, every: int, patience: int = 3, standard_errors: float = 1.0) -> None:
        self.rows, self.every = rows, every
        self.record = HeldOutRecord(patience, standard_errors)
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
        with safe_open(path, framework="pt") as stored:
            record = json.loads(stored.metadata()["record"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
        evaluations = [Evaluation(**entry) for entry in record.pop("evaluations")]
        self.record = HeldOutRecord(**record, evaluations=evaluations)
        self._losses = tensors.pop("losses")
        self._weights = tensors
