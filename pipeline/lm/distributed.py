"""Starting accelerate for a stage."""

from __future__ import annotations

from accelerate import Accelerator

from pipeline.core.errors import UserError
from pipeline.core.world import World, on_cpu


def make_accelerator(world: World) -> Accelerator:
    """An Accelerator on the machine's device; stays on the CPU where there is no GPU.

    Raises:
        UserError: it sees another number of processes than the launcher declared.
    """
    accelerator = Accelerator(cpu=on_cpu())
    if accelerator.num_processes != world.size:
        raise UserError(
            f"WORLD_SIZE is {world.size} but accelerate runs {accelerator.num_processes} process(es): "
            "see launch/README.md for how to start several CPU processes"
        )
    return accelerator
