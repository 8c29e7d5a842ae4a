"""Each person's own ε at the labelling page: chosen before the first question, charged as it was when one was put."""

from __future__ import annotations

import itertools
import json
import math
import re
import sqlite3
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelling.test_page import answer, enter, serving
from labelling.test_server import Client
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.data.release import PAGE, read_release
from private_rlhf.data.release_import import divide
from private_rlhf.data.totals import check_totals
from private_rlhf.labelling.labellers import answers_within
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.server import LEVEL_BYTES, LabelServer
from private_rlhf.labelling.store import AHEAD, FILE, AnswerStore, NotALevel
from private_rlhf.labelling.tasks import export_bundle
from scipy.stats import binom
from support.browsers import Browser, Tab

LEVELS = (0.5, 1.0, 4.0)
QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(40)]


@pytest.fixture
def store(tmp_path: Path) -> AnswerStore:
    """Forty questions, three levels, a budget of six, and a person."""
    store = AnswerStore(tmp_path / "store", LEVELS, 6.0)
    store.ask(QUESTIONS)
    store.add_person("anna")
    return store


def test_nothing_is_handed_out_before_a_level_is_chosen(store: AnswerStore) -> None:
    assert store.level_of("anna") is None
    assert store.open_questions("anna") == []
    for number in (-1, 3, 15):
        with pytest.raises(NotALevel):
            store.choose_level("anna", number)
    assert store.open_questions("anna") == []
    store.choose_level("anna", 1)
    assert AnswerStore.open(store._folder).level_of("anna") == 1.0, "the store remembers it"
    assert {epsilon for *_, epsilon in store.open_questions("anna")} == {1.0}


def test_a_change_is_for_questions_that_come_later(store: AnswerStore) -> None:
    store.choose_level("anna", 0)
    held = store.open_questions("anna")
    store.give("anna", held[0][0], 1)
    store.choose_level("anna", 1)
    after = store.open_questions("anna")
    assert after[: AHEAD - 1] == held[1:]
    assert [epsilon for *_, epsilon in after] == [0.5] * (AHEAD - 1) + [1.0]
    for event, _, _ in after:
        store.give("anna", event, -1)
    assert store.epsilons() == {f"q{i}": 0.5 for i in range(AHEAD)} | {"q5": 1.0}
    assert store.answer_counts() == {"anna": {0.5: 5, 1.0: 1}}


def test_what_was_handed_out_counts_at_its_level_though_it_went_to_others(store: AnswerStore) -> None:
    """Of six, an earlier browser may have spent four on one question; two are left for four answers at .5."""
    store.choose_level("anna", 2)
    (first,) = store.open_questions("anna")
    store.choose_level("anna", 0)
    store.add_person("anna")
    left = store.open_questions("anna")
    assert [epsilon for *_, epsilon in left] == [0.5] * 4
    assert first[0] not in {event for event, *_ in left}
    store.add_person("ben")
    store.choose_level("ben", 1)
    assert store.open_questions("ben")[0] == (first[0], first[1], 1.0)


decimals = st.integers(1, 60).map(lambda tenths: tenths / 10)


@given(st.lists(decimals, min_size=2, max_size=5, unique=True), st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_budget_is_spent_to_the_last_tenth_and_no_further(
    tmp_path_factory: pytest.TempPathFactory, levels: list[float], data: st.DataObject
) -> None:
    """In whole tenths: whatever is chosen, skipped and answered in which order, the store hands out what still fits."""
    budget = data.draw(st.integers(round(10 * max(levels)), 200))
    store = AnswerStore(tmp_path_factory.mktemp("tenths") / "s", sorted(levels), budget / 10)
    store.ask(QUESTIONS)
    store.add_person("anna")
    tenths = {level: round(10 * level) for level in levels}
    cost: dict[str, int] = {}
    for _ in range(8):
        number = data.draw(st.integers(0, len(levels) - 1))
        store.choose_level("anna", number)
        left, waiting = budget - sum(cost.values()), store.open_questions("anna")
        new = [each for each in waiting if each[0] not in cost]
        assert len(new) == min(AHEAD - (len(waiting) - len(new)), left // tenths[store.levels[number]])
        cost |= {event: tenths[epsilon] for event, _, epsilon in new}
        assert sum(cost.values()) <= budget
        for event, _, _ in waiting:
            answer = data.draw(st.sampled_from((1, -1, 0, None)))
            if answer is not None:
                store.give("anna", event, answer)
                cost[event] *= answer != 0
    store.close()


@given(st.dictionaries(decimals, st.integers(0, 99)), decimals, st.integers(1, 9_999))
def test_a_sum_of_decimal_fractions_is_exact(draws: dict[float, int], epsilon: float, budget: int) -> None:
    spent = sum((Fraction(round(10 * each), 10) * count for each, count in draws.items()), Fraction())
    most = answers_within(budget / 10, epsilon, draws)
    assert most == max(0, (Fraction(budget, 10) - spent) // Fraction(round(10 * epsilon), 10))


# --- which question for whom ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(zip(("anna", "ben", "cleo"), LEVELS, strict=True))))
def test_the_first_questions_go_to_the_largest_epsilon(tmp_path: Path, order: list[tuple[str, float]]) -> None:
    """Whoever comes first: of all ways to share 15 questions out, none carries more information Σ tanh²(ε/2) v, with v
    the largest for the first question. Then the last one that waits goes to whoever asks."""
    store = AnswerStore(tmp_path / "s", LEVELS)
    store.ask(QUESTIONS[:16])
    for person, level in order:
        store.add_person(person)
        store.choose_level(person, LEVELS.index(level))
    held = {person: [question.id for _, question, _ in store.open_questions(person)] for person, _ in order}
    value = {f"q{i}": 1.0 / (1 + i) for i in range(16)}
    carried = sum(math.tanh(level / 2) ** 2 * value[id] for person, level in order for id in held[person])
    weights = sorted((math.tanh(level / 2) ** 2 for level in LEVELS for _ in range(AHEAD)), reverse=True)
    assert carried == pytest.approx(sum(weight * value[f"q{i}"] for i, weight in enumerate(weights)))
    store.give("anna", store.open_questions("anna")[0][0], 1)
    assert store.open_questions("anna")[-1][1].id == "q15"


def test_questions_are_left_to_nobody_who_takes_no_more(tmp_path: Path) -> None:
    """Of the removed, of those whose budget is spent, and of those who have not chosen."""
    store = AnswerStore(tmp_path / "s", LEVELS, 4.0)
    store.ask(QUESTIONS)
    for person, number in (("gone", 2), ("spent", 2), ("new", None), ("anna", 0)):
        store.add_person(person)
        if number is not None:
            store.choose_level(person, number)
    store.remove_person("gone")
    ((event, question, _),) = store.open_questions("spent")
    store.give("spent", event, 1)
    assert question.id == "q0"
    assert [question.id for _, question, _ in store.open_questions("anna")] == [f"q{i}" for i in range(1, 6)]


@given(st.lists(st.tuples(st.sampled_from(("anna", "ben")), st.booleans()), max_size=12), st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_asked_tells_no_answer(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """Two stores in which the same people do the same, and answer otherwise, hand out the same at the same ε."""
    stores = [AnswerStore(tmp_path_factory.mktemp("s") / "s", LEVELS, 9.0) for _ in range(2)]
    for store in stores:
        store.ask(QUESTIONS[:12])
        for person, level in (("anna", 2), ("ben", 0)):
            store.add_person(person)
            store.choose_level(person, level)
    for person, raised in steps:
        shown = []
        for store in stores:
            store.choose_level(person, 1 + raised)
            waiting = store.open_questions(person)
            shown.append([(question, epsilon) for _, question, epsilon in waiting])
            if waiting:
                store.give(person, waiting[0][0], data.draw(st.sampled_from((1, -1))))
        assert shown[0] == shown[1]
    for store in stores:
        store.close()


def test_the_levels_are_terms_of_the_store(store: AnswerStore) -> None:
    assert AnswerStore(store._folder, list(LEVELS), 6.0).levels == AnswerStore.open(store._folder).levels == LEVELS
    assert AnswerStore.open(store._folder, 4.0).levels == LEVELS
    for terms in ((4.0, 6.0), ((0.5, 4.0), 6.0), (LEVELS, None)):
        with pytest.raises(UserError, match="other --store"):
            AnswerStore(store._folder, *terms)
    with pytest.raises(UserError, match="other --store"):
        AnswerStore.open(store._folder, 1.0)  # as an online run does, which states the largest
    for levels, said in (((1.0,), "2 to 16 different"), ((1.0, 1.0), "different"), ((0.0, 1.0), "above 0")):
        with pytest.raises(UserError, match=said):
            AnswerStore(store._folder / "none", levels)
    with pytest.raises(UserError, match="holds no answer at epsilon 4"):
        AnswerStore(store._folder / "none", LEVELS, 3.0)


# --- the server -------------------------------------------------------------------------------------------------------


def choose(client: Client, digit: str) -> tuple[int, Any]:
    body = f'{{"level":"{digit}"}}'
    assert len(body) == LEVEL_BYTES
    return client("POST", "/level", body)


def test_the_server_asks_nothing_before_a_choice(anna: Client, store: AnswerStore) -> None:
    asked = anna("GET", "/questions")[1]
    assert (asked["questions"], asked["level"], asked["levels"]) == ([], None, [[0.5, 0], [1.0, 0], [4.0, 0]])
    for digit in "3f":
        status, refusal = choose(anna, digit)
        assert (status, refusal["error"].count("\n"), refusal["error"].startswith("a level must be")) == (400, 0, True)
    for body in ('{"level":"g"}', '{"level":"0"} ', '{"level":0.5}'):
        assert anna("POST", "/level", body)[0] in (400, 413)
    assert choose(Client(anna.port, "b" * 64), "0")[0] == 401
    assert anna("GET", "/questions")[1]["questions"] == []
    ((event,),) = store._rows("SELECT event FROM events WHERE place = 0")
    assert anna.give(event, "+")[0] == 404, "nor takes an answer"
    assert choose(anna, "1") == (200, {"level": "1"})
    asked = anna("GET", "/questions")[1]
    assert (asked["level"], {each["epsilon"] for each in asked["questions"]}) == (1.0, {1.0})
    assert len(asked["questions"]) == AHEAD


def test_a_question_that_was_served_keeps_its_level(anna: Client, server: LabelServer) -> None:
    choose(anna, "0")
    first = anna("GET", "/questions")[1]["questions"]
    choose(anna, "2")
    assert anna("GET", "/questions")[1]["questions"] == first, "of six, 2.5 are spent: a level of 4 does not fit"
    choose(anna, "1")
    for each in first[:2]:
        anna.give(each["event"], "-")
    later = anna("GET", "/questions")[1]
    assert later["questions"][:3] == first[2:]
    assert [each["epsilon"] for each in later["questions"]] == [0.5] * 3 + [1.0] * 2
    assert later["levels"] == [[0.5, 2], [1.0, 0], [4.0, 0]]
    anna.give(later["questions"][3]["event"], "+")
    (row,) = Client(server.port, server.operator)("GET", "/progress")[1]["people"]
    assert row == {"name": "anna", "given": 3, "skipped": 0, "held": 4, "level": 1.0,
                   "levels": [[0.5, 2], [1.0, 1], [4.0, 0]]}  # fmt: skip


def test_a_server_of_one_epsilon_says_what_it_always_said(of_one: AnswerStore) -> None:
    of_one.claim(of_one.add_person("anna"), "a" * 64)
    texts = {"prompt": "p3", "response_a": "yes", "response_b": "no"}
    with serving(of_one) as server:
        client = Client(server.port, "a" * 64)
        assert choose(client, "0")[0] == 400
        assert client("GET", "/questions")[1] == {
            "person": "anna", "given": 2, "skipped": 1, "epsilon": 1.0, "budget": 3.0, "page": server.page.sha256,
            "questions": [{"event": "04" * 16, "id": "q3"} | texts],
        }  # fmt: skip
        assert Client(server.port, server.operator)("GET", "/progress")[1] == {
            "epsilon": 1.0, "budget": 3.0, "questions": 4, "answered": 2, "skipped": 1, "held": 1, "rounds": None,
            "people": [{"name": "anna", "given": 2, "skipped": 1, "held": 1}],
        }  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_asks_for_a_level_first(tmp_path: Path, tab: Tab) -> None:
    """By its words; at 100 and 200 no draw turns a label. The operator sees people and answers of each level."""
    store = AnswerStore(tmp_path / "store", (0.5, 100.0, 200.0), 900.0)
    store.ask(QUESTIONS[: AHEAD + 2])
    link = store.add_person("anna")
    with serving(store) as server:
        enter(tab, f"http://127.0.0.1:{server.port}/#{link}")
        tab.wait("!byId('levels').hidden && byId('said').textContent.startsWith('Choose how private')")
        assert tab.run("byId('question').hidden && state.questions.length === 0")
        words = tab.run("[...byId('choices').children].map((each) => each.textContent)")
        assert words[0] == "Of 100 people who preferred answer A, 62 of the reports say A. " \
                           "An answer costs ε\u00a0=\u00a00.5 of your 900."  # fmt: skip
        assert "more than 99 of the reports" in words[1]
        tab.run("byId('choices').children[1].click()")
        for number in range(AHEAD):
            tab.wait(f"byId('prompt').textContent === 'prompt {number}'")
            assert tab.run("byId('odds').textContent.includes('(ε\u00a0=\u00a0100)')")
            if number == 0:
                tab.run("byId('choices').children[2].click()")
                tab.wait("state.epsilon === 200 && byId('choices').children[2].ariaPressed === 'true'")
            first = tab.run("byId('first').lastElementChild.textContent")
            answer(tab, "ArrowLeft")
            tab.wait("kept().then((all) => all.every((each) => each.sent))")
            assert store.answers()[f"q{number}"] == (1 if first == QUESTIONS[number].response_a else -1)
        tab.wait(f"byId('prompt').textContent === 'prompt {AHEAD}'")
        answer(tab, "ArrowLeft")
        tab.wait("kept().then((all) => all.every((each) => each.sent))")
        assert store.answer_counts() == {"anna": {100.0: AHEAD, 200.0: 1}}
        memory = dict(tab.run("kept().then((all) => all.map((each) => [each.event, each.epsilon]))"))
        assert memory.items() <= dict(stored(store)).items()
        tab.wait("byId('spent').textContent === 'Spent: ε\u00a0=\u00a0700 of 900.'")
        bodies = [each["postData"] for each in tab.requests() if each["url"].endswith("/level")]
        assert bodies == ['{"level":"1"}', '{"level":"2"}']
        tab.open(f"http://127.0.0.1:{server.port}/operator#{server.operator}")
        tab.wait("!document.getElementById('levels').hidden")
        cells = "(id) => [...document.querySelectorAll(`#${id} tbody tr, tbody#${id} tr`)].map((row) => row.innerText)"
        assert tab.run(f"({cells})('levels')") == ["0.5\t0\t0", "100\t0\t5", "200\t1\t1"]
        assert tab.run(f"({cells})('people')") == ["anna\t6\t0\t1\t700"]
        assert tab.errors() == []


@pytest.mark.slow
def test_answers_of_each_level_have_its_rate(tmp_path: Path, browser: Browser) -> None:
    """From the choice to the store, 200 answers for response_a at each level; a false alarm in 3 of 10^6 runs."""
    store, most = AnswerStore(tmp_path / "store", LEVELS), 200
    store.ask([make_question(f"q{i}", f"prompt {i}", "yes", "no") for i in range(3 * most + 2 * AHEAD)])
    with serving(store) as server:
        server.of_person.per_second = 1e9
        for number, level in enumerate(LEVELS):
            tab = browser.tab()
            enter(tab, f"http://127.0.0.1:{server.port}/#{store.add_person(f'person {number}')}")
            tab.wait("!byId('levels').hidden")
            tab.run(f"""(async () => {{
                await chooseLevel({number});
                for (let number = 0; number < {most}; number += 1) {{
                    while (byId("question").hidden || state.giving) await new Promise((go) => setTimeout(go, 1));
                    const first = byId("first").lastElementChild.textContent;
                    choose(first === state.questions[0].response_a ? "first" : "second");
                    await give();
                }}
            }})()""")
            tab.wait("kept().then((all) => all.every((each) => each.sent))")
            assert store.answer_counts()[f"person {number}"] == {level: most}
    answers, epsilons = store.answers(), store.epsilons()
    for level in LEVELS:
        low, high = binom.ppf([5e-7, 1 - 5e-7], most, LabelNoise.of(level).keep_prob)
        assert low <= sum(z == 1 and epsilons[id] == level for id, z in answers.items()) <= high


# --- the bundle -------------------------------------------------------------------------------------------------------


def test_a_store_is_exported_with_the_level_of_each_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the labels that are learnt from. Anna is asked at .5 and then at 4, ben at .5, of which he skips one. What
    waits first is left to her, so he answers what she was asked at 4."""
    store = AnswerStore(tmp_path / "s", LEVELS)
    store.ask([make_question(f"{i} {who}", f"p{i}", "yes", "no") for i in range(30) for who in "ab"])
    for name, numbers, z in (("anna", (0, 2), -1), ("ben", (0,), 1)):
        store.add_person(name)
        for number in numbers:
            store.choose_level(name, number)
            for event, *_ in store.open_questions(name):
                store.give(name, event, z)
    store.give("ben", store.open_questions("ben")[0][0], 0)
    options = ["--store", str(tmp_path / "s"), "--out", str(tmp_path / "out"), "--answers", str(tmp_path / "a.jsonl")]
    assert main(["label", "export", *options]) == 0
    answers, epsilons = store.answers(), store.epsilons()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [{"id": id, "label": answers[id], "epsilon": epsilons[id]} for id in sorted(answers)]

    bundle = read_release(tmp_path / "out")
    assert bundle.manifest.levels == {"chosen": PAGE, "events": [[0.5, 10], [1.0, 0], [4.0, 5]]}
    assert bundle.manifest.totals == {"record": 4.5, "person": 22.5}
    assert bundle.manifest.guarantee["statement"].endswith("must not depend on its label")
    assert main(["verify-release", str(tmp_path / "out")]) == 0
    assert "largest total ε of any pair: 4.5; of any person: 22.5" in capsys.readouterr().out
    rows = [(each.prompt, each.response_a if answers[each.id] == 1 else each.response_b, epsilons[each.id])
            for each in store.questions() if answers.get(each.id)]  # fmt: skip
    assert Counter((row.prompt, row.chosen, row.epsilon) for row in bundle) == Counter(rows)
    divide(bundle, None, tmp_path / "train", tmp_path / "test")
    train = read_release(tmp_path / "train")
    train.check_rows()
    noise = train.manifest.noise_of(train.rows)
    assert noise.flip_prob.tolist() == [LabelNoise.of(row.epsilon).flip_prob for row in train]


def test_a_bundle_whose_people_chose_the_least_states_what_they_spent(tmp_path: Path) -> None:
    """Less than the largest level, which nobody chose."""
    store = AnswerStore(tmp_path / "s", LEVELS)
    store.ask(QUESTIONS)
    store.add_person("anna")
    store.choose_level("anna", 0)
    for event, *_ in store.open_questions("anna"):
        store.give("anna", event, 1)
    assert export_bundle(tmp_path / "s", tmp_path / "out").totals == {"record": 0.5, "person": 2.5}
    assert check_totals(read_release(tmp_path / "out")) == 0.5


def test_a_server_is_begun_with_the_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ["label", "serve", "--store", str(tmp_path / "s"), "--epsilon-levels"]
    for levels, said in (("1,1", "different numbers"), ("1", "2 to 16"), ("1,inf", "different numbers")):
        assert main([*new, levels]) == 2
        assert said in capsys.readouterr().err
    assert main([*new, "0.5,4", "--epsilon", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "s").exists()


# --- stores of one ε --------------------------------------------------------------------------------------------------

OF_ONE = """
CREATE TABLE asked (person TEXT, record TEXT, PRIMARY KEY (person, record)) WITHOUT ROWID;
INSERT INTO "asked" VALUES('anna','4d73945e7b6f92d351715dae87b38d9d5377284efb587bf3728ef0577221599b');
INSERT INTO "asked" VALUES('anna','98dcbf759ca8de31f2a0b15ccf698f38ecb5c6fe4441de35c72dd9d9e0f3fbce');
INSERT INTO "asked" VALUES('anna','a5c88d6f97b2743ce5a4a62f8fd216d75d9a2b6f97b44709fd695db26662631c');
CREATE TABLE events (
    event TEXT PRIMARY KEY, place INTEGER NOT NULL UNIQUE, id TEXT NOT NULL UNIQUE, question TEXT NOT NULL,
    person TEXT REFERENCES people,
    answer INTEGER CHECK (answer IS NULL OR answer IN (1, -1, 0) AND person IS NOT NULL)
, record TEXT) WITHOUT ROWID;
INSERT INTO "events" VALUES('01010101010101010101010101010101',0,'q0','{"id": "q0", "prompt": "p0", "response_a":\
 "yes", "response_b": "no"}','anna',1,'98dcbf759ca8de31f2a0b15ccf698f38ecb5c6fe4441de35c72dd9d9e0f3fbce');
INSERT INTO "events" VALUES('02020202020202020202020202020202',1,'q1','{"id": "q1", "prompt": "p1", "response_a":\
 "yes", "response_b": "no"}','anna',-1,'4d73945e7b6f92d351715dae87b38d9d5377284efb587bf3728ef0577221599b');
INSERT INTO "events" VALUES('03030303030303030303030303030303',2,'q2','{"id": "q2", "prompt": "p2", "response_a":\
 "yes", "response_b": "no"}','anna',0,'a5c88d6f97b2743ce5a4a62f8fd216d75d9a2b6f97b44709fd695db26662631c');
INSERT INTO "events" VALUES('04040404040404040404040404040404',3,'q3','{"id": "q3", "prompt": "p3", "response_a":\
 "yes", "response_b": "no"}',NULL,NULL,'c856fd8806c66a501cc11554ea6ee601654650ab47c43637ae3ed4532b3b6b09');
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "facts" VALUES('terms','{"format": 1, "epsilon": 1.0, "budget_per_person": 3.0}');
CREATE TABLE people (name TEXT PRIMARY KEY, link BLOB UNIQUE, secret BLOB UNIQUE) WITHOUT ROWID;
INSERT INTO "people" VALUES('anna',NULL,NULL);
CREATE INDEX of_person ON events (person, place);
"""
"""As 38d8f81 wrote it."""


def stored(store: AnswerStore) -> list[tuple[str, float]]:
    """(event, ε) of all that was handed out."""
    with store._transaction() as base:
        return base.execute("SELECT event, level FROM events JOIN asked USING (person, record)").fetchall()


def dump(folder: Path) -> str:
    base = sqlite3.connect(folder / FILE)
    text = "\n".join(base.iterdump())
    base.close()
    return text


@pytest.fixture
def of_one(tmp_path: Path) -> AnswerStore:
    """A store of one ε that an earlier version made: anna gave two answers and a skip."""
    folder = tmp_path / "of one"
    folder.mkdir(0o700)
    base = sqlite3.connect(folder / FILE)
    base.executescript(OF_ONE)
    base.close()
    return AnswerStore.open(folder)


def test_a_store_of_one_epsilon_stays_as_it_is(of_one: AnswerStore, tmp_path: Path) -> None:
    assert dump(of_one._folder) == f"BEGIN TRANSACTION;{OF_ONE}COMMIT;"
    assert (of_one.levels, of_one.has_levels, of_one.most, of_one.level_of("anna")) == ((1.0,), False, 3, 1.0)
    with pytest.raises(NotALevel):
        of_one.choose_level("anna", 0)
    ((event, _, epsilon),) = of_one.open_questions("anna")
    assert (event, epsilon) == ("04" * 16, 1.0)
    of_one.give("anna", event, 1)
    of_one.ask([make_question("q4", "p4", "yes", "no")])
    assert of_one.open_questions("anna") == [], "three answers at 1 of a budget of 3"
    assert (of_one.answer_counts(), of_one.epsilons()) == ({"anna": {1.0: 3}}, {})
    AnswerStore(tmp_path / "new", 1.0, 3.0).close()
    rows = re.compile("^INSERT.*\n", flags=re.MULTILINE)
    assert rows.sub("", dump(tmp_path / "new")) == rows.sub("", f"BEGIN TRANSACTION;{OF_ONE}COMMIT;")
    assert '{"format": 1, "epsilon": 1.0, "budget_per_person": 3.0}' in dump(tmp_path / "new")
