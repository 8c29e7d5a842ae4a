"""docs/how-to/annotation-tools.md: its programs, run on stand-ins for the tools, and what comes back from there."""

from __future__ import annotations

import json
import re
import sys
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from private_rlhf.cli import main
from private_rlhf.privacy.keys import keygen

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "annotation-tools.md").read_text(encoding="utf-8")
PUT, TAKE, TASKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
(INTERFACE,) = re.findall(r"^```xml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
QUESTIONS = [{"id": f"q{i}", "prompt": f"Say {i}.", "response_a": f"A {i}", "response_b": f"B {i}"} for i in range(6)]
PEOPLE = ("anna", "ben")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the questions, from which the page's programs run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    keygen(tmp_path / "owner.key")
    return tmp_path


def run(program: str) -> None:
    exec(compile(program, "docs/how-to/annotation-tools.md", "exec"), {})


class Argilla(ModuleType):
    """As much of Argilla as the page calls: the data sets of one server, by name."""

    def __init__(self) -> None:
        super().__init__("argilla")
        self.stored: dict[str, list[Any]] = {}
        self.asked: list[Any] = []
        self.TextField = self.LabelQuestion = self.Settings = SimpleNamespace

    def Argilla(self, api_url: str, api_key: str) -> Any:
        return SimpleNamespace(datasets=lambda name: SimpleNamespace(records=lambda with_responses: self.stored[name]))

    def Dataset(self, name: str, settings: Any, client: Any) -> Any:
        def log(rows: list[dict[str, str]]) -> None:
            names = [field.name for field in settings.fields]
            self.stored[name] += [SimpleNamespace(fields={n: row[n] for n in names}, responses=[]) for row in rows]

        def create() -> None:
            self.stored[name] = []
            self.asked = settings.questions

        return SimpleNamespace(create=create, records=SimpleNamespace(log=log))

    def answer(self, record: int, person: str, value: str, status: str = "submitted") -> None:
        said = SimpleNamespace(value=value, user_id=person, status=status)
        self.stored["preferences"][record].responses.append(said)


def chosen(export: str, folder: Path, capsys: pytest.CaptureFixture[str], shape: str) -> list[tuple[str, str]]:
    """Pairs of the preferred response and the other, after `inspect` and a release that flips next to nothing."""
    assert main(["inspect", export]) == 0
    printed = capsys.readouterr()
    assert shape in printed.out + printed.err
    arguments = ["--data", export, "--output", "release", "--epsilon", "50", "--key", "owner.key"]
    assert main(["privatize", *arguments]) == 0
    return sorted((row["chosen"], row["rejected"]) for row in pq.read_table(folder / "release").to_pylist())


def test_argilla_round_trip(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two people answer; a draft, a discarded answer and a question without an answer are no labels."""
    argilla = Argilla()
    monkeypatch.setitem(sys.modules, "argilla", argilla)
    run(PUT)
    (question,) = argilla.asked
    assert list(question.labels) == ["response_a", "response_b"]
    for i in range(4):
        argilla.answer(i, PEOPLE[0], "response_a")
        argilla.answer(i, PEOPLE[1], "response_b")
    argilla.answer(4, PEOPLE[0], "response_a", "discarded")
    argilla.answer(4, PEOPLE[1], "response_b", "draft")
    run(TAKE)
    expected = [pair for i in range(4) for pair in ((f"A {i}", f"B {i}"), (f"B {i}", f"A {i}"))]
    assert chosen("argilla.jsonl", here, capsys, "argilla") == sorted(expected)


def annotated(tasks: list[dict[str, Any]], answer: Callable[[int], str]) -> list[dict[str, Any]]:
    """Label Studio's JSON export of the page's interface: person 1 answers, person 2 skips."""
    (pairwise,) = ElementTree.fromstring(INTERFACE).iter("Pairwise")
    names = {"from_name": pairwise.get("name"), "to_name": pairwise.get("toName"), "type": "pairwise"}
    return [
        {"id": i, **task, "annotations": [
            {"completed_by": 1, "was_cancelled": False, "result": [{**names, "value": {"selected": answer(i)}}]},
            {"completed_by": 2, "was_cancelled": True, "result": []},
        ]}
        for i, task in enumerate(tasks)
    ]  # fmt: skip


def test_label_studio_round_trip(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(TASKS)
    tasks = json.loads((here / "tasks.json").read_text(encoding="utf-8"))
    exported = annotated(tasks, lambda i: ("left", "right")[i % 2])
    (here / "label-studio.json").write_text(json.dumps(exported), encoding="utf-8")
    expected = [(f"A {i}", f"B {i}")[:: 1 if i % 2 == 0 else -1] for i in range(6)]
    assert chosen("label-studio.json", here, capsys, "label-studio") == sorted(expected)


def test_the_interface_shows_the_fields_under_their_names(here: Path) -> None:
    """Otherwise answers name what a task does not hold."""
    texts = {text.get("name"): text.get("value") for text in ElementTree.fromstring(INTERFACE).iter("Text")}
    assert texts == {name: f"${name}" for name in ("prompt", "response_a", "response_b")}
    sdk = pytest.importorskip("label_studio_sdk.label_interface", reason="label-studio-sdk is not installed")
    interface = sdk.LabelInterface(INTERFACE)
    interface.validate()
    run(TASKS)
    for task in annotated(json.loads((here / "tasks.json").read_text(encoding="utf-8")), lambda i: "left"):
        assert interface.validate_task({"data": task["data"]})


def test_the_programs_work_on_argilla_s_own_objects(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they go without a server."""
    rg = pytest.importorskip("argilla", reason="argilla is not installed")
    sent: list[Any] = []
    monkeypatch.setattr(rg.Argilla, "_validate_connection", lambda client: None)
    monkeypatch.setattr(rg.Dataset, "create", lambda dataset: dataset.settings.validate())
    ingest = lambda records, rows: sent.extend(records._ingest_records(rows, user_id=uuid.UUID(int=0)))  # noqa: E731
    monkeypatch.setattr("argilla.records._dataset_records.DatasetRecords.log", ingest)
    run(PUT)
    assert [{"id": each.external_id, **each.fields} for each in sent] == QUESTIONS

    people = [uuid.UUID(int=i) for i in (1, 2)]
    given = zip(people, ("submitted", "discarded"), strict=True)
    answered = [rg.Response("better", "response_a", person, status) for person, status in given]
    stored = [rg.Record(fields=each.fields, responses=[] if i else answered) for i, each in enumerate(sent)]
    dataset = SimpleNamespace(records=lambda with_responses: stored)
    monkeypatch.setattr(rg.Argilla, "datasets", property(lambda client: lambda name: dataset))
    run(TAKE)
    (line,) = (here / "argilla.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [{"value": "response_a", "user_id": str(people[0])}]
    fields = {name: QUESTIONS[0][name] for name in ("prompt", "response_a", "response_b")}
    assert json.loads(line) == {"fields": fields, "responses": {"better": answers}}
