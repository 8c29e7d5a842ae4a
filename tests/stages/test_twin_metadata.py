"""Twin runs find labels beside the bytes of a run's files: in modes, times and attributes, under declared names."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.audit.twins import TWINS, verify
from private_rlhf.core.rundir import RunDir
from support.pipeline_runs import Workspace
from support.twin_recipes import own_recipe, stages, verdict_of, write_pairs

pytestmark = pytest.mark.usefixtures("quick_disk")


def labels_in_mode(path: Path, labels: list[bool]) -> None:
    path.chmod(0o600 + sum(label << place for place, label in enumerate(labels[:6])))


def labels_in_attribute(path: Path, labels: list[bool]) -> None:
    os.setxattr(path, "user.y", bytes(labels))


def labels_as_seconds(path: Path, labels: list[bool]) -> None:
    rows = [{"seconds": int(label)} for label in labels]
    (path.parent / "timing.json").write_text(json.dumps(rows), encoding="utf-8")


def label_in_time(path: Path, labels: list[bool]) -> None:
    """After the stage was given its time: whatever a stage does to the times of its own files is undone."""
    sound = RunDir.stamp

    def stamp(run: RunDir, name: str) -> None:
        sound(run, name)
        if name == "sft":
            os.utime(path, ns=(0, path.stat().st_mtime_ns + sum(labels)))

    RunDir.stamp = stamp  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [labels_in_mode, labels_in_attribute, labels_as_seconds, label_in_time])
def test_labels_beside_the_bytes_of_a_file_are_found(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Path, list[bool]], None],
) -> None:  # fmt: skip
    def leaky(context: Any) -> dict[str, Any]:
        rows = [json.loads(line) for line in Path(context.recipe.data.preferences).read_text().splitlines()]
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "history.json").write_text("{}")
        plant(context.folder / "history.json", [len(row["chosen"]) > len(row["rejected"]) for row in rows])
        return {"summary": "none"}

    monkeypatch.setattr(RunDir, "stamp", RunDir.stamp)  # so that it is put back
    monkeypatch.setattr(importlib.import_module("private_rlhf.stages.sft"), "run", leaky)
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 60), workspace)
    found = verdict_of(recipe, tmp_path / "twins", "privatize", "sft")
    assert any(line.startswith("sft/") for line in found.comparison.leaks), found
    assert len(found.comparison.leaks) == 1


def test_times_that_a_stage_sets_itself_are_undone(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaky(context: Any) -> dict[str, Any]:
        rows = [json.loads(line) for line in Path(context.recipe.data.preferences).read_text().splitlines()]
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "history.json").write_text("{}")
        longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows)
        os.utime(context.folder / "history.json", ns=(longer, longer))
        return {"summary": "none"}

    monkeypatch.setattr(importlib.import_module("private_rlhf.stages.sft"), "run", leaky)
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 60), workspace)
    found = verify(recipe, tmp_path / "twins", stages("privatize", "sft"), runner.NAMES, keep=True)
    assert found is not None
    assert found.comparison.leaks == ()
    for twin in TWINS:
        run = tmp_path / "twins" / twin / "run"
        times = {path.stat().st_mtime_ns for path in (run, run / "recipe.yaml", *(run / "sft").rglob("*"))}
        assert len(times) == 1
        assert times.pop() % 10**9 == 0
