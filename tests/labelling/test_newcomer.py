"""A person who sees the labelling page for the first time: practice, guidelines, languages, the first answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from labelling.test_page import answer, enter, serving
from labelling.test_words import LANGUAGES
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AnswerStore
from support.browsers import Tab, wait_for

QUESTIONS = [make_question("q0", "What should I cook tonight?", "Fried rice with eggs.", "Ask a friend."),
             *(make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(1, 9))]  # fmt: skip
WORDS_A_MINUTE = 250
SECONDS_A_CLICK = 1.1
"""To point at something: Card, Moran and Newell, The Keystroke-Level Model (1980)."""
ON_SCREEN = """(() => {
    const texts = [...document.querySelectorAll("select")].map((each) => each.selectedOptions[0].text);
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const range = document.createRange();
        range.selectNodeContents(walker.currentNode);
        const seen = [...range.getClientRects()].some((r) => r.width && r.bottom > 0 && r.top < innerHeight);
        if (seen && walker.currentNode.parentElement.checkVisibility()) texts.push(walker.currentNode.data.trim());
    }
    return texts.filter(Boolean);
})()"""


class Stranger:
    """Reads what is on the screen, each text once, and clicks on what the accessibility tree names. seconds: so far."""

    def __init__(self, tab: Tab) -> None:
        self.tab, self.seconds, self._read = tab, 0.0, set[str]()

    def read(self) -> None:
        new = set(self.tab.run(ON_SCREEN)) - self._read
        self._read |= new
        words = sum(len(re.findall(r"[^\W_]+", text)) for text in new)
        self.seconds += 60 * words / WORDS_A_MINUTE

    def click(self, name: str) -> None:
        self.tab.click(name)
        self.seconds += SECONDS_A_CLICK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "give"),
    [(1280, 800, "Give answer Enter"), (390, 844, "Give answer")],
    ids=["desk", "phone"],
)
def test_a_stranger_answers_within_twenty_seconds(
    tmp_path: Path, tab: Tab, width: int, height: int, give: str
) -> None:
    """With the practice, all words that are on the screen, and those of the question itself."""
    store = AnswerStore(tmp_path / "store", 1.0, 20.0)
    store.ask(QUESTIONS)
    with serving(store, guidelines="# Be fair") as server:
        tab.resize(width, height)
        tab.open(f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        stranger, practised = Stranger(tab), 0.0
        for question in ("state.practising", "state.shown !== null"):
            tab.wait(question)
            stranger.read()
            stranger.click("Answer 1 is better")
            stranger.read()
            stranger.click(give)
            practised = practised or stranger.seconds
        wait_for(lambda: store.answers(), "an answer")
    print(f"{width} x {height}: practice after {practised:.1f} s, the first answer after {stranger.seconds:.1f} s")
    assert practised < stranger.seconds <= 20


def test_of_the_practice_nothing_is_drawn_kept_or_sent(tmp_path: Path, tab: Tab) -> None:
    """Then the questions come; the practice does not come again."""
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask(QUESTIONS)
    with serving(store) as server:
        tab.open(f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        tab.wait("state.practising && !byId('question').hidden")
        sent = len(tab.requests())
        tab.run("const real = draw; draw = (...each) => { globalThis.drawn = true; return real(...each); }; 1")
        assert tab.run("byId('practice').checkVisibility() && byId('prompt').textContent") == "Name a fruit."
        for key in ("t", "u", "s", "ArrowLeft"):
            tab.press(key)
        tab.press("Enter")
        tab.wait("state.shown !== null")
        assert tab.run("kept()") == []
        assert tab.run("globalThis.drawn") is None
        assert len(tab.requests()) == sent
        assert store.answers() == {}
        assert not tab.run("byId('practice').checkVisibility()")
        answer(tab, "ArrowLeft")
        assert tab.run("globalThis.drawn") is True
        tab.open(tab.run("location.href"))
        tab.wait("state.shown !== null")
        assert not tab.run("state.practising")


def test_guidelines_are_shown_as_markdown_and_not_as_markup(tmp_path: Path, tab: Tab) -> None:
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask(QUESTIONS)
    text = "# Rules\n\n1. **True** first\n\n<script>globalThis.hit = 1</script>"
    with serving(store, guidelines=text) as server:
        enter(tab, f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        tab.wait("!byId('guidelines').hidden")
        assert not tab.run("byId('guidelines').open")
        assert tab.run("[...byId('guidelines').querySelectorAll('h3, strong')].map((each) => each.textContent)") == [
            "Rules", "True"
        ]  # fmt: skip
        assert tab.run("byId('guidelines').textContent.includes('<script>') && globalThis.hit === undefined")


def test_the_page_speaks_the_browser_s_language_until_another_is_chosen(tmp_path: Path, tab: Tab) -> None:
    """The words of the controls, the direction, and what is said. Which one is not sent."""
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask(QUESTIONS)
    with serving(store) as server:
        tab.speak("nb-NO,fr-CA,en")
        enter(tab, f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        tab.wait("!byId('question').hidden")
        assert tab.run("[document.documentElement.lang, byId('title').textContent]") == ["fr", LANGUAGES["fr"]["title"]]
        sent = len(tab.requests())
        for code in ("ar", "de"):
            tab.run(f"byId('language').value = '{code}'; byId('language').dispatchEvent(new Event('change'))")
            assert tab.run("document.documentElement.dir") == LANGUAGES[code]["direction"]
            tab.press("t")
            assert LANGUAGES[code]["tie"] in tab.run("byId('said').textContent")
            tab.press("u", "ArrowRight")
            assert tab.run(f"BOXES[{'12'[code == 'de']}].getBoundingClientRect().left > innerWidth / 2")
            assert tab.run("state.chosen") == ("second" if code == "de" else "first"), "the arrow points at it"
            tab.press("u")
        assert len(tab.requests()) == sent
        enter(tab, tab.run("location.href"))
        assert tab.run("byId('give').textContent").startswith(LANGUAGES["de"]["give"])


def test_from_right_to_left_the_drawings_turn_round_and_the_bytes_do_not(tmp_path: Path, tab: Tab) -> None:
    """On a phone no key is shown, in any language."""
    store = AnswerStore(tmp_path / "store", 1.0)
    with serving(store) as server:
        tab.speak("ar")
        tab.open(f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        tab.wait("document.documentElement.dir === 'rtl'")
        style = "(each) => getComputedStyle(each)"
        drawings = tab.run(f"[...document.querySelectorAll('figure svg')].map((each) => ({style})(each).transform)")
        assert drawings == ["none", *2 * ["matrix(-1, 0, 0, 1, 0, 0)"]]
        assert tab.run(f"({style})(byId('bytes')).direction") == "ltr"
        tab.resize(390, 844)
        assert tab.run(f"[...document.querySelectorAll('kbd')].every((each) => ({style})(each).display === 'none')")


def test_two_long_answers_scroll_together(tmp_path: Path, tab: Tab) -> None:
    """By their share of the way; on a phone they stand below each other and do not scroll."""
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask([make_question("q", "p", 60 * "short line\n\n", 60 * f"{400 * 'x'}\n\n")])
    with serving(store) as server:
        tab.resize(1200, 800)
        enter(tab, f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        tab.wait("!byId('question').hidden")
        share = "(box) => box.scrollTop / (box.scrollHeight - box.clientHeight)"
        for leader, other in ((1, 2), (2, 1)):
            way = f"(BOXES[{leader}].scrollHeight - BOXES[{leader}].clientHeight)"
            tab.run(f"BOXES[{leader}].scrollTop = {0.3 * leader} * {way}")
            tab.wait(f"Math.abs(({share})(BOXES[{other}]) - {0.3 * leader}) < 0.01")
            tab.wait("leader === null")
        tab.resize(390, 800)
        tab.wait("BOXES.every((box) => box.scrollHeight === box.clientHeight && !box.hasAttribute('tabindex'))")


def test_whoever_answered_is_thanked(tmp_path: Path, tab: Tab) -> None:
    store = AnswerStore(tmp_path / "store", 1.0, 2.0)
    store.ask(QUESTIONS)
    with serving(store) as server:
        enter(tab, f"http://127.0.0.1:{server.port}/#{store.add_person('anna')}")
        for _ in range(2):
            answer(tab, "ArrowLeft")
        tab.wait("byId('end').checkVisibility()")
        assert "You gave 2 answers" in tab.run("byId('end').innerText")
        headings = "[...document.querySelectorAll('h1')].filter((h) => h.checkVisibility()).map((h) => h.textContent)"
        assert tab.run(headings) == [LANGUAGES["en"]["thanks"]]
        assert tab.run("byId('meter').value") == 1
