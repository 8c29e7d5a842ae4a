"""Starting accelerate, and weights split over processes: torch's fully_shard (FSDP2), through accelerate's plugin.

Every forward pass gathers whole weights, layer by layer, from all processes. So each pass is a joint one: a process
without work runs a stand-in, and passes go through the root module, whose hooks gather what belongs to no layer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from peft.tuners.tuners_utils import BaseTunerLayer
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World, on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


def make_accelerator(world: World) -> Accelerator:
    """An Accelerator on the machine's device, the CPU where there is no GPU.

    UserError where accelerate sees another number of processes than `world`, which the launcher declared.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers loads all models in one process only
    accelerator = Accelerator(cpu=on_cpu())
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


def prepare(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """As `accelerator.prepare`, with each layer of the policy split over the processes if the launcher asks for it.
    Weights keep the recipe's dtypes: the launcher's mixed_precision is autocast (`numerics.precision`)."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare(model, optimizer)
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = None
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("FULL_STATE_DICT")  # loaded as weights only; shards come with a pickled index
    split, optimizer = accelerator.prepare(model, optimizer)
    register_fsdp_forward_method(split, "read")
    return split, optimizer


def split_frozen(accelerator: Accelerator, model: Any) -> Any:
    """A frozen `model` on the run's device, each layer split if the launcher asks for it; in place."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    whole = set(getattr(model, "_no_split_modules", None) or [])
    for layer in [module for module in model.modules() if type(module).__name__ in whole]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def keep_gathered(accelerator: Accelerator, model: Any, once: bool) -> Iterator[None]:
    """Within, a layer of split weights stays whole once a forward pass has gathered it: nothing may learn meanwhile.

    once: False changes nothing: every forward pass gathers each layer, and frees it again.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)] if once else []
    layers = [part for part in parts if part is not model]  # what belongs to no layer stays whole after a pass anyway
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(bool(accelerator.state.fsdp_plugin.reshard_after_forward), recurse=False)
        if once:
            free(model)


def free(model: Any) -> None:
    """Frees the split weights that a forward pass has gathered; those outside of layers would stay whole."""
    for part in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        part.reshard()


def is_sharded(model: Any) -> bool:
    """True if the weights are split over processes, by torch's fully_shard or DeepSpeed ZeRO-3."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def largest(number: int, device: torch.device) -> int:
    """The largest of the numbers that the processes give; every one of them calls it."""
    maximum = torch.tensor(number, device=device)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
    return int(maximum)


def turns(items: Sequence[Sequence[T]], device: torch.device, together: bool) -> Iterator[Sequence[T]]:
    """Each of `items`; then, where the processes go `together`, empty ones until the last of them is done."""
    for number in range(largest(len(items), device) if together else len(items)):
        yield items[number] if number < len(items) else ()


@contextlib.contextmanager
def adapter_off(policy: Any) -> Iterator[None]:
    """The policy without its LoRA adapter, which is π_ref.

    peft's own `disable_adapter` freezes the adapter as well, as fully_shard would then remember it.
    """
    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, whether or not it is split. Every process calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put_back(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes a whole tensor into a parameter, split or not; every process has it."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    parameter.copy_(whole)


@torch.no_grad()
def whole_model(model: T, again: Callable[[], T]) -> T:
    """`model`, or if its weights are split a copy with whole ones on the model that `again` makes, not wrapped. Every
    process calls it."""
    trained: Any = model
    if not any(isinstance(parameter, DTensor) for parameter in trained.parameters()):
        return model
    copy: Any = again()
    places = copy.state_dict()
    for name, tensor in trained.state_dict().items():
        places[name].copy_(whole_tensor(tensor))
    return copy


def as_number(norm: torch.Tensor | None) -> float:
    """A gradient norm as `clip_grad_norm_` gives it: of split weights each process may hold its part of the sum."""
    return 0.0 if norm is None else float(whole_tensor(norm))
