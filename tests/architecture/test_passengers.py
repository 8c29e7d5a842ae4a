"""Who may name the whole recipe, a stage's context or a run directory; no basename twice; every package is installed.

The table of exceptions only shrinks: a row that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from support.measures import AUDIT, PASSENGERS, ROOT_FILES, names_whole
from support.rooms import Sources, dotted, room_of

MAY_NAME_RECIPE = ("recipe", "stages", "commands", "planning", "report", *AUDIT)
MAY_NAME_RUN = (*MAY_NAME_RECIPE, "core/rundir.py", "evaluation/runs.py")
"""Rooms of `pipeline/`, or files of rooms, and the files that stand directly in it."""


@pytest.mark.parametrize("name", PASSENGERS)
def test_only_conductors_name_it(name: str, sources: Sources) -> None:
    rooms = MAY_NAME_RUN if name == "RunDir" else MAY_NAME_RECIPE
    allowed = tuple(f"pipeline/{room}" if room.endswith(".py") else f"pipeline/{room}/" for room in rooms)
    users = {path for path, tree in sources.items() if name in names_whole(tree)
             and not path.startswith(allowed) and path not in ROOT_FILES}  # fmt: skip
    assert not users


def test_a_name_is_found_in_imports_annotations_and_texts() -> None:
    tree = ast.parse("from x import Recipe\ndef f(run: 'RunDir'): ...\ndef g(c: a.StageContext): ...")
    assert names_whole(tree) >= {"Recipe", "RunDir", "StageContext"}
    assert not names_whole(ast.parse('"""The Recipe."""\nRecipes = 1')) & {"Recipe"}


def test_no_basename_stands_twice(sources: Sources) -> None:
    places = defaultdict(set)
    for path in sources:
        places[Path(path).name].add(path)
    assert not {name for name, paths in places.items() if len(paths) > 1} - {"__init__.py", "__main__.py"}


def test_every_package_is_installed(root: Path, sources: Sources) -> None:
    """A folder that is not in pyproject.toml would be missing from the wheel alone."""
    tools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert set(tools["setuptools"]["packages"]) == {dotted(path) for path in sources if path.endswith("__init__.py")}
    assert all(f"{Path(path).parent.as_posix()}/__init__.py" in sources for path in sources)
    assert {room_of(path) for path in sources} <= set(tools["setuptools"]["packages"])
