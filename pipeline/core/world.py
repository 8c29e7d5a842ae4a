"""How many processes there are and which one this is, from the launcher's environment; no torch import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import UserError


@dataclass(frozen=True)
class World:
    """The process group as the launcher declared it."""

    rank: int
    size: int

    @property
    def main(self) -> bool:
        return self.rank == 0


def declared_world() -> World:
    """RANK and WORLD_SIZE of the environment; a single process without them."""
    return World(rank=int(os.environ.get("RANK", "0")), size=int(os.environ.get("WORLD_SIZE", "1")))


def join_world() -> World:
    """The declared world, checked against accelerate's process group, which is started when there are several.

    Raises:
        UserError: accelerate sees another number of processes than WORLD_SIZE says, so that gradients would
            silently not be shared.
    """
    declared = declared_world()
    if "WORLD_SIZE" not in os.environ:
        return declared
    actual = _process_state().num_processes
    if actual != declared.size:
        raise UserError(
            f"WORLD_SIZE is {declared.size} but accelerate runs {actual} process(es): on CPUs launch with "
            "'ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N …'"
        )
    return declared


def barrier(world: World) -> None:
    """Waits for every process."""
    if world.size > 1:
        _process_state().wait_for_everyone()


def on_cpu() -> bool:
    """Whether to run on the CPU: asked for by ACCELERATE_USE_CPU, or because there is no accelerator."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_CPU")) or not torch.accelerator.is_available()


def _process_state() -> Any:
    """accelerate's view of the process group (gloo on CPUs)."""
    from accelerate import PartialState

    return PartialState(cpu=on_cpu())
