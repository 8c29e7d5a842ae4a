"""A GPU that is only pretended, on a machine that has none: devices, dtypes, memory, operations and waits of a program.

Tensors on the device `gpu` are torch's fake ones: they have a shape and a dtype and no numbers, and an operation on
tensors of two devices fails as it would on a GPU. Those on the CPU are real. Numbers that the host reads from the GPU
are made up, so that checks for NaN pass, and sampled responses go on to their cap.

Not pretended: CUDA graphs, the allocator's fragments, the work memory of kernels, time, and the waits of transformers'
checks of masks, which it leaves out for fake tensors. As far as torch can tell, a process that imports this has a GPU
to its end: give it one of its own.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainingArguments


class Backend(_DummyBackendModule):
    """The module that torch expects of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Dtypes that autocast may take."""
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("gpu", Backend())
GPU = torch.device("gpu", 0)
PIECE = 512
"""Bytes of which the allocator of CUDA gives out multiples."""
TOKEN, MANY = 7, 1 << 20
"""Integers that the host reads from the GPU: several are token ids, one is a count. Of other numbers, several are 1
and one is 0."""


class PretendedGpu(FakeTensorMode):
    """Runs what is on `gpu` with fake tensors, and counts.

    - live, peak: bytes of tensors on the GPU, now and at most.
    - waits: how often the host waited for a number of the GPU, by function of the project.
    - sends: how often it sent some, for which CUDA lets it wait as well unless told not to.
    - talks: how often processes joined in something on tensors of their GPUs.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live = self.peak = 0
        self.waits: Counter[str] = Counter()
        self.sends: Counter[str] = Counter()
        self.talks: Counter[str] = Counter()
        self.storages: set[int] = set()
        self.true: set[int] = set()
        self.sent: dict[int, Tensor] = {}

    @property
    def avoid_device_init(self) -> bool:
        """True: nothing is made on a device that is not there."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        fakes = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        name = func._schema.name.removeprefix("aten::")
        if not fakes and (target is None or target.type == "cpu" or name.endswith("pin_memory")):
            return args[0] if name.endswith("pin_memory") else func(*args, **kwargs)
        if func.namespace == "c10d":  # numbers are made up: none need to be sent
            self.talks[place()] += 1
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            with torch._C._DisableTorchDispatch():
                return args[0], torch.ops.c10d.barrier(fakes[0], group, [])
        if name == "_local_scalar_dense":
            return self._read(fakes[0]).item()
        if fakes and target is not None and target.type == "cpu":
            return self._read(fakes[0]).to(kwargs.get("dtype") or fakes[0].dtype)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].copy_(self._read(fakes[0]))
        if name == "nonzero":  # all of them: masks of rows of unequal length are beyond it
            self._wait()
            return self._new((fakes[0].numel(), fakes[0].dim()), torch.int64)
        if target is not None:
            kwargs |= {"device": GPU} | ({"pin_memory": False} if "pin_memory" in kwargs else {})
            if name == "_to_copy" and not fakes:
                if not kwargs.get("non_blocking"):
                    self.sends[place()] += 1
                made = self._new(tuple(args[0].shape), kwargs.get("dtype") or args[0].dtype)
                self.sent[made.untyped_storage()._cdata] = args[0]
                return made
        if func._schema.is_mutable and isinstance(args[0], FakeTensor):
            self.sent.pop(args[0].untyped_storage()._cdata, None)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        converter = self.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()  # weak references forbid modules to move
        converter.describer.lookup_tensor.clear()
        for each in tree_leaves(result):
            if isinstance(each, FakeTensor) and each.device == GPU:
                self._count(each.untyped_storage(), true=name in ("all", "isfinite"))
        return result

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self:
            return torch.empty(shape, dtype=dtype, device=GPU)

    def _read(self, fake: Tensor) -> Tensor:
        """Numbers in place of those of `fake`, for which the host waits; those that it sent, where it sent them."""
        self._wait()
        key = fake.untyped_storage()._cdata
        sent = self.sent.get(key)
        if sent is not None and sent.shape == fake.shape:
            return sent.to(fake.dtype)
        value: float = key in self.true
        if fake.dtype == torch.int64:
            value = TOKEN if fake.dim() else MANY
        elif fake.is_floating_point() and fake.dim():
            value = 1.0
        return torch.full(fake.shape, value, dtype=fake.dtype)

    def _count(self, storage: Any, true: bool) -> None:
        """Adds a storage to those that live, until it is gone. true: what the host reads of it is."""
        key = storage._cdata
        if key not in self.storages:
            self.storages.add(key)
            size = -(-storage.nbytes() // PIECE) * PIECE
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)
        if true:
            self.true.add(key)

    def _free(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.true.discard(key)
        self.sent.pop(key, None)
        self.live -= size

    def _wait(self) -> None:
        self.waits[place()] += 1


def place() -> str:
    """The innermost function of the project that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("private_rlhf."):
        frame = frame.f_back
    name = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}" if frame else "elsewhere"
    return name.removeprefix("private_rlhf.")


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that CUDA has for any mask: it keeps no weights."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    attended: Tensor = kernel(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
    return attended


@contextmanager
def pretended_gpu() -> Iterator[tuple[PretendedGpu, FlopCounterMode]]:
    """Within, accelerate and transformers take the GPU; yields it, and the counter of its operations."""
    gpu, operations = PretendedGpu(), FlopCounterMode(display=False)
    with ExitStack() as stack:
        # A fake tensor would read its list number by number, where a GPU sends all of them at once.
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(PartialState, "default_device", GPU))
        arguments = property(lambda arguments: arguments._setup_devices and GPU)  # which begin accelerate's state
        stack.enter_context(mock.patch.object(TrainingArguments, "device", arguments))
        AcceleratorState._reset_state(reset_partial_state=True)
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield stack.enter_context(gpu), stack.enter_context(operations)

