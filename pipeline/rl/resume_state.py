"""Resume state of PPO: trainable weights, optimiser, controller and history, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from private_rlhf.core import atomic
from safetensors import safe_open
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

WEIGHTS = "trainable.safetensors"
REFERENCES = "references.safetensors"


def install_hooks(accelerator: Accelerator) -> None:
    """Makes `accelerator.save_state` keep trainable weights only: the frozen ones are those of π_ref.

    Where weights are split (FSDP, DeepSpeed) accelerate saves them all by itself and hands its hooks none.
    """

    def save(models: list[Any], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        if not weights:
            return
        weights.clear()  # accelerate's copy of everything, under DDP with every name prefixed by `module.`
        if accelerator.is_main_process:
            save_file(trainable_tensors(accelerator.unwrap_model(models[0])), os.path.join(folder, WEIGHTS))

    def load(models: list[Any], folder: str) -> None:
        path = os.path.join(folder, WEIGHTS)
        if os.path.isfile(path):
            model, kept = accelerator.unwrap_model(models.pop()), load_file(path)
            differing = trainable_tensors(model).keys() ^ kept.keys()
            if differing:
                raise RuntimeError(f"{path} is not of this model ({min(differing)}): delete the checkpoint folder")
            model.load_state_dict(kept, strict=False)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def trainable_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trainable parameters of a bare model by name; tied ones once."""
    named = model.named_parameters()
    return {name: parameter.detach().contiguous() for name, parameter in named if parameter.requires_grad}


def save(
    accelerator: Accelerator,
    folder: Path,
    iteration: int,
    state: dict[str, Any],
    references: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes `folder/step-N`; it carries this name only once it is whole. Older ones are removed. Collective.

    Args:
        accelerator: holds the model and its optimiser.
        folder: of all checkpoints of the stage.
        iteration: iterations done.
        state: JSON that `load_latest` gives back.
        references: what every process knows about reference completions; drawn again in batches of another make-up,
            they would differ in the last bit.
    """
    temporary, target = folder / f".step-{iteration}.tmp", folder / f"step-{iteration}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    fresh = [each for each in accelerator._optimizers if not each.state]
    accelerator.save_state(str(temporary))
    _forget(fresh)
    if references and accelerator.is_main_process:
        stacked = torch.stack(list(references.values())).cpu().contiguous()
        names = {"prompts": json.dumps(list(references))}
        save_file({"references": stacked}, temporary / REFERENCES, metadata=names)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / "state.json").write_text(json.dumps(state | {"no_moments": bool(fresh)}))
        atomic.sync_folder(temporary)
        os.replace(temporary, target)
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def load_latest(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Restores the newest whole checkpoint and returns its state, or None when there is none."""
    latest = _latest(folder)
    if latest is None:
        return None
    accelerator.load_state(str(latest))
    state: dict[str, Any] = json.loads((latest / "state.json").read_text())
    if state.pop("no_moments", False):
        _forget(accelerator._optimizers)
    return state


def latest_references(folder: Path) -> dict[str, torch.Tensor]:
    """The `references` that `save` was given for the newest whole checkpoint; empty without one."""
    latest = _latest(folder)
    path = latest / REFERENCES if latest is not None else None
    if path is None or not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        prompts = json.loads(file.metadata()["prompts"])
        return dict(zip(prompts, file.get_tensor("references").unbind(0), strict=True))


def kept(folder: Path) -> str:
    """A sentence that says which checkpoint there is."""
    latest = _latest(folder)
    return f"The last good checkpoint is {latest}" if latest is not None else "No checkpoint had been written yet"


def _forget(optimizers: Iterable[AcceleratedOptimizer]) -> None:
    """Empty the state of optimisers that have no moments yet: to write or read that of split weights, torch makes one
    and counts a step in it, and Adam's first true step would be a quarter shorter."""
    for each in optimizers:
        each.state.clear()


def _latest(folder: Path) -> Path | None:
    steps = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return steps[-1] if steps else None
