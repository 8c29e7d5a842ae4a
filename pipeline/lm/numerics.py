"""The numerics of a run: the dtype of its frozen weights, and the numeric context of its forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from private_rlhf.core.errors import UserError, say
from private_rlhf.core.world import World, broadcast, device_type
from private_rlhf.lm.kernels import KERNELS, plain, processor, runs
from private_rlhf.recipe import ModelConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

Dtype = Literal["float32", "bfloat16"]


def fast_dtype(device: str) -> tuple[Dtype, str]:
    """The dtype that a device of this type multiplies fast, and the reason; never float16. Not by timing: it repeats.

    UserError for an untested device.
    """
    if device == "cuda":
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        why = f"the GPU {'multiplies it in hardware' if bfloat16 else 'has no bfloat16'}"
    elif device == "cpu":
        bfloat16, why = processor().bfloat16, processor().why
    else:
        raise UserError(f"the device {device} is untested: set ACCELERATE_USE_CPU=true to run on the CPU")
    return ("bfloat16" if bfloat16 else "float32"), why


def affordable(dtype: torch.dtype, device: str) -> torch.dtype:
    """`dtype`, or float32 in place of a bfloat16 that the device would emulate."""
    return torch.float32 if dtype == torch.bfloat16 and fast_dtype(device)[0] != "bfloat16" else dtype


def resolve_dtype(model: ModelConfig, begun: Any, folder: Path, world: World) -> ModelConfig:
    """The section `model` with a stated dtype: its own, or for `auto` that of the run's first start, or the fast one.

    begun: the dtype of the first start; another value for a new run. A line on stderr, which may name `folder`, gives
    the reason. UserError for an untested device.
    """
    dtype: Dtype
    setting = model.dtype
    fast, why = fast_dtype(device_type())
    if setting != "auto":
        dtype, line = setting, None
    elif begun in ("float32", "bfloat16"):
        dtype, line = begun, None if begun == fast else f"model.dtype auto: {begun}, with which {folder} began"
    else:
        dtype, line = fast, f"model.dtype auto: {fast}; {why}"
    if dtype == "bfloat16" and fast != "bfloat16":
        line = (
            f"model.dtype bfloat16 is slow here ({why}): products take several times as long as with "
            f"model.dtype=float32{'' if setting != 'auto' else ', which starts the run anew'}"
        )
    if line and world.main:
        say(line)
    return replace(model, dtype=broadcast(dtype, world))  # machines may differ


def precision(accelerator: Accelerator) -> AbstractContextManager[None]:
    """The numeric context of every forward pass of π and π_ref: autocast by the launcher's `mixed_precision`. Enter it
    anew for each piece of work. A pass outside would differ by rounding, and the KL at the start would not be 0."""
    from accelerate.utils import AutocastKwargs

    # Within, autocast keeps its copies of float32 weights: split weights would be whole on every process by them.
    return accelerator.autocast(AutocastKwargs(cache_enabled=not accelerator.is_fsdp2))


def numeric_facts(dtype: str) -> dict[str, Any]:
    """The numerics of this machine for environment.json and the report. dtype: of the frozen weights."""
    device = device_type()
    return {
        "dtype": dtype,
        "dtype_reason": fast_dtype(device)[1],
        "device": device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kernels": "plain" if plain() else [name for name in KERNELS if runs(name, device)],
    }
