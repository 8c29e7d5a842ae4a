"""Every error planted into an accountant or an experiment makes `validate` refute a claim that it does not refute."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import verdicts
from in_validation import PARTS
from mutations.mutant import ROOT, Edit, edited

ERRORS = {mutant.name: (part, mutant) for part in PARTS for mutant in part.errors}
REVIEW = [f"{letter}{k + 1}" for letter, many in zip("ONKDP", (12, 6, 19, 7, 8), strict=True) for k in range(many)]


def test_there_are_enough_and_those_of_the_review() -> None:
    assert len(ERRORS) == sum(len(part.errors) for part in PARTS) >= 50
    assert set(REVIEW) <= ERRORS.keys()


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_fits_the_program(name: str) -> None:
    texts: dict[str, str] = {}
    for edit in ERRORS[name][1].edits:
        text = texts.get(edit.file) or (ROOT / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = edited(text, edit)
    for text in texts.values():
        ast.parse(text)


def test_the_published_table_is_of_these_errors_and_they_are_caught() -> None:
    """`python lab/tests/studies/verdicts.py` brings it up to date."""
    results = verdicts.read_results()
    sound = {part.name: results[verdicts.name_of(None, part)] for part in PARTS}
    assert results.keys() == {*ERRORS, *(verdicts.name_of(None, part) for part in PARTS)}
    for part in PARTS:
        assert sound[part.name]["version"] == verdicts.version(None, part)
        assert "crash" not in sound[part.name]
    stale = [name for name, (part, each) in ERRORS.items() if results[name]["version"] != verdicts.version(each, part)]
    assert stale == []
    real = [name for name in ERRORS if name not in verdicts.WITHIN_SLACK]
    missed = [name for name in real if not verdicts.flipped(results[name], sound[ERRORS[name][0].name])]
    assert len(missed) <= 0.05 * len(real)
    assert tuple(missed) == verdicts.UNSEEN
    assert verdicts.PAGE.read_text(encoding="utf-8") == verdicts.page(results)
    assert verdicts.TABLE.read_text(encoding="utf-8") == verdicts.table(results)


def test_a_row_is_of_its_error_and_of_the_sources_of_its_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part, error = ERRORS["D1"]
    row = {"version": verdicts.version(error, part), "sources": verdicts.sources(part)}
    assert verdicts.is_current(row, error, part)
    assert not verdicts.is_current(row, ERRORS["D2"][1], part)
    for folder in ("pipeline/accounting", "pipeline/validation", "lab/private_rlhf_lab"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    assert verdicts.is_current(row, error, part)
    (tmp_path / "lab" / "private_rlhf_lab" / "studies" / "offline" / "finite.py").write_text("")
    assert verdicts.is_current(row, error, part)
    (tmp_path / "lab" / "private_rlhf_lab" / "studies" / "dptd" / "study.py").write_text("")
    assert not verdicts.is_current(row, error, part)


def test_an_error_is_judged_in_a_copy() -> None:
    """Of the extremal families alone; a study that stops refutes nothing."""
    part, error = ERRORS["K7"]
    part = replace(part, claims="extremes.claims()")
    refuted = verdicts.judged(error, part)["refuted"]
    assert refuted
    assert all("add-remove" in claim for claim in refuted)
    broken = replace(error, edits=(Edit(error.edits[0].file, "def tail_mass(", "def tail("),))
    row = verdicts.judged(broken, part)
    assert row["refuted"] == {}
    assert "tail_mass" in row["crash"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_the_table(name: str) -> None:
    part, error = ERRORS[name]
    found = verdicts.flipped(verdicts.judged(error, part), verdicts.judged(None, part))
    assert bool(found) == (name not in (*verdicts.WITHIN_SLACK, *verdicts.UNSEEN))
