"""The labelling page where things go wrong: never a second draw, never a lost answer; and at its due rates."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from labelling.test_page import PAGE, QUESTIONS, answer, enter, serving
from private_rlhf.core.noise import LabelNoise
from private_rlhf.labelling.labellers import FileDrop
from private_rlhf.labelling.questions import Question, make_question, write_questions
from private_rlhf.labelling.server import ANSWER_BYTES, LabelServer
from private_rlhf.labelling.store import AnswerStore
from scipy.stats import binom
from support.axe import check_barriers
from support.browsers import Browser, Tab, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> AnswerStore:
    """Forty questions at a small ε: a second draw would be another one half of the time."""
    store = AnswerStore(tmp_path / "store", 0.1)
    store.ask(QUESTIONS)
    return store


def reach(tab: Tab, server: LabelServer, link: str) -> None:
    """Opens a person's link, up to the first question."""
    enter(tab, f"http://127.0.0.1:{server.port}/#{link}")
    tab.wait("!byId('question').hidden")


def kept(tab: Tab) -> dict[str, int]:
    """z by event, of the page's memory."""
    return dict(tab.run("kept().then((all) => all.map((each) => [each.event, each.z]))"))


def delivered(tab: Tab) -> None:
    """Waits until nothing is left to be sent."""
    tab.wait("kept().then((all) => all.length > 0 && all.every((each) => each.sent))")


def same_z(tab: Tab, store: AnswerStore) -> None:
    """The store has what the memory has, and every body ever sent about an event was the same."""
    with store._transaction() as base:
        stored = dict(base.execute("SELECT event, answer FROM events WHERE answer IS NOT NULL"))
    assert stored == kept(tab)
    bodies = [each["postData"] for each in tab.requests() if each["url"].endswith("/answer")]
    assert {len(body) for body in bodies} == {ANSWER_BYTES}
    sent = {(row["event"], row["answer"]) for row in map(json.loads, bodies)}
    assert len({event for event, _ in sent}) == len(sent)


def test_a_hundred_thousand_draws_have_the_due_rate(tab: Tab) -> None:
    """Both labels and ties, through the function that answers go through; 1 - 10^-6 exact intervals."""
    tab.open(PAGE.as_uri())
    count = "Array.from({{length: {}}}, () => draw({}, {})).filter((z) => z > 0).length"
    for epsilon, label, keep in ((1.0, "1", 1.0), (1.0, "-1", -1.0), (3.0, "1", 1.0), (1.0, "fairCoin()", 0.0)):
        factor = LabelNoise.of(epsilon).factor
        low, high = binom.ppf([5e-7, 1 - 5e-7], 100_000, (1 + keep * factor) / 2)
        found = tab.run(count.format(100_000, label, epsilon))
        print(f"ε = {epsilon:g}, label {label}: {found} of 100,000 reports are +; interval [{low:.0f}, {high:.0f}]")
        assert low <= found <= high


def test_the_whole_way_has_the_due_rate(tmp_path: Path, tab: Tab) -> None:
    """From the choice to the file, with both orders on the screen: 400 answers for response_a by its text."""
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask([Question(f"{i} {q.id}", f"{i} {q.prompt}", q.response_a, q.response_b)
               for i in range(10) for q in QUESTIONS])  # fmt: skip
    with serving(store) as server:
        server.of_person.per_second = 1e9
        reach(tab, server, store.add_person("anna"))
        turned = tab.run("""(async () => {
            let turned = 0;
            for (let number = 0; number < 400; number += 1) {
                while (byId("question").hidden || state.giving) await new Promise((go) => setTimeout(go, 1));
                turned += state.turned;
                const first = byId("first").lastElementChild.textContent;
                choose(first === state.questions[0].response_a ? "first" : "second");
                await give();
            }
            return turned;
        })()""")
        delivered(tab)
        same_z(tab, store)
    low, high = binom.ppf([5e-7, 1 - 5e-7], 400, LabelNoise.of(1.0).keep_prob)
    assert low <= sum(z == 1 for z in store.answers().values()) <= high
    low, high = binom.ppf([5e-7, 1 - 5e-7], 400, 0.5)
    assert low <= turned <= high
    assert len(store.answers()) == 400


def test_another_link_in_the_same_tab_is_another_person(store: AnswerStore, tab: Tab) -> None:
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        other = store.add_person("ben")
        tab.run(f"setTimeout(() => (location.hash = '{other}'), 20); 1")
        tab.wait("typeof state !== 'undefined' && state.person === 'ben' && pass().then(() => true)")
        answer(tab, "ArrowLeft")
        delivered(tab)
    assert [(person.name, person.given) for person in store.persons()] == [("anna", 0), ("ben", 1)]


def test_reload_and_back_draw_nothing_again(store: AnswerStore, tab: Tab) -> None:
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        tab.press("ArrowLeft")
        assert kept(tab) == {}, "a choice is no draw"
        tab.press("u")
        tab.press("Enter")
        assert kept(tab) == {}
        seen: dict[str, int] = {}
        for step in ("reload", "back", "reload", "back"):
            answer(tab, "ArrowLeft")
            assert seen.items() <= kept(tab).items()
            seen = kept(tab)
            if step == "reload":
                tab.run("globalThis.old = true; setTimeout(() => location.reload(), 20); 1")
                tab.wait("!globalThis.old && document.readyState === 'complete'")
            else:
                tab.run("setTimeout(() => history.back(), 20); 1")
                tab.wait("location.href === 'about:blank'")
                tab.run("setTimeout(() => history.forward(), 20); 1")
                tab.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
            tab.wait("!byId('question').hidden && !state.giving")
        delivered(tab)
        assert len(seen) == 4
        same_z(tab, store)


def test_two_tabs_draw_once(store: AnswerStore, browser: Browser, tab: Tab) -> None:
    link = store.add_person("anna")
    with serving(store) as server:
        one = tab
        reach(one, server, link)
        other = browser.tab()
        other.open(f"http://127.0.0.1:{server.port}/#{link}")
        other.wait("!byId('question').hidden")
        answer(one, "ArrowLeft")
        delivered(one)
        before = kept(one)
        assert other.run("state.questions[0].event") in before
        other.press("ArrowRight", "Enter")
        other.wait("byId('said').textContent.includes('another tab')")
        assert kept(other) == before
        event = other.run("state.questions[1].event")
        for tab in (one, other):  # both at work at the same time
            tab.run(f"""
                globalThis.found = Promise.all(
                    Array.from({{length: 50}}, (_, i) => drawOnce('{event}', i % 2 ? 1 : -1, 0.1, 99)),
                ).then((all) => (found = all)); 0""")
        drawn = [each for tab in (one, other) for each in tab.wait("Array.isArray(found) && found")]
        assert sorted(drawn) == ["before"] * 99 + ["drawn"]
        other.close()


def test_offline_and_again(store: AnswerStore, tab: Tab) -> None:
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        tab.offline(True)
        for _ in range(3):
            answer(tab, "ArrowRight")
        assert store.answers() == {}
        tab.wait("byId('count').textContent.includes('3 waiting to be sent')")
        tab.offline(False)
        delivered(tab)
        assert len(store.answers()) == 3
        same_z(tab, store)


def test_answers_that_are_given_while_one_is_on_its_way(store: AnswerStore, tab: Tab) -> None:
    """On a slow network the next ones do not wait for a reason to be sent."""
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        tab.run("""const send = fetch;
            globalThis.fetch = (...all) => new Promise((go) => setTimeout(go, 800)).then(() => send(...all)); 0""")
        for _ in range(3):
            answer(tab, "ArrowRight")
        delivered(tab)
        assert len(store.answers()) == 3
        same_z(tab, store)


def test_a_store_that_was_put_back_gets_the_answers_again(store: AnswerStore, tab: Tab) -> None:
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        for _ in range(2):
            answer(tab, "ArrowRight")
        delivered(tab)
        with store._transaction() as base:
            base.execute("UPDATE events SET answer = NULL")
        tab.open(tab.run("location.href"))
        tab.wait("!byId('question').hidden")
        wait_for(lambda: len(store.answers()) == 2, "both answers again")
        same_z(tab, store)


@pytest.mark.parametrize("words", ["{}", '{"event":"EVENT","answer":"+"}', "<!doctype html>", '{"person":"eve"}'])
def test_another_acknowledgement_is_none(store: AnswerStore, words: str, tab: Tab) -> None:
    """Status 200 with other words, as from a request that was swallowed: the page sends the answer again."""
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        tab.run(f"""(() => {{
            const send = globalThis.fetch;
            globalThis.fetch = (path, how) => path === "/answer" && !globalThis.honest
                ? Promise.resolve(new Response({json.dumps(words)})) : send(path, how);
        }})()""")
        answer(tab, "ArrowRight")
        tab.wait("byId('count').textContent.includes('1 waiting to be sent')")
        assert store.answers() == {}
        tab.run("globalThis.honest = true")
        delivered(tab)
        same_z(tab, store)
        assert len(store.answers()) == 1


def test_a_text_that_is_markup_stays_text(tmp_path: Path, tab: Tab) -> None:
    """Whoever writes prompts or answers (a model does) gets no script into the page."""
    texts = ["<img src=x onerror='globalThis.hit = 1'>", "</div><script>globalThis.hit = 1</script>",
             "<a href='javascript:globalThis.hit = 1' autofocus onfocus='globalThis.hit = 1'>x</a>"]  # fmt: skip
    store = AnswerStore(tmp_path / "store", 1.0)
    store.ask([make_question("q", *texts)])
    with serving(store) as server:
        reach(tab, server, store.add_person("<b>anna</b>"))
        shown = [tab.run(f"byId('{id}').textContent") for id in ("prompt", "first", "second")]
        assert sorted(each.removeprefix("Answer 1").removeprefix("Answer 2") for each in shown) == sorted(texts)
        assert tab.run("[...document.images, ...document.links].length") == 0
        assert tab.run("globalThis.hit") is None
        assert "<b>anna</b>" in tab.run("byId('count').textContent")
        sent = {each["url"].rpartition("/")[2].partition("#")[0] for each in tab.requests()}
        assert sent == {"", "claim", "questions"}
        if tab.run("'trustedTypes' in globalThis"):
            with pytest.raises(AssertionError, match="TrustedHTML"):
                tab.run("document.body.innerHTML = '<p>x</p>'")


def test_the_browser_is_killed(tmp_path: Path, store: AnswerStore, program: Callable[[Path], Browser]) -> None:
    """Right after a draw that could not be sent; the same person's next browser sends that one."""
    link = store.add_person("anna")
    with serving(store) as server:
        with program(tmp_path / "profile") as browser:
            tab = browser.tab()
            reach(tab, server, link)
            tab.offline(True)
            answer(tab, "ArrowRight")
            before = kept(tab)
            browser.kill()
        with program(tmp_path / "profile") as browser:
            tab = browser.tab()
            reach(tab, server, link)
            delivered(tab)
            assert kept(tab) == before
            same_z(tab, store)


def test_the_server_is_killed_in_the_middle_of_answers(tmp_path: Path, tab: Tab) -> None:
    """Again and again, while the page answers on: it goes on with its five questions, and sends what it has."""
    write_questions(tmp_path / "q.jsonl", QUESTIONS)
    folder = tmp_path / "s"
    AnswerStore(folder, 0.1).close()
    link = AnswerStore.open(folder).add_person("anna")

    def begin(port: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-m", "private_rlhf.cli", "label", "serve", "--store", str(folder),
                                    "--pairs", str(tmp_path / "q.jsonl"), "--port", port],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdout is not None
        return process, [process.stdout.readline() for _ in range(4)][-1].rpartition(":")[2].strip("/\n")

    process, port = begin("0")
    try:
        enter(tab, f"http://127.0.0.1:{port}/#{link}")
        for number in range(12):
            answer(tab, "ArrowLeft" if number % 2 else "ArrowRight")
            if number % 3 == 1:
                tab.wait("state.questions.length > 1")
                process.send_signal(signal.SIGKILL)
                process.wait()
            if number % 3 == 2:
                process, _ = begin(port)
        delivered(tab)
        same_z(tab, AnswerStore.open(folder))
        assert len(AnswerStore.open(folder).answers()) == 12
    finally:
        process.kill()
        process.wait()


def test_from_disk_with_a_file_of_questions(tmp_path: Path, tab: Tab) -> None:
    """Nothing is sent at all, and what comes out is what a file drop takes."""
    drop = FileDrop(tmp_path / "drop", 100.0)
    drop.ask(QUESTIONS[:3])
    for _ in range(2):  # the second time all are answered already
        tab.open(PAGE.as_uri())
        tab.choose_file("#questions", tmp_path / "drop" / "questions.jsonl")
        tab.run("byId('person').value = 'anna'; byId('epsilon').value = 100; byId('budget').value = 200")
        tab.run("byId('file').requestSubmit()")
        tab.wait("memory && pass().then(() => true)")
        if not tab.run("kept().then((all) => all.length)"):
            tab.wait("!byId('question').hidden")
            first = tab.run("byId('first').lastElementChild.textContent")
            answer(tab, "ArrowLeft")
            answer(tab, "s")
            answer(tab, "t")
        tab.wait("byId('question').hidden && byId('said').textContent.includes('used up')")
    tab.save_in(tmp_path / "drop")
    tab.run("byId('save').click()")
    saved = tmp_path / "drop" / "answers.jsonl"
    wait_for(lambda: saved.is_file() and saved.stat().st_size, "the file of answers")
    assert tab.requests() == []
    answers = drop.answers()
    assert (answers["q0"], answers["q1"]) == (1 if first == QUESTIONS[0].response_a else -1, None)
    assert answers["q2"] in (1, -1)


LONG = "\n\n".join(["# Title", "### Part", "1. a\n   - `b`", "> c [d](https://example.org)", "```python\ne\n```",
                    "| f | g |\n|---|---|\n| h | i |", *(f"**line** {i}" for i in range(80))])  # fmt: skip


def test_axe_finds_no_barrier(store: AnswerStore, tab: Tab) -> None:
    """axe-core's rules, WCAG 2.1 AA and best practices: at the practice, while one answers, with everything unfolded,
    and at the end; in light and dark, on a phone and a desk, from the right; the operator's page; the page from disk.
    """
    link = store.add_person("anna")
    rules = "# Rules\n\n1. **True**"
    with serving(store, guidelines=rules) as server:
        reach(tab, server, link)
        tab.lift_policy()
        tab.open(f"{tab.run('location.href')}")
        tab.wait("!byId('question').hidden")
        check_barriers(tab)
        tab.press("ArrowRight")
        tab.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        check_barriers(tab)
        tab.run(f"showPair([{json.dumps(LONG)}, {json.dumps(LONG)}, {json.dumps(LONG)}])")
        check_barriers(tab)
        tab.run("byId('language').value = 'ar'; byId('language').dispatchEvent(new Event('change'))")
        check_barriers(tab)
        tab.run("byId('language').value = 'en'; byId('language').dispatchEvent(new Event('change'))")
        tab.run("state.practised = false; practise()")
        check_barriers(tab)
        tab.run("pass()")
        tab.press("ArrowRight")
        tab.press("Enter")
        delivered(tab)
        tab.run("stop('end_now', true); state.levels = [0.1, 1, 4]; showLevels()")
        check_barriers(tab)
        tab.open(f"http://127.0.0.1:{server.port}/operator#{server.operator}")
        tab.wait("document.getElementById('people').rows.length === 1")
        tab.run("byId('levels').hidden = false; byId('name').value = 'ben'; byId('invite').requestSubmit()")
        tab.wait("byId('invitations').children.length === 1")
        check_barriers(tab)
        tab.open(PAGE.as_uri())
        tab.wait("!byId('file').hidden")
        check_barriers(tab)


def test_all_of_it_by_keyboard(tmp_path: Path, tab: Tab) -> None:
    """Tab reaches every control, Enter and Space press them, and what happens is said in the live region."""
    store = AnswerStore(tmp_path / "store", 100.0)
    store.ask(QUESTIONS)
    with serving(store) as server:
        reach(tab, server, store.add_person("anna"))
        reached = []
        for _ in range(7):
            tab.press("Tab")
            reached.append(tab.run("document.activeElement.dataset.choice ?? document.activeElement.tagName"))
            outline = tab.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", "focus can be seen"
        assert reached[:4] == ["first", "second", "tie", "skip"]
        assert {"INPUT", "SUMMARY"} <= set(reached)
        tab.run("byId('keys').click()")
        tab.press("t")
        assert tab.run("state.chosen") is None, "single keys can be switched off"
        tab.run("byId('keys').click(); document.querySelector('[data-choice=tie]').focus()")
        tab.press("Enter")
        assert tab.run("state.chosen") == "tie"
        assert "Nothing is drawn yet" in tab.run("document.querySelector('[role=status]').textContent")
        tab.press("Escape")
        assert tab.run("state.chosen") is None
        tab.press("ArrowLeft", "ArrowRight", "s", "Enter")
        delivered(tab)
        assert store.answers() == {"q0": None}
