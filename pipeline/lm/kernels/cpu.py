"""What the processor can do, as the libraries may use it: never by timing, so that the answer repeats."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

ATEN_AVX512 = frozenset({"AVX512", "AMX"})
"""Of `torch.backends.cpu.get_cpu_capability()`; ATEN_CPU_CAPABILITY lowers it."""

ONEDNN_BELOW_BFLOAT16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of ONEDNN_MAX_CPU_ISA that leave oneDNN without fast bfloat16 products."""


@dataclass(frozen=True)
class Processor:
    """Attributes:
    bfloat16: multiplies bfloat16 in hardware, and nothing holds that down.
    why: a few words on it.
    onednn: PyTorch can hand single products to oneDNN.
    slow_mkl: float32 products are MKL's, which keeps its fastest kernels for Intel's processors, and this is another.
    """

    bfloat16: bool
    why: str
    onednn: bool
    slow_mkl: bool


@functools.cache
def processor() -> Processor:
    """This machine's, with what the environment holds down."""
    bfloat16, why = fast_bfloat16(
        instructions=bfloat16_instructions(),
        capability=torch.backends.cpu.get_cpu_capability(),
        onednn_limit=os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "",
        onednn=torch.backends.mkldnn.is_available(),
    )
    return Processor(
        bfloat16,
        why,
        onednn=torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"),
        slow_mkl=torch.backends.mkl.is_available() and made_by_others(_cpuinfo()),
    )


def bfloat16_instructions() -> str | None:
    """The instructions for bfloat16 products that the processor has, whatever holds them down; None without any."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX-BF16"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else None


def fast_bfloat16(instructions: str | None, capability: str, onednn_limit: str, onednn: bool) -> tuple[bool, str]:
    """Whether bfloat16 products run on the hardware's own instructions, and why (not).

    oneDNN's own answer does not do: it says yes to any AVX-512, where bfloat16 is emulated and ten times slower.

    Args:
        instructions: see `bfloat16_instructions`.
        capability: ATen's, e.g. "AVX2".
        onednn_limit: ONEDNN_MAX_CPU_ISA, empty if unset.
        onednn: whether PyTorch has oneDNN, which does these products.
    """
    if instructions is None:
        return False, f"the CPU ({capability}) has neither AVX512-BF16 nor AMX and would emulate bfloat16"
    if capability not in ATEN_AVX512:
        return False, f"PyTorch is held down to {capability}"
    if onednn_limit.upper() in ONEDNN_BELOW_BFLOAT16:
        return False, f"oneDNN is held down to {onednn_limit.upper()}"
    if not onednn:
        return False, "this PyTorch has no oneDNN"
    return True, f"the CPU multiplies it in hardware ({instructions})"


def made_by_others(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo tells of an x86 processor that is not Intel's; False where it tells nothing."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip() != "GenuineIntel"
    return False


def _cpuinfo() -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return ""
