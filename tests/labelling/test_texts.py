"""Prompts and answers on the labelling page: Markdown that people can read, and nothing that a browser obeys."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from labelling.test_page import PAGE
from support.browsers import Browser, Tab

ALLOWED = {"P", "H3", "UL", "OL", "LI", "PRE", "CODE", "EM", "STRONG", "DEL", "BLOCKQUOTE", "HR", "DIV", "SPAN",
           "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}  # fmt: skip


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Tab:
    """The page from disk, with a box for texts."""
    tab = browser.tab()
    tab.open(PAGE.as_uri())
    tab.run("globalThis.box = document.body.appendChild(make('div', [], 'text')); 1")
    return tab


def shown(tab: Tab, text: Any) -> dict[str, Any]:
    """Tags, attributes, text and depth of what a text becomes."""
    tab.run(f"showText(box, {json.dumps(text)})")
    found: dict[str, Any] = tab.run("""(() => {
        const all = [...box.querySelectorAll("*")];
        const depth = (each) => (each === box ? 0 : 1 + depth(each.parentElement));
        return {
            tags: all.map((each) => each.tagName),
            names: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
            text: box.textContent,
            depth: Math.max(0, ...all.map(depth)),
        };
    })()""")
    return found


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("one\ntwo", ["P"]),
        ("**a** *b* ~~c~~ `d`", ["P", "STRONG", "EM", "DEL", "CODE"]),
        ("***both***", ["P", "STRONG", "EM"]),
        ("# A\n### B\ntext", ["H3", "H3", "P"]),
        ("- a\n- b\n  - c\n\nend", ["UL", "LI", "P", "LI", "P", "UL", "LI", "P", "P"]),
        ("1. a\n2. b", ["OL", "LI", "P", "LI", "P"]),
        ("> a\n> b", ["BLOCKQUOTE", "P"]),
        ("```python\n*x* = 1\n```\nafter", ["P", "PRE", "CODE", "P"]),
        ("| a | b |\n|---|:-:|\n| 1 | 2 |", ["DIV", "TABLE", "THEAD", "TR", "TH", "TH", "TBODY", "TR", "TD", "TD"]),
        ("a\n\n---\n\nb", ["P", "HR", "P"]),
        ("snake_case_name and 2 * 3 * 4", ["P"]),
        ("unclosed **a and `b", ["P"]),
    ],
)
def test_markdown_becomes_elements(tab: Tab, text: str, tags: list[str]) -> None:
    assert shown(tab, text)["tags"] == tags


def test_what_is_no_mark_stays_as_it_is_written(tab: Tab) -> None:
    for text in ("snake_case_name and 2 * 3 * 4", "unclosed **a and `b", "a | b", "C:\\dir", "  two  spaces", "#tag"):
        assert shown(tab, text)["text"] == text
    assert shown(tab, "\\*a\\*")["text"] == "*a*"
    tab.run("byId('plain').checked = true")
    assert shown(tab, "**a**\n- b")["text"] == "**a**\n- b"
    tab.run("byId('plain').checked = false")


def test_line_ends_of_windows_are_line_ends(tab: Tab) -> None:
    text = "Use:\n```\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    assert [shown(tab, text.replace("\n", end)) for end in ("\r\n", "\r")] == 2 * [shown(tab, text)]


def test_a_link_is_its_words_and_its_address(tab: Tab) -> None:
    found = shown(tab, "[a bank](javascript:hit=1) ![dog](https://example.org/x.png) https://example.org")
    assert found["text"] == "a bank (javascript:hit=1) image: dog (https://example.org/x.png) https://example.org"
    assert set(found["tags"]) == {"P", "SPAN"}


def test_messages_are_a_chat(tab: Tab) -> None:
    turns = [{"role": "user", "content": "**Hi**"}, {"role": "evil<b>", "content": "Yes?"}]
    found = shown(tab, turns)
    assert found["text"] == "UserHievil<b>Yes?"
    assert tab.run("box.querySelectorAll('.turn').length") == 2
    assert tab.run("box.querySelectorAll('.turn.user').length") == 1


ATTACKS = [
    "<script>globalThis.hit = 1</script>", "<img src=x onerror='globalThis.hit = 1'>", "<svg/onload=globalThis.hit=1>",
    "[x](javascript:globalThis.hit=1)", "![x](x\"onerror=\"globalThis.hit=1)",
    "```\n</code></pre><script>hit=1</script>\n```",
    "| <b>a</b> | <img src=x onerror=hit=1> |\n|---|---|\n| <iframe srcdoc=x> | <style>*{display:none}</style> |",
    "# <h1 style='position:fixed'>\n> <form action=//example.org><input>\n- <a href='data:text/html,x'>x</a>",
    "<!--\u202eevil\u202c-->\x00\x1b[31m\u2066\u200b\ufeff", "&lt;script&gt; &#106;avascript:",
    "<base href=//example.org>",
]  # fmt: skip


def letters(text: str) -> str:
    return "".join(filter(str.isascii, filter(str.isalpha, text)))


@pytest.mark.parametrize("text", ATTACKS)
def test_no_markup_of_a_text_reaches_the_page(tab: Tab, text: str) -> None:
    """Only our elements, with no attribute but class, direction and number; all letters are there to be read."""
    for form in (text, [{"role": text, "content": text}, {"role": "user", "content": text}], f"- > **{text}**"):
        found = shown(tab, form)
        assert set(found["tags"]) <= ALLOWED
        assert set(found["names"]) <= {"class", "dir", "value"}
        assert not set("\x00\x1b\u202e\u202c\u2066\u200b\ufeff") & set(found["text"])
        assert letters(text) in letters(re.sub(r"\\u\{[0-9a-f]+\}", "", found["text"]))
    assert tab.run("globalThis.hit") is None
    assert tab.requests() == []


def test_hidden_characters_are_shown_as_numbers(tab: Tab) -> None:
    assert shown(tab, "a\u202eb\x07")["text"] == "a\\u{202e}b\\u{7}"
    assert shown(tab, "می\u200cخواهم")["text"] == "می\u200cخواهم", "Persian is written with it"


@pytest.mark.parametrize(
    "text",
    [
        ">" * 90_000, "- " * 45_000, "*a " * 30_000, "**a" * 30_000, "`" * 90_000, "[" * 90_000, "[a](" * 20_000,
        "_a_" * 30_000, "|" * 90_000 + "\n" + "|-" * 45_000, " " * 90_000 + "x",
        "\n".join(" " * i + "- x" for i in range(400)), "*a **b " * 12_000, "```\n" * 20_000, "# " * 40_000,
        "\\*" * 45_000, "*" * 99_000, "x" * 900_000, "1. " * 30_000,
    ],
    ids=range(18),
)  # fmt: skip
def test_a_hostile_text_is_shown_soon_and_not_deep(tab: Tab, text: str) -> None:
    began = time.monotonic()
    found = shown(tab, text)
    assert time.monotonic() - began < 10
    assert found["depth"] <= 40
    assert set(found["tags"]) <= ALLOWED


def test_each_text_runs_its_own_way(tab: Tab) -> None:
    """Arabic from the right and English from the left, side by side; code always from the left."""
    shown(tab, "שלום\n\n- مرحبا\n\nhello\n\n```\nكود\n```")
    ways = tab.run("[...box.children].map((each) => getComputedStyle(each).direction)")
    assert ways == ["rtl", "rtl", "ltr", "ltr"]
