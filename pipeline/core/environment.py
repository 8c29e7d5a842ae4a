"""The installation and the machine: extras and their modules, how threads wait, versions, commit and hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from private_rlhf.core import code
from private_rlhf.core.errors import UserError

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "private-rlhf")
EXTRAS = {
    "train": ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "requests", "jinja2"),
    "report": ("jinja2", "markupsafe", "matplotlib"),
    "validate": ("gymnasium", "ale_py", "matplotlib", "torch", "safetensors"),
    "label": ("starlette", "uvicorn", "h11", "segno"),
    "audit": ("torch", "transformers"),
    "demo": ("vaderSentiment",),
    "quant": ("bitsandbytes",),
}
"""Extra of pyproject.toml -> the modules by which it is recognised. The base privatises, accounts and attacks."""


def check_installed(*extras: str) -> None:
    """Check that the extras are installed. UserError, with the line that installs it, for one that is not."""
    for extra in extras:
        missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
        if missing:
            raise UserError(f"{missing[0]} is not installed: {remedy(extra)}")


def extra_of(error: ModuleNotFoundError) -> str | None:
    """The first extra that brings the module that was not found; None where none does."""
    name = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if name in modules), None)


def remedy(extra: str) -> str:
    """The line that installs a missing extra."""
    return f"pip install 'private-rlhf[{extra}]' brings it"


WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""A thousand turns (GNU's OpenMP, in PyTorch's wheels) or a millisecond (Intel's), in which a thread waits awake.

By default it spins for longer. Where another process has one of two cores, it then burns the time of the thread that it
waits for, and a run becomes 3 to 20 times slower. On an idle machine these cost nothing.
"""


def wait_briefly() -> None:
    """Set `WAITING` for this process and those it starts, unless the environment sets how threads wait.

    Call it before PyTorch is imported: an OpenMP runtime reads them once, as it is loaded.
    """
    if not {"OMP_WAIT_POLICY", *WAITING} & os.environ.keys():
        os.environ.update(WAITING)


def calm_bars() -> None:
    """Let progress bars print a line every half minute, without moving the cursor, where they go to a file.

    Call it before tqdm is imported, which reads the variable once. It is for the processes that this one starts, too.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")
        os.environ.setdefault("TQDM_POSITION", "0")  # an inner bar would go a line down and up again: ESC[A


def commit() -> dict[str, Any]:
    """The git commit of the source tree, and whether tracked files differ from it; nulls outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    git: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "check": True}
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], **git)
        status = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **git)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, as saved with every run."""
    versions: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for library in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {
        **commit(),
        "code_digest": code.digest_of(code.all_files()),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": accelerators(),
        "versions": versions,
    }


def cpu_model() -> str | None:
    """The processor's name where the system tells it."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def accelerators() -> list[str]:
    """Names of the NVIDIA GPUs that the driver lists; empty on a machine without."""
    paths = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 * 1024 if sys.platform == "darwin" else 1024), 1)
