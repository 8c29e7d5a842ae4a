"""A kill before any durable step of a release, a correction, the answers of people, a filter: what goes on, and how.

The default tier tries a sample of the steps, `slow` every one; the table of docs/explanation/assurance.md is printed by
`python -m pytest -n 0 -s -m slow tests/privacy/test_kills.py tests/stages/test_online_kills.py`.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.commands.label import export
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.labelling.questions import Question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.privacy.local import DrawStore, LabelFilter
from private_rlhf.privacy.records import record_id
from support.kills import Work, contents, kill_everywhere
from support.other_machines import move_to

pytestmark = pytest.mark.usefixtures("quick_disk")
COUNT = 8
CORRECTION = Options(event_column="event", corrects_column="corrects")


def rows_of(fixed: bool = False, named: bool = True) -> list[dict[str, str]]:
    """Eight pairs; `fixed`: one label is turned round, as an event with a name, if it is to have one."""
    rows = [
        {"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}", "event": "", "corrects": ""}
        for i in range(COUNT)
    ]
    if fixed:
        row = rows[3]
        own = record_id(row["prompt"], (row["chosen"], row["rejected"]))
        row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
        row |= {"event": "fix", "corrects": own} if named else {}
    return rows


def privatize(folder: Path, rows: list[dict[str, str]], name: str, epsilon: float) -> None:
    data = folder / f"{name}.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not data.exists():  # the source is older than the work that may be killed
        data.write_text(text)
    privatize_source(Request(str(data), folder / name, epsilon, folder / "owner.key", options=CORRECTION, workers=1))


def ledger_of(folder: Path) -> dict[str, Any]:
    """What the ledger shows, without times, and that it is sound."""
    ledger = Ledger.open(load_key(folder / "owner.key"))
    assert ledger.verify() == []
    shown = ledger.show()
    for entry in shown["releases"]:
        entry.pop("time", None), entry.pop("released", None)
    return shown


def release(name: str, rows: list[dict[str, str]], epsilon: float, total: float) -> Work:
    """A release of the rows, after which the ledger's total is as stated."""

    def look(folder: Path) -> None:
        spent = ledger_of(folder)["epsilon_total"]
        assert spent in (total, BEFORE.get(name, 0.0)), f"spent {spent}"
        assert spent == total or not any((folder / name).rglob("*")), "output that was not charged"
        if not any((folder / name).rglob("*")) and (folder / name).exists():
            (folder / name).rmdir()  # an empty folder tried whether the name can be given; its owner may remove it

    def result(folder: Path) -> object:
        bundles = {path.name: contents(path) for path in folder.iterdir() if (path / "_manifest").exists()}
        return bundles, ledger_of(folder)

    def act(folder: Path) -> None:
        privatize(folder, rows, name, epsilon)

    return Work(act, look, result)


BEFORE = {"higher": 1.0, "lower": 1.0, "refused": 1.0, "corrected": 1.0}
RELEASES: dict[str, tuple[dict[str, Any], float, float]] = {  # rows, ε, the ledger's total afterwards
    "first": ({}, 1.0, 1.0),
    "higher": ({}, 2.0, 2.0),
    "lower": ({}, 0.5, 1.0),
    "refused": ({"fixed": True, "named": False}, 1.0, 1.0),
    "corrected": ({"fixed": True}, 1.0, 2.0),
}


def tried(name: str, work: Work, folder: Path, stride: int, least: int) -> None:
    """No fault at any of the steps; prints the row of the table."""
    found = kill_everywhere(work, folder, stride, start=0 if stride == 1 else len(name) % stride)
    print(f"| {name} | {found.steps} | {found.kills} | {len(found.faults)} |")
    assert not found.faults, found.faults
    assert found.steps >= least
    assert found.kills == found.steps or stride > 1


STRIDES = [pytest.param(29, id="sample"), pytest.param(1, id="every", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A release in this process: its children need not import what it needs."""
    folder = tmp_path_factory.mktemp("warm")
    keygen(folder / "owner.key")
    privatize(folder, rows_of(), "warm", 1.0)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", RELEASES)
def test_a_release_goes_on_after_any_kill(tmp_path: Path, name: str, stride: int) -> None:
    """The same bytes and the same total; nothing in the world that was not charged; nothing left over."""
    folder = tmp_path / "work"
    folder.mkdir()
    move_to(folder)
    keygen(folder / "owner.key")
    rows, epsilon, total = RELEASES[name]
    if name in BEFORE:
        privatize(folder, rows_of(), "before", 1.0)
    given = rows_of(**rows)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    tried(name, release(name, given, epsilon, total), folder, stride, least=10)


# --- answers of people ------------------------------------------------------------------------------------------------

QUESTIONS = [Question(f"q{i}", f"Say {i}.", f"yes {i}", f"no {i}") for i in range(6)]
DRAWN = {each.id: (1, -1, -1, 1, -1, 1)[i] for i, each in enumerate(QUESTIONS)}  # the browser keeps its draws


def label(folder: Path) -> None:
    """Asks, answers as a page does, notes what was confirmed, and exports."""
    store = AnswerStore(folder / "store", 1.0)
    store.ask(QUESTIONS)
    while questions := store.open_questions("ann"):
        for event, question, _ in questions:
            store.give("ann", event, DRAWN[question.id])
            with (folder / "confirmed").open("a") as file:
                file.write(f"{question.id}\n")
    store.close()
    export(folder / "store", None if (folder / "bundle").exists() else folder / "bundle", folder / "answers.jsonl")


def confirmed_stand(folder: Path) -> None:
    """What the store confirmed is there, as it was given; nothing else is."""
    stored: dict[str, int | None] = {}
    if (folder / "store" / "answers.db").exists():
        with closing(AnswerStore(folder / "store", 1.0)) as store:
            stored = store.answers()
    confirmed = (folder / "confirmed").read_text().split() if (folder / "confirmed").exists() else []
    assert set(confirmed) <= stored.keys(), "a confirmed answer is lost"
    assert stored.items() <= DRAWN.items(), "an answer that nobody gave"


def exported(folder: Path) -> object:
    with closing(AnswerStore(folder / "store", 1.0)) as store:
        people = store.persons()
    return (folder / "answers.jsonl").read_bytes(), contents(folder / "bundle"), people


@pytest.mark.parametrize("stride", STRIDES)
def test_no_confirmed_answer_is_lost_by_any_kill(tmp_path: Path, stride: int) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    store = AnswerStore(folder / "store", 1.0)
    store.add_person("ann")
    store.close()
    tried("label answers and export", Work(label, confirmed_stand, exported), folder, stride, least=60)


# --- labels that are drawn where they are made ------------------------------------------------------------------------

LINES = b"".join(json.dumps({"id": f"e{i}", "label": 1 - 2 * (i % 2)}).encode() + b"\n" for i in range(24))


def filtered(folder: Path) -> None:
    """Two portions through the filter; what is sent goes on at the end of what a killed one sent."""
    draws = DrawStore(folder / "draws.db", (-1, 1))
    portions = iter([LINES[: len(LINES) // 2], LINES[len(LINES) // 2 :], b""])
    with (folder / "sent").open("ab", buffering=0) as file:
        LabelFilter(draws, 0.3, (-1, 1), "id", "label", ()).serve(lambda: next(portions), file.write)
    draws.close()


def draws_of(folder: Path) -> dict[str, int]:
    """The draw of each event that was sent; AssertionError for an event with two."""
    for path in folder.glob(".draws.db.*.tmp*"):
        path.unlink()  # open: a store killed while it was made, still without a draw, stays under a hidden name
    found: dict[str, int] = {}
    sent = (folder / "sent").read_bytes() if (folder / "sent").exists() else b""
    for row in map(json.loads, sent[: sent.rfind(b"\n") + 1].splitlines()):
        assert found.setdefault(row["id"], row["label"]) == row["label"], "drawn again"
    return found


@pytest.mark.parametrize("stride", STRIDES)
def test_no_local_label_is_drawn_again_after_any_kill(tmp_path: Path, stride: int) -> None:
    """The second run draws other coins: at ε = 0.3 half of the labels that it drew again would differ."""
    folder = tmp_path / "work"
    folder.mkdir()
    tried("label-filter", Work(filtered, draws_of, lambda at: sorted(draws_of(at))), folder, stride, least=15)
