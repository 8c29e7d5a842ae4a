"""The kernels that are not plain PyTorch, the processor that they need, and one switch for all of them.

`PRIVATE_RLHF_KERNELS=plain` turns all of them off. Results then differ only by rounding, which tests check; a number
in doubt can be computed again without them. `python -m private_rlhf.lm.kernels` prints the table for this machine.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
from private_rlhf.core.errors import UserError

SWITCH = "PRIVATE_RLHF_KERNELS"
ATEN_AVX512 = frozenset({"AVX512", "AMX"})
"""Of `torch.backends.cpu.get_cpu_capability()`; ATEN_CPU_CAPABILITY lowers it."""

ONEDNN_BELOW_BFLOAT16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of ONEDNN_MAX_CPU_ISA that leave oneDNN without fast bfloat16 products."""


class Processor(NamedTuple):
    """bfloat16: it multiplies bfloat16 in hardware, and nothing limits that. why: a few words on it."""

    bfloat16: bool
    why: str


class Kernel(NamedTuple):
    """does: the way in which it computes. needs: of machine and model, in words. device: the only type it is for."""

    does: str
    needs: str
    device: str | None = None


KERNELS = {
    "attention": Kernel(
        "grouped queries against each key and value once (`kernels.attention`)",
        "a CPU; a model that transformers runs with SDPA",
        device="cpu",
    ),
    "packed": Kernel(
        "weights laid out for the processor once, not at each decoded token (`kernels.linear_layers`)",
        "bfloat16 weights on a CPU with AVX512-BF16 or AMX",
        device="cpu",
    ),
    "lora": Kernel(
        "LoRA layers in the dtype of their frozen base (`kernels.linear_layers`)",
        "one plain adapter on whole, frozen, unquantised weights; no autocast",
    ),
    "token_terms": Kernel(
        "log-probabilities and entropies with gradients in closed form, a few rows at a time (`kernels.token_terms`)",
        "any device",
    ),
    "rows": Kernel(
        "prefixes that sequences share, prompts above all, once (`lm.rows`)",
        "a rotary decoder whose tokens meet in full causal attention only (`lm.rows.FAMILIES`)",
    ),
    "replay": Kernel(
        "the step of a decoded token recorded as a CUDA graph, whose kernels start as one (`kernels.recorded_step`)",
        "a CUDA GPU; the decoders of `rows`, unquantised and in one piece; no autocast",
        device="cuda",
    ),
    "trunk": Kernel(
        "the frozen layers below a LoRA adapter once per rollout (`lm.logprobs`)",
        "the same decoders, one process, `lora.last_layers`",
    ),
}


@functools.cache
def plain() -> bool:
    """True if the switch is set. UserError for another value than `plain` or nothing."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "plain"):
        raise UserError(f"{SWITCH} must be 'plain' or unset, got '{value}': set it to 'plain', or unset it")
    return value == "plain"


def runs(name: str, device: str = "cpu") -> bool:
    """True if the kernel `name` is used on devices of type `device`."""
    fits = KERNELS[name].device in (None, device)
    return fits and not plain() and (name != "packed" or processor().bfloat16)


@functools.cache
def processor() -> Processor:
    """The processor of this machine, within the limits of the environment."""
    return fast_bfloat16(
        instructions=bfloat16_instructions(),
        capability=torch.backends.cpu.get_cpu_capability(),
        onednn_limit=os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "",
        onednn=torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    )


def bfloat16_instructions() -> str | None:
    """The processor's instructions for bfloat16 products, whatever limits them; None without any."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX-BF16"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else None


def fast_bfloat16(instructions: str | None, capability: str, onednn_limit: str, onednn: bool) -> Processor:
    """oneDNN says yes to any AVX-512, where bfloat16 is emulated and ten times slower. capability: ATen's, e.g. "AVX2".
    onednn_limit: ONEDNN_MAX_CPU_ISA, empty if unset. onednn: PyTorch has it and can hand single products to it."""
    if instructions is None:
        return Processor(False, f"the CPU ({capability}) has neither AVX512-BF16 nor AMX and would emulate bfloat16")
    if capability not in ATEN_AVX512:
        return Processor(False, f"PyTorch is limited to {capability}")
    if onednn_limit.upper() in ONEDNN_BELOW_BFLOAT16:
        return Processor(False, f"oneDNN is limited to {onednn_limit.upper()}")
    if not onednn:
        return Processor(False, "this PyTorch has no oneDNN")
    return Processor(True, f"the CPU multiplies it in hardware ({instructions})")
