"""The page's store: a person is asked a pair once, whatever ids it has and however the person was invited."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.release import read_release
from private_rlhf.data.totals import check_totals
from private_rlhf.labelling.questions import Question, make_question
from private_rlhf.labelling.store import AHEAD, FILE, AnswerStore
from private_rlhf.labelling.tasks import export_bundle

THIRTY = [make_question(f"again {i}", "p", "x", "y") for i in range(30)]
TURNED = Question("turned", "p", THIRTY[0].response_b, THIRTY[0].response_a)
OTHERS = [make_question(f"q{i}", f"prompt {i}", "yes", "no") for i in range(3)]


def answer_all(store: AnswerStore, name: str) -> list[str]:
    """Ids of all that a person is asked, answered with 1."""
    found = []
    while waiting := store.open_questions(name):
        assert len(waiting) <= AHEAD
        for event, question, _ in waiting:
            store.give(name, event, 1)
            found.append(question.id)
    return found


def a_store(folder: Path) -> AnswerStore:
    store = AnswerStore(folder, 1.0)
    store.ask([*THIRTY, TURNED, *OTHERS])
    for name in ("anna", "ben"):
        store.add_person(name)
    return store


def test_a_pair_under_thirty_ids_is_asked_once_of_a_person(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s")
    assert answer_all(store, "anna") == ["again 0", "q0", "q1", "q2"]
    assert answer_all(store, "ben") == ["again 1"]
    assert export_bundle(tmp_path / "s", tmp_path / "out").totals == {"record": 2.0, "person": 4.0}
    assert check_totals(read_release(tmp_path / "out")) == 2.0


def test_not_after_a_new_link_either(tmp_path: Path) -> None:
    """What a person held and did not answer may have been drawn in a browser that was lost."""
    store = a_store(tmp_path / "s")
    held = [question.id for _, question, _ in store.open_questions("anna")]
    assert held == ["again 0", "q0", "q1", "q2"]
    store.remove_person("anna")
    store.add_person("anna")
    assert store.open_questions("anna") == []
    assert answer_all(store, "ben") == held


@pytest.mark.parametrize("name", ["Anna", "anna ", "\u200banna", "\uff41nna"])
def test_not_under_another_spelling_of_the_name_either(tmp_path: Path, name: str) -> None:
    """Whoever renews a link and types the name otherwise would make a second person of one."""
    store = a_store(tmp_path / "s")
    answer_all(store, "anna")
    with pytest.raises(UserError, match=r"must differ from 'anna' in more|must be a name"):
        store.add_person(name)
    assert [each.name for each in store.persons()] == ["anna", "ben"]
    store._rows("INSERT INTO people (name) VALUES (?)", "Anna")  # as earlier versions let her be
    store.add_person("anna")


def test_a_store_of_before_opens_and_keeps_the_rule(tmp_path: Path) -> None:
    """As 13e2ce0 made it: neither the pairs of events nor who was asked them is in it."""
    a_store(tmp_path / "s").close()
    base = sqlite3.connect(tmp_path / "s" / FILE)
    first, second = (
        base.execute("SELECT event FROM events WHERE id = ?", (f"again {i}",)).fetchone()[0] for i in (0, 1)
    )
    base.execute("UPDATE events SET person = 'anna', answer = 1 WHERE event = ?", (first,))
    base.execute("UPDATE events SET person = 'anna' WHERE event = ?", (second,))
    base.execute("DROP TABLE asked")
    base.execute("ALTER TABLE events DROP COLUMN record")
    base.commit()
    base.close()
    for _ in range(2):
        store = AnswerStore.open(tmp_path / "s")
        assert len(store.questions()) == 34
        store.close()
    store = AnswerStore.open(tmp_path / "s")
    assert answer_all(store, "anna") == ["again 1", "q0", "q1", "q2"]  # she held `again 1` then
    assert answer_all(store, "ben") == ["again 2"]
    assert export_bundle(tmp_path / "s", tmp_path / "out").totals == {"record": 3.0, "person": 5.0}
