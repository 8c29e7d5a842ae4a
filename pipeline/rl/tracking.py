"""What trackers (TensorBoard, wandb, trackio) get of PPO: through accelerate, from the main process alone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_rlhf.core.errors import UserError
from private_rlhf.recipe import PpoConfig

if TYPE_CHECKING:
    from accelerate import Accelerator


def check_trackers(names: Sequence[str]) -> None:
    """Whether the trackers of ppo.report_to can be used.

    Raises:
        UserError: one is not installed; accelerate would leave it out without a word.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"ppo.report_to {name} needs {name}: install it with pip install {name}")


@contextlib.contextmanager
def tracked(accelerator: Accelerator, project: str, settings: PpoConfig, folder: Path, first: int) -> Iterator[None]:
    """Starts the trackers that the accelerator was made with and ends them with the block, however it ends.

    Args:
        accelerator: made with `log_with`.
        project: name under which trackers file the run.
        settings: the recipe's `ppo` section, whose plain values they get.
        folder: for what they write.
        first: iteration at which a resumed run goes on.
    """
    started = bool(accelerator.log_with) and accelerator.is_main_process  # some trackers start on every process
    if started:
        folder.mkdir(parents=True, exist_ok=True)
        accelerator.init_trackers(project, configuration(settings), offline_settings(folder, first))
    try:
        yield
    finally:
        if started:
            for tracker in accelerator.trackers:
                tracker.finish()


def offline_settings(folder: Path, first: int) -> dict[str, dict[str, Any]]:
    """How each tracker starts: on this machine, without a copy of what is printed, where samples are."""
    return {
        "tensorboard": {"purge_step": first} if first else {},
        "wandb": {
            "mode": os.environ.get("WANDB_MODE", "offline"),
            "dir": str(folder),
            "settings": {"console": "off"},
        },
    }


def configuration(settings: PpoConfig) -> dict[str, int | float | str | bool]:
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


def numbers(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of the history, those of a nested object under `outer/inner`; nothing else."""
    found: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
