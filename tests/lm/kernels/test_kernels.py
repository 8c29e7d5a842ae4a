"""The table of kernels, the one switch, and what the processor is taken for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.lm import kernels
from private_rlhf.lm.kernels import (
    KERNELS,
    SWITCH,
    Processor,
    bfloat16_instructions,
    fast_bfloat16,
    plain,
    processor,
    runs,
)

AMX = {"instructions": "AMX-BF16", "capability": "AVX512", "onednn_limit": "", "onednn": True}


@pytest.mark.parametrize(
    ("changed", "fast", "why"),
    [
        ({}, True, "AMX-BF16"),
        ({"instructions": "AVX512-BF16"}, True, "AVX512-BF16"),
        ({"onednn_limit": "AVX512_CORE_BF16"}, True, "hardware"),
        ({"onednn_limit": "default"}, True, "hardware"),
        ({"instructions": None}, False, "emulate"),
        ({"instructions": None, "capability": "AVX2"}, False, "AVX2"),
        ({"capability": "AVX2"}, False, "PyTorch is limited to AVX2"),
        ({"capability": "DEFAULT"}, False, "limited to DEFAULT"),
        ({"onednn_limit": "AVX512_CORE"}, False, "oneDNN is limited to AVX512_CORE"),
        ({"onednn_limit": "avx2"}, False, "oneDNN is limited to AVX2"),
        ({"onednn": False}, False, "no oneDNN"),
    ],
)
def test_bfloat16_is_fast_only_where_nothing_holds_it_down(changed: dict[str, Any], fast: bool, why: str) -> None:
    found, reason = fast_bfloat16(**{**AMX, **changed})
    assert found is fast
    assert why in reason


def test_the_instructions_are_those_that_pytorch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert bfloat16_instructions() is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert bfloat16_instructions() == "AVX512-BF16"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert bfloat16_instructions() == "AMX-BF16"


@pytest.mark.thorough
def test_a_machine_that_is_held_down_says_so() -> None:
    """In a process of its own, as these are read once."""
    code = "from private_rlhf.lm.kernels import processor as p; print(p().bfloat16, p().why)"
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    for name, value in held.items():
        environment = {**_environment(), name: value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.startswith("False"), name


def _environment() -> dict[str, str]:
    import os

    from support.pipeline_runs import clean_environment

    return clean_environment() | {"PATH": os.environ["PATH"]}


def test_each_kernel_runs_where_the_table_says(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["private_rlhf.lm.kernels"]
    everywhere = {"lora", "token_terms", "rows", "trunk"}
    for bfloat16, names in ((False, set()), (True, {"packed"})):
        monkeypatch.setattr(package, "processor", lambda b=bfloat16: Processor(b, ""))
        assert {name for name in KERNELS if runs(name, "cpu")} == {"attention"} | everywhere | names
        assert {name for name in KERNELS if runs(name, "cuda")} == everywhere | {"replay"}


def test_one_switch_turns_all_of_them_off(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain()
    assert runs("rows")
    monkeypatch.setenv(SWITCH, "plain")
    plain.cache_clear()
    assert plain()
    assert not any(runs(name, device) for name in KERNELS for device in ("cpu", "cuda"))
    monkeypatch.setenv(SWITCH, "off")
    plain.cache_clear()
    with pytest.raises(UserError, match=f"{SWITCH} must be 'plain' or unset, got 'off'"):
        plain()


def test_the_table_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "private_rlhf.lm.kernels"],
        capture_output=True, text=True, env=_environment(), check=True,
    )
    assert all(f"\n{name}" in done.stdout for name in KERNELS)
    assert processor().why in done.stdout
    assert kernels.__doc__
