"""Pages that are read: plain sentences, short paragraphs, and a beginning that says for whom or what was found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.reading import blocks, grade, length, sentences, syllables

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"reference/cli.md", "reference/recipe.md", "reference/shapes.md"}
"""Made by `docs/generate.py` from texts of the code."""
DOCS = {str(page.relative_to(ROOT / "docs")): page for page in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {"README.md": ROOT / "README.md"} | {name: DOCS[name] for name in DOCS.keys() - GENERATED}

GRADE, PARAGRAPH, SENTENCE = 10.0, 90, 40
OWN_BOUNDS = {"results/validation.md": (10.5, 45)}
"""Grade, and words of a sentence, where a page has bounds of its own: there claims stand in the words of the papers."""


def test_syllables_and_grades_are_those_counted_by_hand() -> None:
    known = {"the": 1, "make": 1, "table": 2, "files": 1, "pages": 2, "used": 1, "wanted": 2, "released": 2,
             "randomised": 3, "completely": 3, "people's": 2, "held-out": 2, "probability": 5}  # fmt: skip
    assert {word: syllables(word) for word in known} == known
    assert grade("The cat sat on the mat.") == pytest.approx(0.39 * 6 + 11.8 - 15.59)
    hard = "# Title\n\nDifferential privacy deliberately randomises personal preferences.\n\n| a | b |\n\n    x = y\n"
    assert grade(hard) == pytest.approx(0.39 * 6 + 11.8 * 23 / 6 - 15.59)
    assert grade(hard) > GRADE


def test_blocks_leave_out_code_tables_and_formulas() -> None:
    text = "# A\n\nOne [link](a.md)\ngoes on.\n\n    P = 1\n\n- First `a b`.\n- Second.\n\n    More.\n\n```\nx\n```\n"
    assert blocks(text) == ["One link goes on.", "First `a b`.", "Second.", "More."]
    assert [length(block) for block in blocks(text)] == [4, 2, 1, 1]
    found = sentences("See Eq. 5, i.e. this. (And that.) Is 4.5 `x. y` no end?")
    assert found == ["See Eq 5, i.e this.", "(And that.", "Is 4.5 code no end?"]


def first_sentence(text: str) -> str:
    return sentences(blocks(text)[0])[0]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_plain(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    highest, longest = OWN_BOUNDS.get(name, (GRADE, SENTENCE))
    assert grade(text) <= highest
    assert not [each for block in blocks(text) for each in sentences(block) if length(each) > longest]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_paragraph_is_short(name: str) -> None:
    assert not [block for block in blocks(PAGES[name].read_text(encoding="utf-8")) if length(block) > PARAGRAPH]


@pytest.mark.parametrize("name", sorted(name for name in PAGES if not name.startswith("results/")))
def test_a_page_says_first_whom_it_is_for(name: str) -> None:
    """"For" a reader, and what "you" can do or know after it."""
    assert re.match(r"For .+\byou\b", first_sentence(PAGES[name].read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", sorted(name for name in PAGES if name.startswith("results/")))
def test_results_begin_with_the_finding(name: str) -> None:
    """In bold, before any word on how it was measured."""
    found = first_sentence(PAGES[name].read_text(encoding="utf-8"))
    assert found.startswith("**")
    assert not re.search(r"\b(?:[Mm]ade by|[Ww]e (?:measured|ran))\b", found)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_is_small_has_words_and_is_shown(path: Path) -> None:
    """In light and in dark, without a font or a script from elsewhere."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 15_000
    assert re.search(r"<title[^>]*>.+</title>", text)
    assert re.search(r"<desc[^>]*>.+</desc>", text)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href=|@import|<script|<image|url\((?!#)", text)
    assert any(f"images/{path.name})" in page.read_text(encoding="utf-8") for page in DOCS.values())
