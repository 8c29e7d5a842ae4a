"""The run directory: one folder per stage, each complete exactly when its `manifest.json` exists.

runs/NAME/recipe.yaml            the resolved recipe of the last start
runs/NAME/environment.json       versions, commit, hardware
runs/NAME/STAGE/manifest.json    written last; fingerprint, seconds, memory, world size, what the stage reports
runs/NAME/STAGE/…                what the stage releases: safetensors, JSON, Parquet, HTML
runs/NAME/checkpoints/STAGE/…    resume state, removed when the stage completes; never released
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic, code
from private_rlhf.core.documents import DocumentError, read_json, read_mapping
from private_rlhf.core.errors import UserError

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "private-rlhf")


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory."""

    root: Path

    def stage(self, name: str) -> Path:
        """Folder of what stage `name` releases."""
        return self.root / name

    @property
    def released(self) -> Path:
        """Folder of the stage that released the labels: of questions that this run asked, else of what was brought."""
        return next((self.stage(name) for name in ("online", "privatize") if (self.stage(name) / "release").is_dir()),
                    self.stage("privatize"))  # fmt: skip

    def checkpoints(self, name: str) -> Path:
        """Folder of the resume state of stage `name`."""
        return self.root / "checkpoints" / name

    def manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest of a completed stage, or None."""
        path = self.stage(name) / "manifest.json"
        if not path.is_file():
            return None
        try:
            content = read_json(path)
        except DocumentError:
            raise UserError(f"{path} is damaged: delete the folder {path.parent} and run the stage again") from None
        if not isinstance(content, dict):
            raise UserError(f"{path} is damaged: delete the folder {path.parent} and run the stage again")
        return content

    def require(self, name: str) -> dict[str, Any]:
        """The manifest of stage `name`; `UserError` when it has not completed."""
        manifest = self.manifest(name)
        if manifest is None:
            command = f"private-rlhf run --only {name}"
            raise UserError(f"{self.root} holds no completed stage '{name}': run it first ({command})")
        return manifest

    def changed_code(self, name: str, files: Mapping[str, str]) -> list[str]:
        """The source files in which the program that made stage `name` differs from `files` (see `code.source_files`);
        none if it is the same one, or was accepted, or did not say what it was made of, as earlier versions."""
        manifest = self.manifest(name) or {}
        made_of = manifest.get("code_files")
        if made_of is None or code.digest_of(files) in (manifest.get("code"), manifest.get("accepted_code")):
            return []
        return sorted(path for path in made_of.keys() | files.keys() if made_of.get(path) != files.get(path))

    def accept_code(self, name: str, files: Mapping[str, str]) -> None:
        """Notes that the result of stage `name` may stand beside what `files` would make."""
        manifest = self.require(name) | {"accepted_code": code.digest_of(files)}
        atomic.write_json(self.stage(name) / "manifest.json", manifest)

    def check(self, name: str) -> None:
        """Refuses a directory that a recipe of another name made, or that is something else."""
        if (self.root / "recipe.yaml").is_file():
            other = self.recipe().get("name")
            if other != name:
                raise UserError(f"{self.root} was made by recipe '{other}', not '{name}': choose another --run-dir")
        elif self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise UserError(f"{self.root} exists, is not empty and is no run directory: choose another --run-dir")

    def recipe(self) -> dict[str, Any]:
        """The recipe of the last start as a plain mapping; empty where there is none."""
        path = self.root / "recipe.yaml"
        return read_mapping(path) if path.is_file() else {}

    def saved(self, section: str, key: str) -> Any:
        """A value of the recipe of the last start; None where there is none."""
        return (self.recipe().get(section) or {}).get(key)

    def claim(self, name: str, recipe: str, numerics: Mapping[str, Any] | None = None) -> None:
        """Checks the directory, creates it, and saves the resolved recipe and the environment in it.

        name: of the recipe. recipe: its text (YAML). numerics: how numbers are computed, for the environment.
        """
        self.check(name)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.root / "recipe.yaml", recipe)
            atomic.write_json(self.root / "environment.json", {**environment(), **(numerics or {})})
        except OSError as error:
            raise UserError(f"{self.root} cannot be written ({error.strerror}): choose another --run-dir") from None

    def complete(self, name: str, manifest: dict[str, Any]) -> None:
        """Marks a stage complete, then removes its resume state."""
        atomic.write_json(self.stage(name) / "manifest.json", manifest)
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def stamp(self, name: str) -> None:
        """Gives all that stage `name` wrote, and the files beside it, the same time of change, in whole seconds.

        Times of change travel with copies, and when a file was written may depend on more than released bits.
        """
        now, checkpoints = int(time.time()), self.checkpoints(name).parent
        beside = [path for path in self.root.iterdir() if not path.is_dir() or path == checkpoints]
        for path in (*self.stage(name).rglob("*"), self.stage(name), *beside, self.root):
            with suppress(OSError):  # a link to nowhere, a file system that keeps no times
                os.utime(path, (now, now), follow_symlinks=False)

    def reopen(self, name: str) -> None:
        """Marks a stage incomplete, before it runs again."""
        (self.stage(name) / "manifest.json").unlink(missing_ok=True)


def fingerprint(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value` (hex)."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def commit() -> dict[str, Any]:
    """The git commit of the source tree and whether tracked files differ from it; nulls outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, as saved with every run."""
    versions: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def accelerators() -> list[str]:
    """Names of the NVIDIA GPUs that the driver lists; empty on a machine without."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return names


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 * 1024 if sys.platform == "darwin" else 1024), 1)
