"""Tasks in, bundles and z out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import divide
from private_rlhf.labelling.labellers import FileDrop, Terminal
from private_rlhf.labelling.questions import make_question, read_questions, write_answers, write_questions
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.labelling.tasks import export_bundle, read_tasks

QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(6)]
DATA = {"prompt": "p", "answer1": "x", "answer2": "y"}
TASK = {"id": 7, "data": DATA, "annotations": [], "total_annotations": 0}


def test_label_studio_tasks_become_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that may carry answers are left out, and named without what they hold."""
    told = {"sentiment": "left", "choice": {"selected": "left"}}
    tasks = [TASK, TASK | {"id": 0}, TASK | {"id": "b", "inner_id": 2, "agreement": 0.9, "data": DATA | told}]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    assert main(["label", "tasks", str(tmp_path / "tasks.json"), "--output", str(tmp_path / "q.jsonl")]) == 0
    (left_out,) = capsys.readouterr().err.splitlines()
    assert all(name in left_out for name in ("agreement", "data.choice", "data.sentiment", "inner_id"))
    assert "0.9" not in left_out
    assert "selected" not in left_out
    assert read_questions(tmp_path / "q.jsonl") == [make_question(id, "p", "x", "y") for id in ("7", "0", "b")]


@pytest.mark.parametrize("wrap", [lambda data: {"data": data}, lambda data: data])
def test_tasks_that_label_studio_would_import_become_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrap: Callable[[dict[str, str]], dict[str, Any]]
) -> None:
    """Without ids: a question has the id of its pair, wherever it stands in the file. Answers stay refused."""
    path, output = tmp_path / "tasks.json", tmp_path / "q.jsonl"
    other = DATA | {"prompt": "q", "source": "x"}
    ids = []
    for tasks in ([DATA, other], [other, DATA]):
        path.write_text(json.dumps([wrap(each) for each in tasks]))
        assert main(["label", "tasks", str(path), "--output", str(output), "--force"]) == 0
        assert "source" in capsys.readouterr().err
        ids.append({each.prompt: each.id for each in read_questions(output)})
    assert ids[0] == ids[1]
    assert len({*ids[0].values()}) == 2
    path.write_text(json.dumps([wrap(DATA) | {"pw": "left", "annotation_id": 3}]))
    assert main(["label", "tasks", str(path), "--output", str(output), "--force"]) == 2
    assert "holds annotations" in capsys.readouterr().err


def answered_store(folder: Path) -> AnswerStore:
    """A skip, three answers, and two questions that wait."""
    store = AnswerStore(folder, 1.0)
    store.ask(QUESTIONS)
    store.add_person("anna")
    for (event, *_), answer in zip(store.open_questions("anna"), (1, -1, 0, 1), strict=False):
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
    by = [read_release(tmp_path / name).manifest.guarantee["randomised_by"] for name in ("out", "same")]
    assert by == ["page", "files"], "of a file nobody here knows who randomised it"


def test_an_export_that_a_run_takes_over_opens_again(tmp_path: Path) -> None:
    """Unsigned as it is, and saying so."""
    answered_store(tmp_path / "s")
    export_bundle(tmp_path / "s", tmp_path / "out")
    assert divide(read_release(tmp_path / "out"), None, tmp_path / "train", tmp_path / "test") == (2, 1)
    for name in ("train", "test"):
        assert read_release(tmp_path / name).manifest.guarantee["unsigned"]


def test_a_pair_under_three_ids_is_charged_for_each_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that an older program, or somebody by hand, filled; the bundle states what the answers cost together."""
    drop = tmp_path / "drop"
    FileDrop(drop, 1.0)
    write_questions(drop / "questions.jsonl", [make_question(id, "p", "x", "y") for id in ("1", "2", "3")])
    write_answers(drop / "answers.jsonl", {"1": 1, "2": -1, "3": 1})
    assert main(["label", "export", "--store", str(drop), "--out", str(tmp_path / "out")]) == 0
    release = read_release(tmp_path / "out")
    assert sorted(row.chosen for row in release) in (["x", "x", "y"], ["x", "y", "y"])
    assert release.manifest.totals == {"record": 3.0, "person": None}
    assert main(["verify-release", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.count("largest total ε of any pair: 3; of any person: not known") == 2
    assert "as stated by whoever wrote answers.jsonl" not in said, "an unsigned manifest says less"
    assert "as stated by an unsigned manifest; not verified here" in said


def test_a_folder_of_a_page_from_disk_is_exported(tmp_path: Path) -> None:
    """As docs/how-to/labelling.md has it: questions, answers, and a file by hand that states their ε; no other kind of
    labeller takes answers of a file for its own."""
    (drop := tmp_path / "drop").mkdir()
    write_questions(drop / "questions.jsonl", QUESTIONS)
    write_answers(drop / "answers.jsonl", {"q0": 1})
    (drop / "labeller.json").write_text('{"epsilon": 1.0}')
    assert export_bundle(drop, tmp_path / "out").rows == 1
    with pytest.raises(UserError, match="other terms"):
        Terminal(drop, 1.0)
    for text in ("5", "[]", '{"epsilon": 2.0}'):
        (drop / "labeller.json").write_text(text)
        with pytest.raises(UserError, match="other terms"):
            FileDrop(drop, 1.0)


def edited(bundle: Path, **changes: Any) -> None:
    """Changes what a manifest says; None takes a key out."""
    facts = json.loads((bundle / "_manifest").read_text()) | changes
    kept = {name: value for name, value in facts.items() if value is not None or name not in changes}
    write_json(bundle / "_manifest", kept)
    for path in bundle.iterdir():  # as a copy, whose times are the tool's own
        path.touch()


@pytest.mark.parametrize(
    ("totals", "said"),
    [
        ({"record": 1.0, "person": None}, "totals.record must be at least 2"),
        ({"record": 2.0, "person": 0.5}, "totals.person must be at least 1"),
        ({"record": 2.0}, "`totals` has no valid value"),
        ({"record": 0, "person": None}, "`totals` has no valid value"),
        ({"record": 2.0, "person": 10**400}, "`totals` has no valid value"),
    ],
)
def test_rows_that_cost_more_than_the_manifest_states_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], totals: dict[str, Any], said: str
) -> None:
    """As rows merged from two stores would: the second answer about a pair is in no statement."""
    FileDrop(tmp_path / "drop", 1.0)
    write_questions(tmp_path / "drop" / "questions.jsonl", [make_question(id, "p", "x", "y") for id in "12"])
    write_answers(tmp_path / "drop" / "answers.jsonl", {"1": 1, "2": 1})
    export_bundle(tmp_path / "drop", tmp_path / "out")
    edited(tmp_path / "out", totals=totals)
    assert main(["verify-release", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_a_bundle_without_a_statement_verifies_and_its_totals_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As 13e2ce0 exported it: nothing about totals, nor about who randomised the labels."""
    answered_store(tmp_path / "s")
    export_bundle(tmp_path / "s", tmp_path / "out")
    assert read_release(tmp_path / "out").manifest.totals == {"record": 1.0, "person": 3.0}
    guarantee = json.loads((tmp_path / "out" / "_manifest").read_text())["guarantee"]
    assert guarantee.pop("randomised_by") == "page"
    edited(tmp_path / "out", totals=None, guarantee=guarantee)
    assert main(["verify-release", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "as counted from its rows, largest total ε of any pair: 1; of any person: not known" in said
    assert "not known: it is not recorded where the labels were randomised" in said


def test_lists_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"id": 1, "data": {"prompt": "p?", "one": [{"text": "a"}], "other": [{"text": "b"}]}}]))
    with pytest.raises(UserError, match=r"task 1: .*; fix or remove it"):
        read_tasks(path, ("prompt", "one", "other"))


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a store"):
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
    assert export_bundle(tmp_path / "drop", tmp_path / "out").rows == 1
