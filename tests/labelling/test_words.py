"""The words of the labelling page: a file for each language, and every one of them whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import private_rlhf.labelling
import pytest

ROOM = Path(private_rlhf.labelling.__file__).parent
LANGUAGES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOM / "locales").glob("*.json")}
PAGE = (ROOM / "page.html").read_text(encoding="utf-8")
ENGLISH = LANGUAGES["en"]


def test_there_are_four_languages() -> None:
    assert set(LANGUAGES) == {"en", "de", "fr", "ar"}
    assert {code for code, words in LANGUAGES.items() if words["direction"] == "rtl"} == {"ar"}


@pytest.mark.parametrize("code", sorted(LANGUAGES))
def test_a_language_has_every_text_and_every_place(code: str) -> None:
    words = LANGUAGES[code]
    assert list(words) == list(ENGLISH)
    places = {name: sorted(re.findall(r"\{(\w*)\}", text)) for name, text in words.items()}
    assert places == {name: sorted(re.findall(r"\{(\w*)\}", text)) for name, text in ENGLISH.items()}
    assert all(text == text.strip() != "" for text in words.values())
    same = {name for name, text in words.items() if text == ENGLISH[name]} - {"direction"}
    assert code == "en" or len(same) < 5, "a copy is no translation"


def test_the_page_has_these_words_and_uses_each() -> None:
    embedded = re.search(r'<script type="application/json" id="languages">(.*?)</script>', PAGE, flags=re.DOTALL)
    assert embedded
    assert json.loads(embedded[1]) == LANGUAGES
    outside = PAGE.replace(embedded[1], "")
    asked = set(re.findall(r'data-(?:say|label)="(\w+)"', outside)) | set(re.findall(r'\bt\("(\w+)"', outside))
    assert asked <= set(ENGLISH)
    assert {name for name in ENGLISH if not re.search(rf"\b{name}\b", outside)} == set()
