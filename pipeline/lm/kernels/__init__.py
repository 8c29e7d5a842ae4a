"""How products and attention are computed: each way that is not plain PyTorch, what it needs, and one switch for all.

`PRIVATE_RLHF_KERNELS=plain` turns all of them off. Results then differ by rounding alone, which tests check; a number
in doubt can be computed again without them. `python -m private_rlhf.lm.kernels` prints the table for this machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from private_rlhf.core.errors import UserError
from private_rlhf.lm.kernels.cpu import Processor, processor

SWITCH = "PRIVATE_RLHF_KERNELS"


@dataclass(frozen=True)
class Kernel:
    """Attributes:
    does: what it computes in another way than PyTorch or peft.
    needs: of machine and model, in words; the model's part is checked where the kernel stands.
    fits: whether a device of this type ("cpu", "cuda") on this processor has what it needs.
    """

    does: str
    needs: str
    fits: Callable[[str, Processor], bool]


KERNELS: dict[str, Kernel] = {
    "attention": Kernel(
        "grouped queries against each key and value once (`kernels.attention`)",
        "a CPU; a model that transformers runs with SDPA",
        lambda device, _: device == "cpu",
    ),
    "products": Kernel(
        "float32 linear layers by oneDNN instead of MKL (`kernels.products`)",
        "an x86 CPU that is not Intel's; float32 weights",
        lambda device, cpu: device == "cpu" and cpu.onednn and cpu.slow_mkl,
    ),
    "packed": Kernel(
        "weights laid out for the processor once, not at each decoded token (`kernels.packed`)",
        "a CPU: bfloat16 weights need its AVX512-BF16 or AMX, float32 ones the kernel `products`",
        lambda device, cpu: device == "cpu" and cpu.onednn and (cpu.bfloat16 or cpu.slow_mkl),
    ),
    "lora": Kernel(
        "LoRA layers in the dtype of their frozen base (`kernels.lora`)",
        "one plain adapter on whole, frozen, unquantised weights; no autocast",
        lambda device, _: True,
    ),
    "token_terms": Kernel(
        "log-probabilities and entropies with gradients in closed form, a few rows at a time (`kernels.token_terms`)",
        "any device",
        lambda device, _: True,
    ),
    "rows": Kernel(
        "what sequences begin with alike, prompts above all, once (`lm.rows`)",
        "a rotary decoder whose tokens meet in full causal attention alone (`lm.rows.FAMILIES`)",
        lambda device, _: True,
    ),
    "trunk": Kernel(
        "the frozen layers below a LoRA adapter once per rollout (`lm.trunk`)",
        "the same decoders, one process, `lora.last_layers`",
        lambda device, _: True,
    ),
}


@functools.cache
def plain() -> bool:
    """Whether the switch is set. UserError for another value than `plain` or nothing."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "plain"):
        raise UserError(f"the environment variable {SWITCH} is '{value}': set it to 'plain', or unset it")
    return value == "plain"


def runs(name: str, device: str = "cpu") -> bool:
    """Whether the kernel `name` is used on devices of type `device`."""
    return not plain() and KERNELS[name].fits(device, processor())
