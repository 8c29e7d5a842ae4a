"""What is made for processors stays on them: neither modules nor operations of theirs are met on the GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.machine import make_trainer
from private_rlhf.lm.kernels import KERNELS, runs
from private_rlhf.lm.kernels.attention import NAME as GROUPED
from private_rlhf.lm.models import unwrap
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.gpu

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "_linear_pointwise"}


class Met(TorchDispatchMode):
    """Counts (operation, devices, dtype) of what is computed within."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors[:1]:
            self.seen[str(func), tensor.device.type, tensor.dtype] += 1
        return func(*args, **(kwargs or {}))


def base_of(name: str) -> str:
    """`aten.mm.default` -> `mm`."""
    return name.split(".")[1]


def test_the_table_runs_none_that_needs_a_cpu() -> None:
    assert {name for name, kernel in KERNELS.items() if "CPU" in kernel.needs and runs(name, "cuda")} == set()
    assert any(runs(name, "cuda") for name in KERNELS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_modules_on_the_gpu_are_not_made_for_the_cpu(checkpoint_path: Path, device: torch.device, dtype: str) -> None:
    """Policy and reward model as PPO holds them, loaded before they are moved."""
    trainer = make_trainer(checkpoint_path, device, dtype)
    models: dict[str, nn.Module] = {"policy": trainer.policy, "reward": trainer.scorer.checkpoint.model.model}
    for name, model in models.items():
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device.type}, name
        config: Any = unwrap(model).config
        if not runs("attention", device.type):
            assert config._attn_implementation != GROUPED, name


def test_an_iteration_computes_nothing_of_the_model_on_the_cpu(checkpoint_path: Path, device: torch.device) -> None:
    """Γ alone is computed on the CPU, in float64."""
    trainer = make_trainer(checkpoint_path, device, "bfloat16")
    with Met() as met:
        rollout, _ = trainer.collect(0)
        trainer.update(rollout, 0)
    products = {(base_of(name), where, dtype) for name, where, dtype in met.seen if base_of(name) in PRODUCTS}
    assert any(where == device.type for _, where, _ in products)
    if device.type != "cpu":
        assert not {name for name, _, _ in met.seen if "mkldnn" in name or "for_cpu" in name}
        assert {dtype for _, where, dtype in products if where == "cpu"} <= {torch.float64}
