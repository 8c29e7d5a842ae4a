"""Tasks in, bundles and z out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.core.errors import UserError
from pipeline.data.release import read_release
from pipeline.labelling.labellers import FileDrop
from pipeline.labelling.questions import make_question, read_questions, write_answers
from pipeline.labelling.store import AnswerStore
from pipeline.labelling.tasks import export_bundle, read_tasks

QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(6)]
FIELDS = ("prompt", "answer1", "answer2")
DATA = {"prompt": "p", "answer1": "x", "answer2": "y"}
TASK = {"id": 7, "data": DATA, "annotations": [], "total_annotations": 0}


def test_label_studio_tasks_become_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that may carry answers are left out, and named without what they hold."""
    told = {"sentiment": "left", "choice": {"selected": "left"}}
    tasks = [TASK, TASK | {"id": "b", "inner_id": 2, "agreement": 0.9, "data": DATA | told}]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    assert main(["label", "tasks", str(tmp_path / "tasks.json"), "--output", str(tmp_path / "q.jsonl")]) == 0
    (left_out,) = capsys.readouterr().err.splitlines()
    assert all(name in left_out for name in ("agreement", "data.choice", "data.sentiment", "inner_id"))
    assert "0.9" not in left_out
    assert "selected" not in left_out
    assert read_questions(tmp_path / "q.jsonl") == [make_question(id, "p", "x", "y") for id in ("7", "b")]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([TASK, TASK | {"annotations": [{"result": [{"value": {"selected": "left"}}]}]}], "task 2: holds annotations"),
        ([TASK | {"predictions": [{"score": 1}]}], "privatize"),
        ([TASK | {"total_annotations": 1}], "annotations"),
        ([TASK | {"data": {"prompt": "p"}}], "no field answer1"),
        ([TASK | {"data": {"prompt": "p", "answer1": "x", "answer2": "x"}}], "the same"),
        ([TASK | {"data": {"prompt": "p", "answer1": 3, "answer2": "x"}}], "task 1"),
        ([{"data": {}}], "of the form"),
        ([], "no JSON list"),
        ({"id": 1}, "no JSON list"),
    ],
)
def test_other_tasks_are_refused(tmp_path: Path, tasks: Any, said: str) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    with pytest.raises(UserError, match=said):
        read_tasks(tmp_path / "tasks.json", FIELDS)


def answered_store(folder: Path) -> AnswerStore:
    """A skip, three answers, and two questions that wait."""
    store = AnswerStore(folder, 1.0)
    store.ask(QUESTIONS)
    store.add_person("anna")
    for (event, _), answer in zip(store.open_questions("anna"), (1, -1, 0, 1), strict=False):
        store.give("anna", event, answer)
    return store


def test_a_store_is_exported_as_a_bundle_and_as_lines(tmp_path: Path) -> None:
    answered_store(tmp_path / "s")
    options = ["--store", str(tmp_path / "s"), "--out", str(tmp_path / "out"), "--answers", str(tmp_path / "a.jsonl")]
    assert main(["label", "export", *options]) == 0
    release = read_release(tmp_path / "out")
    release.check_rows()
    assert release.manifest.guarantee["key_mode"] == "local"
    assert release.manifest.guarantee["mark"] is None
    assert release.manifest.noise.epsilon == 1.0
    labelled = [(QUESTIONS[place], z) for place, z in ((0, 1), (1, -1), (3, 1))]
    expected = {(each.prompt, *(each.response_a, each.response_b)[::z]) for each, z in labelled}
    assert {(row.prompt, row.chosen, row.rejected) for row in release} == expected
    assert main(["label", "export", *options[:4]]) == 2, "a bundle is never written over"
    assert main(["label", "export", *options[:2]]) == 2

    drop = FileDrop(tmp_path / "drop", 1.0)
    drop.ask(QUESTIONS)
    (tmp_path / "drop" / "answers.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    assert drop.answers() == {"q0": 1, "q1": -1, "q2": None, "q3": 1}
    export_bundle(tmp_path / "drop", tmp_path / "same")
    assert list(read_release(tmp_path / "same")) == list(release)


def test_a_pair_that_was_asked_twice_is_there_twice(tmp_path: Path) -> None:
    drop = FileDrop(tmp_path / "drop", 1.0)
    drop.ask([make_question(id, "p", "x", "y") for id in ("1", "2", "3")])
    write_answers(tmp_path / "drop" / "answers.jsonl", {"1": 1, "2": -1, "3": 1})
    assert export_bundle(tmp_path / "drop", tmp_path / "out") == 3
    release = read_release(tmp_path / "out")
    release.check_rows()
    assert sorted(row.chosen for row in release) in (["x", "x", "y"], ["x", "y", "y"])


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store"):
        export_bundle(tmp_path / "none", tmp_path / "out")
    drop = FileDrop(tmp_path / "drop", 1.0)
    drop.ask(QUESTIONS)
    write_answers(tmp_path / "drop" / "answers.jsonl", {"q0": None})
    with pytest.raises(UserError, match="no answer"):
        export_bundle(tmp_path / "drop", tmp_path / "out")
    turns = [[{"role": "user", "content": text}] for text in "pxy"]
    drop.ask([make_question("m", *turns)])
    write_answers(tmp_path / "drop" / "answers.jsonl", {"q0": 1, "m": 1})
    with pytest.raises(UserError, match="two stores"):
        export_bundle(tmp_path / "drop", tmp_path / "out")
    write_answers(tmp_path / "drop" / "answers.jsonl", {"m": 1})
    assert not (tmp_path / "out").exists()
    assert export_bundle(tmp_path / "drop", tmp_path / "out") == 1
