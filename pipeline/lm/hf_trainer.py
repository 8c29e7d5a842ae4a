"""The shared part of the TRL-based stages: arguments, whole checkpoints, saving; and SFT on shared rows."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from accelerate import PartialState
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World, global_batch, on_cpu
from private_rlhf.data.render import Renderer
from private_rlhf.lm.distributed import obey_on_cpus
from private_rlhf.lm.kernels import plain
from private_rlhf.lm.logprobs import take_batches, token_batch
from private_rlhf.lm.rows import sharing_of
from private_rlhf.lm.saving import save_merged
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.recipe.load import nearest
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from trl import SFTTrainer

T = TypeVar("T")
Tracking = Callable[[Trainer, int], AbstractContextManager[None]]

COMPLETE = "COMPLETE"
OLD = "gradient_checkpointing"
CHECKPOINTING = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else OLD
"""Transformers' name of the setting: from version 5.23 on it warns of the old one, which recipes may use."""
OWNED = {
    "output_dir": "--run-dir",
    "per_device_train_batch_size": "{}.micro_batch_size",
    "per_device_eval_batch_size": "{}.micro_batch_size",
    "gradient_accumulation_steps": "{}.batch_size and {}.micro_batch_size",
    "learning_rate": "{}.learning_rate",
    "num_train_epochs": "{}.epochs",
    "max_steps": "{}.max_steps",
    "warmup_steps": "{}.warmup_steps",
    "save_steps": "{}.save_steps",
    "save_strategy": "{}.save_steps",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "CUDA_VISIBLE_DEVICES in the environment",
    "resume_from_checkpoint": "the same command again, which resumes",
    "report_to": "ppo.report_to",
    "max_length": "model.max_text_tokens (texts are never cut; model.too_long: drop leaves longer ones out)",
    **dict.fromkeys(("save_total_limit", "dataset_kwargs", "remove_unused_columns", "dataset_text_field", "packing",
        "padding_free", "completion_only_loss", "assistant_only_loss", "eos_token", "pad_token", "chat_template_path",
        "model_init_kwargs", "truncation_mode", "auto_find_batch_size", "label_smoothing_factor", "logging_steps",
        "logging_strategy", "logging_first_step", "save_only_model", "top_k", "min_p", "repetition_penalty",
        "generation_kwargs", "cache_implementation", "use_transformers_paged"), ""),
    "beta": "{}.kl_coef or ppo.kl_coef",
    "num_generations": "{}.samples_per_prompt",
    "generation_batch_size": "{}.rollouts",
    "num_iterations": "{}.epochs",
    "epsilon": "{}.clip_range",
    "temperature": "ppo.temperature",
    "top_p": "ppo.top_p",
    "max_completion_length": "model.max_response_tokens",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "use_vllm": "rollout.engine",
}
"""Arguments that a stage sets itself -> the keys that do what is meant; "" where there is none. {}: the section."""
ON_PROMPTS = dict.fromkeys(("num_train_epochs", "max_steps"), "{}.iterations") | dict.fromkeys(
    ("save_steps", "save_strategy"), "{}.save_every"
)
"""The same where a policy is trained on prompts."""
JUDGED = frozenset({"do_eval", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"})
"""Arguments, with eval_*, about evaluation while training, for which the stages hand over no rows."""
LAUNCHED = frozenset({"deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config", "fp16"})
"""Arguments of transformers' trainers that would ask for a strategy or a precision past the launcher and this table."""


def check_trainer_args(section: str, given: dict[str, Any], schema: type, fixed: Collection[str] = ()) -> None:
    """Check a recipe's `trainer_args` against TRL's own dataclass. fixed: what this stage sets beside `OWNED`.
    UserError for a key that TRL lacks, that the recipe or the launcher sets, or that would publish weights, texts or
    metrics."""
    names = [item.name for item in dataclasses.fields(schema)]
    for key in given:
        if key in names and (key in OWNED or key in fixed):
            remedy = (OWNED | (ON_PROMPTS if "num_iterations" in names else {})).get(key, "").replace("{}", section)
            raise UserError(
                f"{section}.trainer_args.{key} is set by the stage itself: {f'use {remedy}' if remedy else 'remove it'}"
            )
        if key in names and (key in JUDGED or key.startswith("eval_")):
            judge = "reward.early_stopping" if section == "reward" else "section evaluate, which judges the policy"
            raise UserError(f"{section}.trainer_args.{key} must be left out, it evaluates meanwhile: use {judge}")
        if key in LAUNCHED:
            raise UserError(
                f"{section}.trainer_args.{key} is the launcher's: remove it, and take launch/ddp.yaml or "
                "launch/fsdp2.yaml (mixed_precision bf16 or no)"
            )
        if "hub" in key or key.startswith("trackio"):
            raise UserError(
                f"{section}.trainer_args.{key} would publish what the run holds: remove it, and upload by hand what you"
                " mean to"
            )
        if key not in names:
            raise UserError(f"{section}.trainer_args: trl.{schema.__name__} has no '{key}'{nearest(key, names)}")
    _check_values(section, given, schema)


def _check_values(section: str, given: dict[str, Any], schema: type) -> None:
    """Check the types of values, which dataclasses do not, and that the package is here that one of them needs."""
    types = get_type_hints(schema)
    for key, value in given.items():
        try:
            TypeAdapter(types[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError:
            kind = getattr(types[key], "__name__", types[key])
            remedy = "write a number, with a dot where it has an exponent (1.0e-8)" if kind == "float" else "write one"
            raise UserError(f"{section}.trainer_args.{key} must be a {kind}, got {value!r}: {remedy}") from None
    if given.get("use_liger_kernel") and find_spec("liger_kernel") is None:
        raise UserError(f"{section}.trainer_args.use_liger_kernel needs the package liger-kernel: install or remove it")


def trainer_arguments(section: str, settings: Any, checkpoints: Path, seed: int, world: World) -> dict[str, Any]:
    """Arguments that SFTConfig and RewardConfig share; `settings` is the recipe section.

    TRL defaults to bf16 and gradient checkpointing; here dtype is the model's own, and both stay off unless asked for.
    """
    micro, accumulation = global_batch(section, settings.batch_size, settings.micro_batch_size, world)
    defaults: dict[str, Any] = {
        "output_dir": str(checkpoints),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": settings.learning_rate,
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps,
        "warmup_steps": settings.warmup_steps,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": settings.save_steps,
        "save_total_limit": 2,
        "seed": seed,
        "data_seed": seed,
        "bf16": False,
        CHECKPOINTING: False,
        "dataloader_drop_last": True,
        "report_to": "none",
        "use_cpu": on_cpu(),
        "ddp_find_unused_parameters": False if world.size > 1 else None,
    }
    return {**defaults, **{key.replace(OLD, CHECKPOINTING): each for key, each in settings.trainer_args.items()}}


def trainer_config(
    section: str, settings: Any, schema: type[T], checkpoints: Path, seed: int, world: World, **fixed: Any
) -> T:
    """The TRL configuration of a recipe section; the stage sets what is `fixed`. UserError as of `check_trainer_args`,
    and for a batch that does not divide."""
    check_trainer_args(section, settings.trainer_args, schema, fixed)
    arguments = trainer_arguments(section, settings, checkpoints, seed, world)
    try:
        config = schema(**arguments, **fixed)
    except (ValueError, TypeError) as error:
        cause = " ".join(str(error).split())
        raise UserError(f"{section}.trainer_args: trl.{schema.__name__} refuses a value ({cause}): fix it") from None
    if isinstance(config, TrainingArguments) and config.n_gpu > 1:
        config._n_gpu = 1  # one process, one GPU: torch.nn.DataParallel cannot split shared rows
    obey_on_cpus()  # the arguments have begun accelerate's state anew
    return config


class CompletionMarker(TrainerCallback):
    """Marks a Trainer checkpoint as whole once every process has written its part; a kill before leaves no marker."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        PartialState().wait_for_everyone()  # each process saves its own random state
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            atomic.sync_folder(folder)
            (folder / COMPLETE).touch()


class StopOnNonFinite(TrainerCallback):
    """Stops the run at a loss or gradient norm that is not finite, instead of training on."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not torch.isfinite(torch.as_tensor(float(value))):
                first = "check model.source and the texts: nothing was changed before this step"
                remedy = first if state.global_step <= 1 else "lower the learning rate"
                raise FloatingPointError(f"{name} is {value} at step {state.global_step}: {remedy}")


class LossOnBar(ProgressCallback):
    """A progress bar that carries the loss, and r̂ where responses were scored, not a line of numbers at each step."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        labels = {"loss": "loss", "pessimistic/score": "r̂"}
        values = {label: f"{float(logs[key]):.3f}" for key, label in labels.items() if logs is not None and key in logs}
        if self.training_bar is not None and "loss" in values:
            self.training_bar.set_postfix(values, refresh=False)  # the next step shows it: a file would get a line each


def train(trainer: Trainer, checkpoints: Path, track: Tracking) -> None:
    """Train, from the newest whole checkpoint where there is one.

    Each checkpoint is marked once it is whole, after what other callbacks add to it. track: what reports its steps,
    given the first of them. FloatingPointError at a loss that is not finite.
    """
    trainer._get_train_sampler = _whole_batches(trainer, trainer._get_train_sampler)  # type: ignore[method-assign]
    trainer._run_epoch = _until_done(trainer, trainer._run_epoch)  # type: ignore[method-assign]
    trainer.add_callback(CompletionMarker())
    trainer.add_callback(StopOnNonFinite())
    if any(isinstance(callback, ProgressCallback) for callback in trainer.callback_handler.callbacks):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LossOnBar())
    step = last_whole_step(checkpoints)
    with track(trainer, step):
        trainer.train(resume_from_checkpoint=str(checkpoints / f"checkpoint-{step}") if step else None)


def _until_done(trainer: Trainer, run_epoch: Callable[..., None]) -> Callable[..., None]:
    """`run_epoch`, or nothing where training is over: transformers looks only after a step, so also if it resumes."""

    def run(**how: Any) -> None:
        if trainer.state.global_step < trainer.state.max_steps and not trainer.control.should_training_stop:
            run_epoch(**how)

    return run


class _FirstRows(Sampler[int]):
    """The first `count` rows of each epoch of `sampler`."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler, self.count = sampler, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, self.count)


def _whole_batches(trainer: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, a method that makes samplers, without the rows of an epoch that fill no global batch: loaders leave out
    what fills no micro-batch, so steps would depend on its size."""

    def sampler(*rows: Any) -> Any:
        made, size = make(*rows), trainer.get_total_train_batch_size(trainer.args)
        whole = len(made) // size * size
        if whole in (0, len(made)) or len(made) != len(trainer.train_dataset):
            return made
        if isinstance(made, RandomSampler):  # which accelerate seeds anew: it must stay one
            made._num_samples = whole
            return made
        return _FirstRows(made, whole)

    return sampler


def last_whole_step(checkpoints: Path) -> int:
    """The step of the newest Trainer checkpoint that carries its completion marker, 0 without one; drops those
    without."""
    steps = [0]
    for folder in checkpoints.glob("checkpoint-*"):
        if (folder / COMPLETE).is_file():
            steps.append(int(folder.name.rpartition("-")[2]))
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return max(steps)


def loss_history(state: TrainerState) -> list[list[float]]:
    """[[step, loss], …] of a finished training run."""
    return [[entry["step"], entry["loss"]] for entry in state.log_history if "loss" in entry]


def save_trained(trainer: Trainer, renderer: Renderer, target: Path, dtype: str) -> None:
    """Save what a trainer has trained as an ordinary checkpoint in `dtype`, its adapter merged, with a tokenizer that
    renders as the renderer does. Every process calls it."""
    tokenizer = tokenizer_as_trained(renderer)
    save_merged(trainer.accelerator, trainer.model, tokenizer, target, dtype, wrapped=trainer.model_wrapped)


def leave_out_router_loss(trainer: Any) -> None:
    """Trains on the trainer's own loss only, unless `router_aux_loss_coef` asks for TRL's load-balancing loss of
    experts."""
    if not trainer.args.router_aux_loss_coef:
        trainer.aux_loss_enabled = False
        config = trainer.model.config.get_text_config()
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False


class RowSftTrainer(SFTTrainer):
    """`SFTTrainer` on `input_ids` with `labels` of −100 at prompts. The loss: −log π of response tokens, their mean.

    Unlike TRL's, it computes logits of response tokens only, and texts share what they begin with. TRL's is used under
    `PRIVATE_RLHF_KERNELS=plain`, and for a router loss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        leave_out_router_loss(self)
        self._sharing = sharing_of(self.model)
        if not plain():
            take_batches(self.model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Summed over the batch and divided by the response tokens of all processes and accumulation steps."""
        if plain() or return_outputs or self.aux_loss_enabled:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        tokenizer: Any = self.processing_class
        device, labels = inputs["input_ids"].device, inputs["labels"].cpu()
        ids, real, is_target = inputs["input_ids"].cpu(), inputs["attention_mask"].cpu().bool(), labels != -100
        in_response = is_target.cumsum(dim=1) > 0
        prompts = [row[mask].tolist() for row, mask in zip(ids, real & ~in_response, strict=True)]
        signed = torch.where(is_target, ids, ~ids)  # tokens between the turns of a response are not learnt
        responses = [row[mask].tolist() for row, mask in zip(signed, real & in_response, strict=True)]
        batch = token_batch(prompts, responses, tokenizer.pad_token_id, device, sharing=self._sharing)
        count = is_target.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -model(token_batch=batch).sum() / count
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return loss
