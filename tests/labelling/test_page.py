"""The labelling page in a browser."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import private_rlhf.labelling
import pytest
from private_rlhf.core.noise import LabelNoise, keep_threshold
from private_rlhf.labelling.labellers import answers_within
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.server import ANSWER_BYTES, LabelServer, Page
from private_rlhf.labelling.store import AnswerStore
from support.browsers import Tab

PAGE = Path(private_rlhf.labelling.__file__).with_name("page.html")
WORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (PAGE.parent / "locales").iterdir()}
QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(40)]


@contextmanager
def serving(store: AnswerStore, port: int = 0, guidelines: str = "") -> Iterator[LabelServer]:
    """A server in a thread."""
    with LabelServer(store, port=port, url="https://label.example.org/", guidelines=guidelines) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def enter(tab: Tab, url: str) -> None:
    """Opens a page and skips its practice question."""
    tab.open(url)
    tab.wait("memory && pass().then(() => true)")


def answer(tab: Tab, *keys: str) -> None:
    """Presses keys at the next question, gives the answer, and waits until it is kept."""
    tab.wait("!byId('question').hidden && state.chosen === null && !state.giving")
    before = tab.run("kept().then((all) => all.length)")
    tab.press(*keys, "Enter")
    tab.wait(f"kept().then((all) => all.length > {before})")
    tab.wait("!state.giving")


@pytest.mark.parametrize("name", ["page.html", "operator.html"])
def test_a_page_names_its_own_script_and_style(name: str) -> None:
    """By the SHA-256 in its policy: after a change, what stands on the left belongs there."""
    page = Page.load(name)
    inline = re.findall(rb"<(script|style)>(.*?)</\1>", page.data, flags=re.DOTALL)
    named = {f"{kind.decode()}-src 'sha256-{b64encode(sha256(text).digest()).decode()}'" for kind, text in inline}
    assert {each for each in named if each not in page.policy} == set()
    assert len(named) == 2


def test_the_threshold_is_the_mechanism_s(tab: Tab) -> None:
    """Every bit of it, and how many answers a budget holds."""
    epsilons = [2.0**-128, 2.0**-127, 1e-30, 1e-9, 0.1, 0.25, 1 / 3, 0.5, 1.0, 1.1, 2.18, 10.0, 37.5, 90.0, 99.9, 100.0]
    budgets = [(0.3, 0.1), (2.0, 2.18), (1.0, 0.1), (5.0, 1.5), (8.0, 1.0), (0.7, 0.1), (77.7, 0.3)]
    tab.open(PAGE.as_uri())
    thresholds = tab.run(f"{epsilons}.map((epsilon) => keepThreshold(epsilon).toString())")
    assert [int(each) for each in thresholds] == [keep_threshold(epsilon) for epsilon in epsilons]
    for budget, epsilon in budgets:
        most = tab.run(f"""(() => {{
            const given = [];
            while (fits(cost(given), {epsilon}, {budget})) given.push({{ z: 1, epsilon: {epsilon} }}, {{ z: 0 }});
            return given.length / 2;
        }})()""")
        assert most == answers_within(budget, epsilon)


def test_no_epsilon_is_said_to_flip_none_of_100(tab: Tab) -> None:
    """As the terminal and the consent form say it; 99.5 of 100 are more than 99."""
    tab.open(PAGE.as_uri())
    shown = tab.run("[0.01, 1, 5.2, 5.3, 6, 6.9, 7, 10].map((epsilon) => reportsOf(epsilon) ?? t('most_reports'))")
    assert shown == [50, 73, 99, *["more than 99"] * 5]
    noises = map(LabelNoise.of, (0.01, 1, 5.2, 5.3, 6))
    assert [noise.kept_of_100 for noise in noises] == [str(each) for each in shown[:5]]


def test_one_answer_in_a_browser(tmp_path: Path, tab: Tab) -> None:
    """At ε = 100 no draw turns a label: what is reported is what was chosen, and nothing else left the page."""
    store = AnswerStore(tmp_path / "store", 100.0)
    store.ask(QUESTIONS[:3])
    link = store.add_person("anna")
    with serving(store) as server:
        enter(tab, f"http://127.0.0.1:{server.port}/#{link}")
        for id in ("q0", "q1"):
            tab.wait(f"byId('prompt').textContent === 'prompt {id[1]}'")
            first = tab.run("byId('first').lastElementChild.textContent")
            answer(tab, "ArrowRight", "ArrowLeft")
            tab.wait("kept().then((all) => all.every((each) => each.sent))")
            (question,) = (each for each in QUESTIONS if each.id == id)
            assert store.answers()[id] == (1 if first == question.response_a else -1)
        answer(tab, "s")
        tab.wait("kept().then((all) => all.every((each) => each.sent))")
        assert store.answers()["q2"] is None
        assert store.answer_counts() == {"anna": {store.epsilon: 2}}
        sent = [(each["method"], each["url"].rpartition("/")[2].partition("#")[0]) for each in tab.requests()]
        assert set(sent) == {("GET", ""), ("POST", "claim"), ("GET", "questions"), ("POST", "answer")}
        bodies = [each["postData"] for each in tab.requests() if each["url"].endswith("/answer")]
        assert [len(body) for body in bodies] == 3 * [ANSWER_BYTES]
        assert tab.errors() == []


def test_why_nothing_is_asked_is_said_in_the_language_that_is_chosen(tmp_path: Path, tab: Tab) -> None:
    """Of a void link, of none, and of a person whom nothing more is asked."""
    store = AnswerStore(tmp_path / "store", 1.0)
    with serving(store) as server:
        url = f"http://127.0.0.1:{server.port}/"
        links = {f"{url}#{'0' * 64}": "link_void", url: "link_none", f"{url}#{store.add_person('anna')}": "end_now"}
        for address, name in links.items():
            tab.open(address)
            tab.wait(f"byId('said').textContent === t('{name}')")
            for code in ("de", "en"):
                tab.run(f"byId('language').value = '{code}'; changeLanguage()")
                assert tab.run("byId('said').textContent") == WORDS[code][name]
        tab.run("stop('epsilon_changed'); byId('language').value = 'de'; changeLanguage()")
        assert tab.run("byId('said').textContent") == WORDS["de"]["epsilon_changed"]


def load(tab: Tab, path: Path, *rows: dict[str, Any], person: str = "anna") -> None:
    """Begins on a file of questions, at the page from disk."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tab.choose_file("#questions", path)
    tab.run(f"byId('person').value = {person!r}; byId('epsilon').value = 100")
    tab.run("byId('file').requestSubmit()")


def test_a_question_that_is_no_text_is_no_question(tmp_path: Path, tab: Tab) -> None:
    """Texts and messages are."""
    question = {"id": "q", "prompt": "p", "response_a": "yes", "response_b": "no"}
    messages = [{"role": "user", "content": "hi"}]
    tab.open(PAGE.as_uri())
    for name in ("prompt", "response_b"):
        for text in (5, None, " ", [], {"length": 1}, ["p"], [None], [{"role": "user", "content": 5}]):
            load(tab, tmp_path / "q.jsonl", question, question | {"id": "other", name: text})
            tab.wait("byId('said').textContent === t('file_wrong')")
            assert not tab.run("byId('file').hidden")
    load(tab, tmp_path / "q.jsonl", question | {"prompt": messages})
    tab.wait("memory && pass().then(() => true)")
    tab.wait("byId('prompt').textContent === 'hi'")


def test_a_file_that_changed_since_it_was_chosen_is_no_fault_of_the_browser(tmp_path: Path, tab: Tab) -> None:
    """In another browser all is drawn again. What was said of the file does not stay over the question."""
    question = {"id": "q", "prompt": "p", "response_a": "yes", "response_b": "no"}
    path = tmp_path / "q.jsonl"
    tab.open(PAGE.as_uri())
    load(tab, path, question, question)
    tab.wait("byId('said').textContent === t('file_twice')")
    path.unlink()
    tab.run("byId('file').requestSubmit()")
    tab.wait("byId('said').textContent === t('file_wrong')")
    load(tab, path, question)
    tab.wait("!byId('question').hidden")
    assert tab.run("byId('said').textContent") == ""
    tab.run("indexedDB.open = () => { throw new Error() }")
    load(tab, path, question)
    tab.wait("byId('said').textContent === t('no_memory')")


def test_from_disk_each_person_answers_a_pair_once(tmp_path: Path, tab: Tab) -> None:
    """Two people at one browser have nothing in common. A pair under other ids, and turned, keeps its draw."""
    pair = {"prompt": "p", "response_a": "yes", "response_b": "no"}
    turned = {"prompt": "p", "response_a": "no", "response_b": "yes"}
    path = tmp_path / "q.jsonl"
    for person, better in (("cleo", "yes"), ("dora", "no"), (" CLEO ", None)):
        tab.open(PAGE.as_uri())
        load(tab, path, {"id": "1", **pair}, {"id": "2", **turned}, {"id": "3", **pair}, person=person)
        if better:
            tab.wait("memory && pass().then(() => true)")
            tab.wait("!byId('question').hidden && !state.practising")
            first = tab.run("byId('first').lastElementChild.textContent")
            answer(tab, "ArrowLeft" if first == better else "ArrowRight")
        tab.wait("byId('said').textContent === t('end_file')")
        assert tab.run("byId('count').textContent") == f"{person.strip()} · 1 answered"
        z = -1 if better == "no" else 1
        lines = [json.dumps({"id": id, "label": label}) for id, label in (("1", z), ("2", -z), ("3", z))]
        assert tab.run("byId('bytes').textContent").splitlines() == [line.replace(" ", "") for line in lines]
        load(tab, path, {"id": "1", **pair}, {"id": "1", **turned}, person=person)
        tab.wait("byId('said').textContent === t('file_twice')")
