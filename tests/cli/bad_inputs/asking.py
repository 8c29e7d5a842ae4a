"""Options and files of `label`, `online` and `account person`."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cli.bad_inputs.sandbox import Row, option
from private_rlhf.labelling.store import AnswerStore

QUESTION = {"id": "q1", "prompt": "Which?", "response_a": "this", "response_b": "that"}


def rows() -> Iterator[Row]:
    """All of this module."""
    yield from label_rows()
    yield from question_rows()
    yield from task_rows()
    yield from option_rows()
    yield from person_rows()


def label_rows() -> Iterator[Row]:
    """Stores that are none, and settings that no store can have."""
    for value in ("nan", "inf", "0", "-1", "x"):
        yield Row(f"label serve --epsilon {value}", ["label", "serve", "--store=s", f"--epsilon={value}"])
        yield Row(f"label serve --budget-per-person {value}", ["label", "serve", "--store=s", "--epsilon=1", f"--budget-per-person={value}"])
    wrong = {
        "label": ["label"], "label serve: no store": ["label", "serve"], "label serve: a new store without epsilon": ["label", "serve", "--store=s"],
        "label serve: a file": ["label", "serve", "--store=good.jsonl", "--epsilon=1"], "label serve: below a file": ["label", "serve", "--store=good.jsonl/s", "--epsilon=1"],
        "label serve: something else": ["label", "serve", "--store=release", "--epsilon=1"], "label serve: port": ["label", "serve", "--store=s", "--epsilon=1", "--port=70000"],
        "label serve: budget below one answer": ["label", "serve", "--store=s", "--epsilon=1", "--budget-per-person=0.5"],
        "label serve: no such pairs": ["label", "serve", "--store=s", "--epsilon=1", "--pairs=nowhere"],
        "label invite: no store": ["label", "invite", "--store=nowhere", "ann"], "label invite: nobody": ["label", "invite", "--store=nowhere"],
        "label remove: no store": ["label", "remove", "--store=nowhere", "ann"], "label remove: something else": ["label", "remove", "--store=release", "ann"],
        "label export: no store": ["label", "export", "--store=nowhere", "--out=b"], "label export: neither": ["label", "export", "--store=nowhere"],
        "label export: something else": ["label", "export", "--store=release", "--out=b"], "label export: a file": ["label", "export", "--store=good.jsonl", "--answers=a"],
        "label serve: a budget without epsilon": ["label", "serve", "--store=s", "--budget-per-person=3"],
        "label serve: pairs, /dev/zero": ["label", "serve", "--store=s", "--epsilon=1", "--pairs=/dev/zero"],
        "label serve: host without url": ["label", "serve", "--store=s", "--epsilon=1", "--host=0.0.0.0"],
    }  # fmt: skip
    for name, command in wrong.items():
        yield Row(name, command)
    begun = {
        "serve: other terms": ["serve", "--epsilon=2"], "serve: url without https": ["serve", "--url=label.example.org"], "serve: url with a page": ["serve", "--url=https://label.example.org/page/"],
        "invite: a name of controls": ["invite", "an\x1bna"], "remove: nobody": ["remove", "anna"],
    }  # fmt: skip
    for name, command in begun.items():
        yield Row(f"label {name}", ["label", command[0], "--store=s", *command[1:]], make=lambda: AnswerStore(Path("s"), 1.0).close(), may_change=("s/",))


def question_rows() -> Iterator[Row]:
    """Files of pairs that a server is to ask about."""
    files = {
        "empty": "", "no JSON": "{", "a list": "[1]", "a number": "7", "no id": json.dumps({**QUESTION, "id": None}),
        "an id of its own kind": json.dumps({**QUESTION, "id": 7}), "no prompt": json.dumps({**QUESTION, "prompt": None}),
        "one answer": json.dumps({"id": "q1", "prompt": "x", "response_a": "y"}), "two equal answers": json.dumps({**QUESTION, "response_b": "this"}),
        "the same id twice": "\n".join(json.dumps({**QUESTION, "response_a": text}) for text in ("x", "y")),
        "a label too": json.dumps({**QUESTION, "label": 1}), "deep": "[" * 100_000, "NUL": json.dumps({**QUESTION, "id": "a\0b"}),
        "a long line": json.dumps({**QUESTION, "prompt": "x" * 40_000_000}), "half a character": '{"id": "\\ud800", "prompt": "x", "response_a": "y", "response_b": "z"}',
    }  # fmt: skip
    command = ["label", "serve", "--store=s", "--epsilon=1", "--pairs=pairs.jsonl"]
    for name, text in files.items():
        yield Row(f"label serve: pairs, {name}", command, make=lambda text=text: Path("pairs.jsonl").write_text(text))
    yield Row("label serve: pairs, not UTF-8", command, make=lambda: Path("pairs.jsonl").write_bytes(b"\xff\xfe{}"))
    yield Row("label serve: pairs, a folder", command, make=lambda: Path("pairs.jsonl").mkdir())
    yield Row("label serve: pairs, a pipe", command, make=lambda: os.mkfifo("pairs.jsonl"))


def task_rows() -> Iterator[Row]:
    """Label Studio's tasks."""
    task = {"id": 1, "data": {"prompt": "x", "answer1": "y", "answer2": "z"}}
    files = {
        "empty": "", "no list": "{}", "an empty list": "[]", "numbers": "[1]", "an id that is null": json.dumps([task | {"id": None}]), "no data": '[{"id": 1}]',
        "annotated": json.dumps([{**task, "annotations": [{"result": []}]}]), "predicted": json.dumps([{**task, "predictions": [1]}]),
        "one answer": json.dumps([{"id": 1, "data": {"prompt": "x", "answer1": "y"}}]), "two equal answers": json.dumps([{"id": 1, "data": {"prompt": "x", "answer1": "y", "answer2": "y"}}]), "counted": json.dumps([{**task, "total_annotations": 1}]),
        "a number for text": json.dumps([{"id": 1, "data": {"prompt": 3, "answer1": "y", "answer2": "z"}}]),
        "the same id twice": json.dumps([task, task]), "deep": "[" * 100_000,
    }  # fmt: skip
    for name, text in files.items():
        yield Row(f"label tasks: {name}", ["label", "tasks", "tasks.json", "--output=q.jsonl"], make=lambda text=text: Path("tasks.json").write_text(text))
    good = json.dumps([task])
    for name, rest in {"two fields": ["--fields=prompt,answer1"], "another field": ["--fields=prompt,answer1,answer3"], "a field twice": ["--fields=prompt,prompt,answer1"], "no output": []}.items():
        output = [] if name == "no output" else ["--output=q.jsonl"]
        yield Row(f"label tasks: {name}", ["label", "tasks", "tasks.json", *output, *rest], make=lambda: Path("tasks.json").write_text(good))
    yield Row("label tasks: no file", ["label", "tasks", "nowhere.json", "--output=q.jsonl"])


def option_rows() -> Iterator[Row]:
    """`online`, `compare` and a command of the lab."""
    recipe = "--config=recipe.yaml"
    wrong = {
        "online: no recipe": ["online"], "online: no section": ["online", recipe], "online: policies": ["online", recipe, "--policies=0"], "online: many": ["online", recipe, "--policies=1000"],
        "compare: nothing": ["compare"], "compare: one": ["compare", "release"], "compare: none": ["compare", "nowhere", "nowhere"], "compare: no runs": ["compare", "release", "release"],
        "benchmark: moved": ["benchmark", "preferences", "--quick"],
    }  # fmt: skip
    for name, command in wrong.items():
        yield Row(name, command)


def person_rows() -> Iterator[Row]:
    """Budgets that nobody has."""
    given = {"budget": 2, "questions": 20}
    yield Row("account person: as it should be", option("account person", given, {}), code=0)
    for name in given:
        for value in ("nan", "inf", "0", "-1", "x", ""):
            yield Row(f"account person --{name} {value!r}", option("account person", given, {name: value}))
    yield Row("account person --target-delta 1", option("account person", given, {"target-delta": 1}), says="--target-delta must lie in (0, 1)")
