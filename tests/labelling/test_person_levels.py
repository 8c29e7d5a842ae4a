"""Each person's own ε at the labelling page: chosen before the first question, charged as it was when one was put."""

from __future__ import annotations

import re
import sqlite3
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.labelling.labellers import answers_within
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AHEAD, FILE, AnswerStore, NotALevel

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


def test_the_levels_are_terms_of_the_store(store: AnswerStore) -> None:
    assert AnswerStore(store._folder, list(LEVELS), 6.0).levels == AnswerStore.open(store._folder).levels == LEVELS
    for terms in ((4.0, 6.0), ((0.5, 4.0), 6.0), (LEVELS, None)):
        with pytest.raises(UserError, match="other --store"):
            AnswerStore(store._folder, *terms)
    with pytest.raises(UserError, match="other --store"):
        AnswerStore.open(store._folder, 4.0)  # as an online run at one ε does
    for levels, said in (((1.0,), "2 to 16 different"), ((1.0, 1.0), "different"), ((0.0, 1.0), "above 0")):
        with pytest.raises(UserError, match=said):
            AnswerStore(store._folder / "none", levels)
    with pytest.raises(UserError, match="holds no answer at epsilon 4"):
        AnswerStore(store._folder / "none", LEVELS, 3.0)


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
    assert of_one.answer_counts() == {"anna": {1.0: 3}}
    AnswerStore(tmp_path / "new", 1.0, 3.0).close()
    rows = re.compile("^INSERT.*\n", flags=re.MULTILINE)
    assert rows.sub("", dump(tmp_path / "new")) == rows.sub("", f"BEGIN TRANSACTION;{OF_ONE}COMMIT;")
    assert '{"format": 1, "epsilon": 1.0, "budget_per_person": 3.0}' in dump(tmp_path / "new")
