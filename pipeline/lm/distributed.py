"""Starting accelerate for a stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, parse_flag_from_env
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World, on_cpu


def make_accelerator(world: World, trackers: Sequence[str] = (), logs: Path | None = None) -> Accelerator:
    """An Accelerator on the machine's device; stays on the CPU where there is no GPU.

    Args:
        world: as the launcher declared it.
        trackers: names of trackers, not yet started.
        logs: folder for trackers that write files.

    Raises:
        UserError: it sees another number of processes than the launcher declared.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers loads all models in one process only
    places = ProjectConfiguration(logging_dir=str(logs)) if logs is not None else None
    accelerator = Accelerator(cpu=on_cpu(), log_with=list(trackers) or None, project_config=places)
    if accelerator.num_processes != world.size:
        raise UserError(
            f"WORLD_SIZE is {world.size} but accelerate runs {accelerator.num_processes} process(es): "
            "see launch/README.md for how to start several CPU processes"
        )
    obey_on_cpus()
    return accelerator


def obey_on_cpus() -> None:
    """Obeys the launcher's FSDP settings on CPUs too, where accelerate would silently keep whole weights.

    Every Accelerator that is made next shares the state that is changed here; `TrainingArguments` make a fresh one.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or not on_cpu() or PartialState(cpu=True).num_processes == 1:
        return
    state = Accelerator(cpu=True).state
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP
