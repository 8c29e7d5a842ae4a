"""The table of sharp edges names a test for every pitfall that is handled, and those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "pipeline" / "privacy" / "SHARP_EDGES.md"
SEVERITIES = {"critical", "high", "medium", "low"}


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, headers and rulers left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "pitfall"]


def named_tests(text: str) -> set[str]:
    """`tests/….py::test_…` in the text."""
    return set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", text))


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def test_the_table_is_read() -> None:
    assert len(ROWS) > 40
    assert len({row[0] for row in ROWS}) == len(ROWS)
    assert rows("| pitfall | severity |\n|---|---|\n| a | high |\n") == [["a", "high"]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_pitfall_is_judged_and_tested_or_said_to_be_open(row: list[str]) -> None:
    assert len(row) == 4, row
    _, severity, handled, proof = row
    assert severity in SEVERITIES
    assert named_tests(proof) or (proof == "–" and handled.startswith("open")), handled


def test_every_named_test_exists(root: Path) -> None:
    wrong = set()
    for name in named_tests(PAGE.read_text(encoding="utf-8")):
        path, _, function = name.partition("::")
        tree = ast.parse((root / path).read_text(encoding="utf-8")) if (root / path).is_file() else ast.Module([], [])
        if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            wrong.add(name)
    assert not wrong


def test_whole_files_are_not_named_as_proof() -> None:
    """A test that moves or vanishes must be noticed, so a file alone does not count."""
    text = PAGE.read_text(encoding="utf-8").replace("`tests/architecture/test_sharp_edges.py`", "")
    assert set(re.findall(r"`(tests/[^`]+)`", text)) == named_tests(text)
