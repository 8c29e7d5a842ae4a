"""What a planted leak is, and a copy of the checkout that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.package_links import link_package

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("pipeline", "reward_models", "tests", "configs", "pyproject.toml")
"""Of the checkout, what the detectors need."""


@dataclass(frozen=True)
class Edit:
    """One place of the program, as somebody might have written it wrong. old: occurs once in the file."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A leak.

    name: of the row in the matrix; those of the review keep their letters. said: what the edits do. edge: the beginning
    of the pitfall of sharp_edges.md that it is. tests: node ids of the default suite that fail under it. attacks: the
    scenarios of `detect` that an auditor would try for it, none where no attack applies. twins: the scenario of a twin
    run: "release", "run", or None where twins show nothing by their nature.
    """

    name: str
    said: str
    edge: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    attacks: tuple[str, ...] = ("release",)
    twins: str | None = "release"


def plant(mutant: Mutant | None, folder: Path, also: tuple[str, ...] = ()) -> Path:
    """A copy of the checkout in a new folder, with the mutant's edits. ValueError for an edit that does not fit."""
    folder.mkdir(parents=True)
    for top in (*TOPS, *also):
        source, target = ROOT / top, folder / top
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(".hypothesis"))
        else:
            shutil.copy2(source, target)
    link_package(folder, folder / "import")
    for edit in mutant.edits if mutant else ():
        path = folder / edit.file
        path.write_text(edited(path.read_text(encoding="utf-8"), edit), encoding="utf-8")
    return folder


def edited(text: str, edit: Edit) -> str:
    """ValueError unless the place is there, once."""
    if (times := text.count(edit.old)) != 1:
        raise ValueError(f"{edit.file}: {edit.old!r} stands there {times} times; bring the mutant up to date")
    return text.replace(edit.old, edit.new)


def run_in(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments on a copy, one thread."""
    paths = os.pathsep.join(filter(None, [str(copy / "import"), str(copy), os.environ.get("PYTHONPATH_MORE")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )
