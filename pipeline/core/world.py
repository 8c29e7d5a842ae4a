"""The process group, as the launcher's environment declares it; torch is imported only inside functions."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, TypeVar

from private_rlhf.core.errors import UserError

T = TypeVar("T")
LAUNCH = "on CPUs launch with 'ACCELERATE_USE_CPU=true private-rlhf launch --multi_gpu --num_processes N …'"


@dataclass(frozen=True)
class World:
    """The process group as the launcher declared it."""

    rank: int
    size: int

    @property
    def main(self) -> bool:
        return self.rank == 0


def declared_world() -> World:
    """RANK and WORLD_SIZE of the environment; a single process without them. UserError where they do not state a
    group: a process of rank 1 in a group of one would do nothing, and say nothing."""
    values = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    for name, value in values.items():
        if not value.isdecimal():
            raise UserError(f"the environment variable {name} is '{value}', not a number: unset it")
    world = World(rank=int(values["RANK"]), size=int(values["WORLD_SIZE"]))
    if world.rank >= world.size:
        raise UserError(f"RANK must be below WORLD_SIZE {world.size}, got {world.rank}: unset RANK, or use a launcher")
    return world


def wait_for_first(seconds: float = 10.0) -> None:
    """Under a launcher, give the first process of this machine time to report an error that all of them have met."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(seconds)


def global_batch(section: str, batch_size: int, micro_batch_size: int | None, world: World) -> tuple[int, int]:
    """(per-device batch, accumulation steps) whose product over processes is the global batch. UserError if none."""
    share, rest = divmod(batch_size, world.size)
    micro = min(micro_batch_size or share, share) if share else 0
    if rest or not micro or share % micro:
        raise UserError(
            f"{section}.batch_size {batch_size} must be a multiple of {world.size} process(es) × micro batch "
            f"{micro_batch_size or share}: change {section}.batch_size or {section}.micro_batch_size"
        )
    return micro, share // micro


def check_rows(count: int | None, section: str, batch_size: int) -> None:
    """Refuse (UserError) fewer rows to learn from than one batch of the section; None is a count that is not known."""
    if count is not None and count < batch_size:
        raise UserError(
            f"there are {count} texts or pairs to learn from, fewer than {section}.batch_size {batch_size}: "
            "lower it, or bring more data"
        )


def join_world() -> World:
    """The declared world, checked against accelerate's process group, which is started when there are several.

    UserError: accelerate counts other processes than WORLD_SIZE says, so gradients would silently not be shared; or
    no launcher set the address of several processes, and waiting for the others would fail only after half an hour.
    """
    declared = declared_world()
    if "WORLD_SIZE" not in os.environ:
        return declared
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if declared.size > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {declared.size} but {missing[0]} is not set, so no launcher started this process: "
            f"{LAUNCH}, or unset WORLD_SIZE"
        )
    actual = _process_state().num_processes
    if actual != declared.size:
        raise UserError(f"WORLD_SIZE is {declared.size} but accelerate runs {actual} process(es): {LAUNCH}")
    atexit.register(leave_world)
    return declared


def leave_world() -> None:
    """End the process group, if there is one: gloo's threads abort a process that exits while they still run.

    Call it once no model of the group is in use: a DDP model that outlives the group can hang (pytorch/pytorch#154976).
    """
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # trainers stand in cycles; their models must go first
        torch.distributed.destroy_process_group()


def barrier(world: World) -> None:
    """Wait for every process."""
    if world.size > 1:
        _process_state().wait_for_everyone()


def broadcast(value: T, world: World) -> T:
    """The main process's value, on every process."""
    if world.size == 1:
        return value
    from accelerate.utils import broadcast_object_list

    received: T = broadcast_object_list([value])[0]
    return received


def on_cpu() -> bool:
    """True where runs use the CPU: ACCELERATE_USE_CPU asks for it, or there is no accelerator."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_CPU")) or not torch.accelerator.is_available()


def device_type() -> str:
    """Of the device that runs use: `cpu`, `cuda`, …"""
    import torch

    device = None if on_cpu() else torch.accelerator.current_accelerator()
    return device.type if device is not None else "cpu"


def peak_gpu_mb() -> float | None:
    """Peak memory of tensors on this process's GPU since the last stage, MiB; None without a GPU."""
    torch = _torch_on_gpu()
    return None if torch is None else round(float(torch.cuda.max_memory_allocated()) / 2**20, 1)


def release_memory() -> None:
    """Free memory and accelerate's process-wide state of a stage, so that none leaks into the next."""
    gc.collect()
    if (torch := _torch_on_gpu()) is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()


def _torch_on_gpu() -> Any | None:
    """torch, if this process has used a GPU with it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _process_state() -> Any:
    """accelerate's view of the process group (gloo on CPUs)."""
    from accelerate import PartialState

    return PartialState(cpu=on_cpu())
