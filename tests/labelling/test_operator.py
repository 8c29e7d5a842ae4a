"""The operator's page: days, agreement from z only, invitations with the right address, and the export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from labelling.test_page import serving
from labelling.test_server import Client, claim
from private_rlhf.cli import main
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.stats import wilson
from private_rlhf.labelling.questions import Question, make_question
from private_rlhf.labelling.server import LabelServer
from private_rlhf.labelling.store import AnswerStore
from support.browsers import Tab, wait_for

SHARED = [make_question(f"{i} {who}", f"prompt {i}", "yes", "no") for i in range(60) for who in "ab"]


@pytest.fixture
def store(tmp_path: Path) -> AnswerStore:
    """Sixty pairs, under two ids each, and two people."""
    store = AnswerStore(tmp_path / "store", 2.0)
    store.ask(SHARED)
    for name in ("anna", "ben"):
        store.add_person(name)
    return store


@pytest.fixture
def server(store: AnswerStore) -> Iterator[LabelServer]:
    with serving(store) as server:
        yield server


@pytest.fixture
def operator(server: LabelServer) -> Client:
    return Client(server.port, server.operator)


def answer_pairs(store: AnswerStore, count: int, turned: int) -> None:
    """Both answer the first pairs; the last `turned` of them differently."""
    for name in ("anna", "ben"):
        for number in range(count):
            event, *_ = store.open_questions(name)[0]
            store.give(name, event, -1 if name == "ben" and number >= count - turned else 1)


def of_fifty(agreed: int) -> str:
    """The share of 50 pairs at ε = 2: noise of factor f takes f² of what is above one half."""
    noise, share = LabelNoise.of(2.0), wilson(agreed, 50)
    low, value, high = (0.5 + (each - 0.5) / noise.factor**2 for each in (share.ci_low, share.value, share.ci_high))
    assert 0 < low < value < high < 1
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def test_agreement_is_debiased_twice_with_its_interval(store: AnswerStore, operator: Client) -> None:
    assert operator("GET", "/summary")[1]["agreement"] == ""
    answer_pairs(store, 50, 19)
    assert store.agreement() == (2.0, 2.0, 50, 31)
    assert operator("GET", "/summary")[1]["agreement"] == of_fifty(31)


def test_agreement_on_few_pairs_is_withheld(store: AnswerStore, operator: Client) -> None:
    answer_pairs(store, 11, 0)
    assert re.fullmatch(r"withheld: 11 of at least \d\d", operator("GET", "/summary")[1]["agreement"])


def test_agreement_is_about_texts_and_not_about_places(tmp_path: Path) -> None:
    """Of a pair whose responses stand the other way round, opposite z agree; a skip and a third answer do not count."""
    store = AnswerStore(tmp_path / "s", (1.0, 3.0))
    store.ask([Question("a", "p", "x", "y"), Question("b", "p", "y", "x"), Question("c", "p", "x", "y")])
    for name, level, z in (("anna", 0, 1), ("ben", 1, -1), ("cleo", 0, 0)):
        store.add_person(name)
        store.choose_level(name, level)
        store.give(name, store.open_questions(name)[0][0], z)
    assert store.agreement() == (1.0, 3.0, 1, 1)


def test_answers_are_counted_by_day_and_no_other_time_is_kept(store: AnswerStore, operator: Client) -> None:
    """Of all people together; a skip is no answer, and an answer that is sent again is one."""
    answer_pairs(store, 3, 0)
    event, *_ = store.open_questions("anna")[0]
    store.give("anna", event, 0)
    store.give("anna", event, 0)
    today = datetime.now(UTC).date().isoformat()
    assert operator("GET", "/summary")[1]["days"] == [[today, 6]]
    with store._transaction() as base:
        written = "\n".join(base.iterdump())
    assert not re.search(r"\d\d:\d\d", written)
    assert written.count(today) == 1


def test_an_invitation_has_the_address_that_people_open(store: AnswerStore, operator: Client) -> None:
    status, found = operator("POST", "/invite", f'{{"name":"{"Čaro".encode().hex()}"}}')
    assert status == 200
    assert re.fullmatch("https://label.example.org/#[0-9a-f]{64}", found["link"])
    assert found["code"].startswith("data:image/svg+xml")
    browser = Client(operator.port, "c" * 64)
    assert browser("POST", "/claim", claim(found["link"][-64:], browser.secret))[0] == 200
    assert browser("GET", "/questions")[1]["person"] == "Čaro"
    bad = {"anna": 409, "Anna ": 409, "two\nlines": 409, "": 400, "x" * 300: 409, "x" * 2000: 413}
    for name, refused in bad.items():
        assert operator("POST", "/invite", f'{{"name":"{name.encode().hex()}"}}')[0] == refused
    assert [each.name for each in store.persons()] == ["anna", "ben", "Čaro"]


def test_the_export_is_the_file_of_the_command(store: AnswerStore, operator: Client, tmp_path: Path) -> None:
    answer_pairs(store, 2, 1)
    lines = operator("GET", "/export")[1]["lines"]
    assert main(["label", "export", "--store", str(store._folder), "--answers", str(tmp_path / "a.jsonl")]) == 0
    assert lines == (tmp_path / "a.jsonl").read_text()
    assert [json.loads(line)["label"] for line in lines.splitlines()] == [1, 1, 1, -1]


def test_only_the_operator_sees_and_invites(server: LabelServer) -> None:
    person = Client(server.port, "a" * 64)
    assert person("POST", "/claim", claim(server.store.add_person("anna"), person.secret))[0] == 200
    for client in (person, Client(server.port)):
        assert client("GET", "/summary")[0] == client("GET", "/export")[0] == 401
        assert client("POST", "/invite", '{"name":"61"}')[0] == 401
    assert [each.name for each in server.store.persons()] == ["anna", "ben"]


@pytest.mark.parametrize("data", [None, b"\xff\xfe", b"x" * (1 << 17)])
def test_guidelines_must_be_a_short_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | None
) -> None:
    if data is not None:
        (tmp_path / "g.md").write_bytes(data)
    options = ["--store", str(tmp_path / "s"), "--epsilon", "1", "--guidelines", str(tmp_path / "g.md")]
    assert main(["label", "serve", *options]) == 2
    assert capsys.readouterr().err.count("--guidelines must name a file of UTF-8 text of at most 64 KiB, got") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_the_operator_s_page_in_a_browser(store: AnswerStore, server: LabelServer, tmp_path: Path, tab: Tab) -> None:
    answer_pairs(store, 50, 19)
    tab.open(f"http://127.0.0.1:{server.port}/operator#{server.operator}")
    tab.wait("document.querySelectorAll('#days rect').length === 1")
    assert tab.run("document.getElementById('agreement').textContent") == of_fifty(31)
    tab.run("byId('name').value = 'Čaro'; byId('invite').requestSubmit()")
    tab.wait("byId('invitations').querySelector('img')?.naturalWidth > 100")
    assert tab.run("byId('invitations').querySelector('p').textContent").startswith("https://label.example.org/#")
    tab.save_in(tmp_path)
    tab.run("byId('export').click()")
    saved = tmp_path / "answers.jsonl"
    wait_for(lambda: saved.is_file() and saved.stat().st_size, "the file")
    assert len(saved.read_text().splitlines()) == 100
    assert tab.errors() == []
