"""The records of a stage as it learns: reports to trackers by accelerate, and PPO's samples.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.tracking import filter_trackers
from private_rlhf.core import atomic
from private_rlhf.data.render import preview
from transformers import TrainerCallback

if TYPE_CHECKING:
    from accelerate import Accelerator
    from private_rlhf.rl.ppo_trainer import PpoTrainer
    from private_rlhf.rl.rollout import Rollout
    from transformers import Trainer, TrainerState


@contextlib.contextmanager
def run_trackers(
    accelerator: Accelerator, names: Sequence[str], project: str, settings: object, folder: Path, first: int
) -> Iterator[None]:
    """Starts the trackers and ends them with the block, however it ends.

    They file the run under `project`, get the plain values of `settings`, and write to `folder`. first: iteration at
    which a resumed run goes on.
    """
    started = bool(names) and accelerator.is_main_process  # some trackers start on every process
    with local_mlflow(folder):
        if started:
            folder.mkdir(parents=True, exist_ok=True)
            accelerator.log_with = filter_trackers(list(names), folder)
            accelerator.project_configuration.logging_dir = str(folder)
            accelerator.init_trackers(project, configuration(settings), offline_settings(folder, first))
        try:
            yield
        finally:
            for tracker in accelerator.trackers if started else ():
                tracker.finish()


@contextlib.contextmanager
def track_trainer(
    names: Sequence[str], project: str, settings: object, folder: Path, trainer: Trainer, first: int
) -> Iterator[None]:
    """`run_trackers` for a trainer of transformers, whose steps are reported within the block; first: of them."""
    trainer.add_callback(StepReports(trainer.accelerator))
    with run_trackers(trainer.accelerator, names, project, settings, folder, first):
        yield


class StepReports(TrainerCallback):
    """Hands the numbers of each step that a trainer logs to the trackers of its accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        report(self.accelerator, {"iteration": state.global_step, **(logs or {})})


@contextlib.contextmanager
def local_mlflow(folder: Path) -> Iterator[None]:
    """Within, MLflow writes to `folder` and tells nobody that it is used, unless its variables say otherwise."""
    here = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder.resolve()}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    absent = {name: value for name, value in here.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)


def offline_settings(folder: Path, first: int) -> dict[str, dict[str, Any]]:
    """Settings of each tracker: on this machine, without a copy of what is printed, where samples are."""
    local = str(folder.resolve()) in os.environ.get("MLFLOW_TRACKING_URI", "")
    return {
        "mlflow": {"logging_dir": str(folder.resolve() / "artifacts")} if local else {},  # not in ./mlruns
        "tensorboard": {"purge_step": first} if first else {},
        "wandb": {
            "mode": os.environ.get("WANDB_MODE", "offline"),
            "dir": str(folder),
            "settings": {"console": "off"},
        },
    }


def configuration(settings: object) -> dict[str, int | float | str | bool]:
    """The keys of the section that hold a number, a text or a truth value."""
    return {key: value for key, value in vars(settings).items() if isinstance(value, int | float | str)}


def report(accelerator: Accelerator, entry: Mapping[str, Any], sample: str | None = None) -> None:
    """Hands one line of the history to the trackers, and a sample where there is one to hand on."""
    if not accelerator.is_main_process or not accelerator.trackers:
        return
    values: dict[str, Any] = numbers(entry)
    if sample is not None:
        values["sample"] = sample
    accelerator.log(values, step=int(entry["iteration"]))


def hand_over(accelerator: Accelerator, files: Sequence[Path]) -> None:
    """Hands text files to the running trackers: artefacts to MLflow and wandb, and Markdown as text to the others."""
    for tracker in accelerator.trackers:
        for file in files:
            if tracker.name == "mlflow":
                tracker.log_artifact(str(file))
            elif tracker.name == "wandb":
                tracker.tracker.save(str(file), base_path=str(file.parent), policy="now")
            elif file.suffix == ".md":
                tracker.log({file.stem: file.read_text(encoding="utf-8")}, step=0)


def numbers(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of the history, those of a nested object under `outer/inner`; nothing else."""
    found: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found


SAMPLES = "samples.jsonl"
SHOWN_WIDTH = 80  # characters


def sample_rows(trainer: PpoTrainer, rollout: Rollout, iteration: int) -> list[dict[str, Any]]:
    """Evenly spaced responses of an iteration as JSON types; none where ppo.sample_every leaves it out.

    A row is {iteration, prompt, response, reward (r̄), bonus (Γ), kl (nats), tokens}, and `extra_rewards` by name where
    there are any. It is a function of the rollout only, so that an iteration that is repeated gives the same rows.
    """
    settings, total = trainer.config, len(rollout.responses)
    if not settings.sample_every or iteration % settings.sample_every:
        return []
    count = min(settings.sample_count, total)
    return [_row(trainer, rollout, iteration, place * total // count) for place in range(count)]


def _row(trainer: PpoTrainer, rollout: Rollout, iteration: int, row: int) -> dict[str, Any]:
    extra = {reward.name: float(rollout.extra[row, k]) for k, reward in enumerate(trainer.extra_rewards)}
    return {
        "iteration": iteration,
        "prompt": trainer.prompt_of(iteration, row),
        "response": trainer.renderer.text(rollout.responses[row]),
        "reward": float(rollout.reward[row]),
        "bonus": float(rollout.bonus[row]),
        "kl": float(rollout.kl[row]),
        "tokens": len(rollout.responses[row]),
        **({"extra_rewards": extra} if extra else {}),
    }


def append_samples(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Adds rows to a JSON Lines file, each on the disk before the next."""
    if rows:
        with atomic.appending(path) as append:
            for row in rows:
                append(row)


def forget_samples(path: Path, iteration: int) -> None:
    """Drops the rows from `iteration` on, which is done again, and a last line that a kill cut short.

    The file goes when nothing is left of it.
    """
    kept = [row for row in atomic.read_rows(path) if row["iteration"] < iteration]
    if kept:
        atomic.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    else:
        path.unlink(missing_ok=True)


def sample_line(row: dict[str, Any]) -> str:
    """A row as one line for the log."""
    return (
        f"{preview(row['prompt'])} → {preview(row['response'], SHOWN_WIDTH)} "
        f"(r̄ {row['reward']:.2f}, Γ {row['bonus']:.2f}, KL {row['kl']:.2f}, {row['tokens']} tokens)"
    )
