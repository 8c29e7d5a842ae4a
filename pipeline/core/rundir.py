"""The run directory: one folder per stage, each complete exactly when its `manifest.json` exists.

runs/NAME/recipe.yaml            the resolved recipe of the last start
runs/NAME/environment.json       versions, commit, hardware
runs/NAME/STAGE/manifest.json    written last; fingerprint, seconds, memory, world size, what the stage reports
runs/NAME/STAGE/…                what the stage releases: safetensors, JSON, Parquet, HTML
runs/NAME/checkpoints/STAGE/…    resume state, removed when the stage completes; never released
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.code import digest_of
from private_rlhf.core.documents import DocumentError, read_json, read_mapping
from private_rlhf.core.errors import UserError

MARKER = "fingerprint.json"  # in a folder of resume state
CODE = "code"
BESIDE_METHODS = ("ppo_over_gibbs", "best_of_four", "longer_answer_baseline")  # in metrics.json


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory."""

    root: Path

    def stage(self, name: str) -> Path:
        """Folder of what stage `name` releases."""
        return self.root / name

    @property
    def released(self) -> Path:
        """Folder of the stage that releases the labels: `online` where the recipe asks for them, or `privatize`."""
        return self.stage(releasing_stage(self.recipe()))

    def checkpoints(self, name: str) -> Path:
        """Folder of the resume state of stage `name`."""
        return self.root / "checkpoints" / name

    def manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest of a completed stage, or None."""
        path = self.stage(name) / "manifest.json"
        remedy = f"delete the folder {path.parent} and run the stage again"
        return _read_object(path, remedy) if path.is_file() else None

    def require(self, name: str) -> dict[str, Any]:
        """The manifest of stage `name`. UserError where it is not complete."""
        manifest = self.manifest(name)
        if manifest is None:
            command = f"private-rlhf run --only {name}"
            raise UserError(f"{self.root} has not completed stage '{name}': run it first ({command})")
        return manifest

    def made(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """By stage, the identity of its result: fingerprint, code and, where it released labels, their digest."""
        return {name: [each.get("fingerprint"), each.get("code"), *filter(None, [each.get("released")])]
                for name in names for each in [self.manifest(name) or {}]}  # fmt: skip

    def changed_code(self, name: str, files: Mapping[str, str]) -> list[str]:
        """The source files in which the program that made stage `name` differs from `files` (`core.code.source_files`).

        None if it is the same program, or was accepted, or its manifest (of an earlier version) names no files.
        """
        manifest = self.manifest(name) or {}
        made_of = manifest.get("code_files")
        if made_of is None or digest_of(files) in (manifest.get("code"), manifest.get("accepted_code")):
            return []
        return sorted(path for path in made_of.keys() | files.keys() if made_of.get(path) != files.get(path))

    def accept_code(self, name: str, files: Mapping[str, str]) -> None:
        """Note that the result of stage `name` may stand beside results of `files`."""
        manifest = self.require(name) | {"accepted_code": digest_of(files)}
        atomic.write_json(self.stage(name) / "manifest.json", manifest)

    def check(self, name: str) -> None:
        """Refuse (UserError) a directory that a recipe of another name made, or that holds other files."""
        if (self.root / "recipe.yaml").is_file():
            other = self.recipe().get("name")
            if other != name:
                raise UserError(f"{self.root} was made by recipe '{other}', not '{name}': choose another --run-dir")
        elif self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise UserError(f"{self.root} is not a run directory and not empty: choose another --run-dir")

    def recipe(self) -> dict[str, Any]:
        """The recipe of the last start as a plain mapping; empty where there is none."""
        path = self.root / "recipe.yaml"
        return read_mapping(path) if path.is_file() else {}

    def saved(self, section: str, key: str) -> Any:
        """A value of the recipe of the last start; None where there is none."""
        return (self.recipe().get(section) or {}).get(key)

    def claim(self, name: str, recipe: str, environment: Mapping[str, Any]) -> None:
        """Check the directory, create it, and save the recipe (its name and YAML text) and the environment in it."""
        self.check(name)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.root / "recipe.yaml", recipe)
            atomic.write_json(self.root / "environment.json", environment)
        except OSError as error:
            raise UserError(f"{self.root} cannot be written ({error.strerror}): choose another --run-dir") from None

    def complete(self, name: str, manifest: dict[str, Any]) -> None:
        """Mark a stage complete, then remove its resume state."""
        atomic.write_json(self.stage(name) / "manifest.json", manifest)
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def stamp(self, name: str) -> None:
        """Give all that stage `name` wrote, and the files beside it, the same time of change, in whole seconds.

        Times of change travel with copies, and when a file was written may depend on more than released bits.
        """
        now, checkpoints = int(time.time()), self.checkpoints(name).parent
        beside = [path for path in self.root.iterdir() if not path.is_dir() or path == checkpoints]
        for path in (*self.stage(name).rglob("*"), self.stage(name), *beside, self.root):
            with suppress(OSError):  # a link to nowhere, a file system that keeps no times
                os.utime(path, (now, now), follow_symlinks=False)

    def reopen(self, name: str) -> None:
        """Mark a stage incomplete, before it runs again."""
        (self.stage(name) / "manifest.json").unlink(missing_ok=True)


def fingerprint(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value` (hex)."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def claim_checkpoints(folder: Path, identity: Mapping[str, str], code: str) -> str | None:
    """Make `folder` ready for resume state; state of another identity moves to `folder`-aside-N beside it.

    identity: all that the state depends on, by names that a message can show. code: digest of the program; another one
    may go on from the state. Returns a message for the user, or None.
    """
    marker, message = folder / MARKER, None
    if any(path != marker for path in folder.glob("*")):
        try:
            before = _read_object(marker, "")
        except UserError:
            before = {}
        changed = [name for name in identity if before.get(name) != identity[name]]
        if changed:
            aside = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}-aside-{n}")).exists())
            folder.rename(aside)
            message = (
                f"starts anew, as the resume state here is of another {' and '.join(changed)}: it is kept in {aside}; "
                f"to go on from it, undo the change and move it back to {folder}"
            )
        elif before.get(CODE) != code:
            message = f"goes on from what another version of the code left in {folder}; delete it to start anew"
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_json(marker, {**identity, CODE: code})
    return message


def releasing_stage(recipe: Mapping[str, Any]) -> str:
    """The stage that releases the labels of a recipe, a plain mapping."""
    return "online" if recipe.get("online") else "privatize"


def write_metrics(run: RunDir, stages: Sequence[str]) -> None:
    """Write metrics.json from evaluate/evaluation.json and the manifests of `stages`, once `evaluate` is complete.

    One object per evaluated method; beside them `seconds` of each stage, their sum `wall_seconds`, and `peak_rss_mb`,
    the largest of any stage, MiB. UserError where evaluation.json is missing or damaged.
    """
    if run.manifest("evaluate") is None:
        return
    manifests = {name: manifest for name in stages if (manifest := run.manifest(name)) is not None}
    evaluation = read_evaluation(run)
    seconds = {name: manifest["seconds"] for name, manifest in manifests.items() if "seconds" in manifest}
    peaks = [manifest["peak_rss_mb"] for manifest in manifests.values() if manifest.get("peak_rss_mb") is not None]
    metrics: dict[str, Any] = (evaluation.get("methods") or {}) | {
        "seconds": seconds,
        "wall_seconds": round(sum(seconds.values()), 2),
        "peak_rss_mb": max(peaks, default=None),
        "world_size": manifests.get("ppo", manifests["evaluate"]).get("world_size"),
    }
    metrics |= {key: evaluation[key] for key in BESIDE_METHODS if evaluation.get(key) is not None}
    atomic.write_json(run.root / "metrics.json", metrics)


def read_evaluation(run: RunDir) -> dict[str, Any]:
    """evaluation.json; where stage count has run, its rates replace those from privatised labels."""
    content = _read_object(run.stage("evaluate") / "evaluation.json", "run the stage again (--from evaluate)")
    if run.manifest("count") is not None:
        counted = _read_object(run.stage("count") / "rates.json", "run the stage again (--from count)")
        for name, metrics in content["methods"].items():
            if name in counted["likelihood_win_rate"]:
                metrics["likelihood_win_rate"] = counted["likelihood_win_rate"][name]
        content |= {name: counted[name] for name in ("longer_answer_baseline", "label_counts")}
    return content


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file of a run. UserError, with the remedy, where it is missing or damaged."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {remedy}") from None
    except DocumentError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: {remedy}")
    return content
