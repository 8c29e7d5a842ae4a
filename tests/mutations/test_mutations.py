"""Every planted leak is caught by two detectors or more, one of them a check of the default suite."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from mutations import matrix
from mutations.matrix import DEFAULT, DETECTORS, MUTANTS, SOUND
from mutations.mutant import ROOT, edited, plant

SHARP_EDGES = (ROOT / "docs" / "explanation" / "sharp_edges.md").read_text(encoding="utf-8")
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def test_there_are_enough_and_those_of_the_review() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 22
    assert {"A", "A2", "B", "C", "D", "E", "F", "G", "H", "J", "K", "L"} <= BY_NAME.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_fits_the_program_and_names_its_pitfall_and_tests(name: str) -> None:
    mutant = BY_NAME[name]
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        text = texts.get(edit.file) or (ROOT / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = edited(text, edit)
    for text in texts.values():
        ast.parse(text)
    assert f"\n| {mutant.edge}" in SHARP_EDGES
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8")
        assert not file.startswith(("tests/audit/", "tests/stages/test_twins"))  # those are detectors of their own


def test_the_published_matrix_is_of_these_mutants_and_every_one_is_caught_twice() -> None:
    """`python tests/mutations/matrix.py` brings it up to date."""
    results = matrix.read_results()
    assert results.keys() == {*BY_NAME, SOUND}
    assert [name for name, mutant in BY_NAME.items() if results[name]["version"] != matrix.version(mutant)] == []
    assert [name for name in BY_NAME if not matrix.enough(results[name]["caught"])] == []
    assert not any(results[SOUND]["caught"].values())
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(results)
    assert matrix.TABLE.read_text(encoding="utf-8") == matrix.table(results)


def test_two_detectors_of_which_one_runs_by_default_are_enough() -> None:
    missed: dict[str, bool | None] = dict.fromkeys(DETECTORS)
    assert not matrix.enough(missed)
    assert not matrix.enough(missed | {"attack": True, "twins": True})
    assert not matrix.enough(missed | {DEFAULT[0]: True})
    assert matrix.enough(missed | {DEFAULT[1]: True, "twins": True})


@pytest.mark.parametrize(
    ("name", "kind", "scenario"),
    [
        ("dropped rows", "twins", "release"),
        ("K", "attack", "corrected"),
        ("H", "attack", "counts"),
        (SOUND, "attack", "counts"),
    ],
)
def test_a_detector_catches_a_mutant(tmp_path: Path, name: str, kind: str, scenario: str) -> None:
    copy = plant(BY_NAME.get(name), tmp_path / "copy")
    assert matrix.detect(copy, kind, scenario)["caught"] == (name != SOUND)


def test_a_test_that_cannot_run_is_no_catch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest ends with 1 where tests fail, and with another number where it found or could run none."""
    for code in (2, 4, 5):
        done = subprocess.CompletedProcess([], code, "ERROR: not found: no_such_test", "")
        monkeypatch.setattr(matrix, "run_in", lambda *_, done=done: done)
        with pytest.raises(RuntimeError, match="no_such_test"):
            matrix.failing(tmp_path, ["tests/x.py::no_such_test"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_NAME, SOUND])
def test_the_matrix(name: str) -> None:
    """All detectors on one mutant, as in the published matrix."""
    found = matrix.run_mutant(BY_NAME.get(name))
    assert found.caught == matrix.read_results()[name]["caught"]
    assert (not any(found.caught.values())) if name == SOUND else matrix.enough(found.caught)
