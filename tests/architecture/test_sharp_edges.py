"""The table of sharp edges names a test for every pitfall that is handled, the assurance case one for every claim, and
those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "sharp_edges.md"
CASE = ROOT / "docs" / "explanation" / "assurance.md"
PAGES = (PAGE, CASE)
SEVERITIES = {"critical", "high", "medium", "low"}


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, headers and rulers left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("pitfall", "claim")]


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


@pytest.mark.parametrize("row", rows(CASE.read_text(encoding="utf-8")), ids=lambda row: row[0][:3])
def test_every_claim_has_its_argument_and_its_tests(row: list[str]) -> None:
    claim, argument, evidence = row
    assert re.match(r"C\d+\. ", claim)
    assert argument
    assert named_tests(evidence), claim


def test_the_claims_are_numbered_and_each_proof_is_of_one() -> None:
    text = CASE.read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^\| C(\d+)\. ", text, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {int(number) for number in re.findall(r"\bC(\d+)\b", text)} <= set(numbers)
    proofs = re.findall(r"^### Proof (\d+)", text, flags=re.MULTILINE)
    assert proofs == re.findall(r"\| \[proof (\d+)\]", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_named_test_exists(root: Path, page: Path) -> None:
    tests: dict[str, set[str]] = {}
    for name in named_tests(page.read_text(encoding="utf-8")):
        path, _, function = name.partition("::")
        tests.setdefault(path, set()).add(function)
    for path, functions in tests.items():
        body = ast.parse((root / path).read_text(encoding="utf-8")).body
        assert functions <= {node.name for node in body if isinstance(node, ast.FunctionDef)}, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_whole_files_are_not_named_as_proof(page: Path) -> None:
    """A test that moves or vanishes must be noticed, so a file alone does not count."""
    text = page.read_text(encoding="utf-8").replace("`tests/architecture/test_sharp_edges.py`", "")
    assert set(re.findall(r"`(tests/[^`]+)`", text)) == named_tests(text)
