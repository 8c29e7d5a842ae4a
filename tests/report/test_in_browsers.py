"""The page as a reader opens it from disk: on a desk and a phone, in light and dark, and on paper."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report.test_report import render
from support.axe import check_barriers
from support.browsers import Tab
from support.report_runs import write_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of a private run and of one that is marked."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {"private": 2.0, "nonprivate": math.inf}
    for name, epsilon in runs.items():
        html = render(write_run(folder / f"run_{name}", epsilon=epsilon, name=name))
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return [folder / f"{name}.html" for name in runs]


def test_all_of_it_is_seen_on_every_screen_and_on_paper(tab: Tab, pages: list[Path]) -> None:
    """Nothing is cut off at the side, the ground follows the eyes' wish, and paper is white with every fold open."""
    for page in pages:
        tab.open(page.as_uri())
        for medium, width in (("screen", 1280), ("screen", 390), ("print", 794)):
            grounds = []
            for scheme in ("light", "dark"):
                tab.resize(width, 844)
                tab.show_as(scheme, medium)
                assert tab.run("document.documentElement.scrollWidth") <= width
                assert tab.run("[...document.querySelectorAll('svg')].every((each) => each.clientWidth > 100)")
                assert tab.run("[...document.querySelectorAll('details > :not(summary)')].every((each) =>"
                               " each.checkVisibility() && each.clientHeight > 100)")  # fmt: skip
                grounds.append(tab.run("getComputedStyle(document.body).backgroundColor"))
            white = "rgb(255, 255, 255)"
            assert (grounds == [white, white]) if medium == "print" else (grounds[0] != grounds[1])
        assert tab.requests() == tab.errors() == []


@pytest.mark.slow
def test_axe_finds_no_barrier(tab: Tab, pages: list[Path]) -> None:
    for page in pages:
        tab.open(page.as_uri())
        check_barriers(tab)
