"""Questions from Label Studio's tasks, and what a store or a file drop holds as a bundle or as lines of z."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from private_rlhf.core.atomic import new_folder
from private_rlhf.core.documents import DocumentError, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.answer_bundle import write_answers as write_bundle
from private_rlhf.data.release import ReleaseManifest
from private_rlhf.labelling.labellers import FileDrop, Labeller, busiest
from private_rlhf.labelling.questions import MOST_FILE, Question, make_question, read_questions
from private_rlhf.labelling.store import FILE, AnswerStore
from private_rlhf.privacy.labelers import total_epsilon

LABELS = ("annotations", "completions", "predictions", "drafts", "total_annotations", "total_predictions", "result",
          "annotation_id")  # fmt: skip
"""Keys of a task under which Label Studio keeps what somebody, or a model, has answered."""


def read_tasks(path: Path, fields: Sequence[str]) -> tuple[list[Question], list[str]]:
    """(questions, names of what is left out) of a JSON list of tasks {"id", "data": {…}}, or of {…} as Label Studio
    imports it; fields: prompt and the two responses in `data`. Nothing but these and the id is read: any other field
    may carry an answer. Without an id it is that of the pair.

    UserError for a file that is not a list of tasks, and for one that holds annotations.
    """
    try:
        tasks = read_json(path, MOST_FILE)
    except (OSError, DocumentError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}; give a JSON list of tasks") from None
    if not isinstance(tasks, list) or not tasks:
        raise UserError(f"{path}: must be a JSON list of Label Studio tasks; export the tasks as JSON")
    questions: dict[str, Question] = {}
    others: set[str] = set()
    for number, task in enumerate(tasks, 1):
        question = _question(task, fields, f"{path}, task {number}")
        if question.id in questions:
            raise UserError(f"{path}, task {number}: its id was there before; each question is an event of its own")
        questions[question.id] = question
        data = task.get("data", {})
        others |= set(task) - {"id", "data", *(() if data else fields)} | {f"data.{key}" for key in {*data} - {*fields}}
    return list(questions.values()), sorted(others)


def _question(task: Any, fields: Sequence[str], where: str) -> Question:
    data = task.get("data", task) if isinstance(task, dict) else None
    if not isinstance(data, dict) or not isinstance(task.get("id", ""), int | str):
        raise UserError(f'{where}: is not of the form {{"id": 1, "data": {{…}}}}; export the tasks as JSON')
    if any(task.get(name) for name in LABELS):
        raise UserError(f"{where}: holds annotations, which are true labels for `private-rlhf privatize`: remove them")
    if missing := [name for name in fields if name not in data]:
        raise UserError(f"{where}: its data have no field {missing[0]}; name prompt and responses with --fields")
    try:
        question = make_question(str(task.get("id", "none")), *(data[name] for name in fields))
        return question if "id" in task else replace(question, id=question.record[:16])
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: {error}; fix or remove it") from None


@contextmanager
def open_answers(folder: Path) -> Iterator[tuple[list[Question], Labeller]]:
    """(questions, who answers them) of a page's store, closed after the block, or of a file drop. UserError: none."""
    if (folder / FILE).exists() or not (folder / "labeller.json").is_file():
        with closing(AnswerStore.open(folder)) as store:  # an open one leaves its write-ahead log behind
            yield store.questions(), store
        return
    try:
        epsilon = read_json(folder / "labeller.json")["epsilon"]
    except (OSError, DocumentError, KeyError, TypeError):
        raise UserError(f"{folder / 'labeller.json'}: must state the ε of the answers: restore it") from None
    yield read_questions(folder / "questions.jsonl"), FileDrop(folder, epsilon)


def export_bundle(folder: Path, output: Path) -> ReleaseManifest:
    """Writes the answers of `folder`, less the skips, as a bundle that every stage takes; returns its manifest.
    UserError where `output` is there already, or nothing was answered."""
    with open_answers(folder) as (questions, labeller):
        answers, epsilons = labeller.answers(), labeller.epsilons()
        answered = [(each, z) for each in questions if (z := answers.get(each.id)) is not None]
        total = total_epsilon(busiest(labeller)) or None
    if output.exists():
        raise UserError(f"{output}: is there already; choose another --out")
    rows = [(each.prompt, each.response_a, each.response_b, z) for each, z in answered]
    levels = [epsilons[each.id] for each, _ in answered] if epsilons else None
    if len({isinstance(prompt, str) for prompt, *_ in rows}) > 1:
        raise UserError(f"{folder}: must hold questions of one kind, plain text or messages: use two stores")
    with new_folder(output) as partial:
        partial.rmdir()  # it is made there
        source = f"labelling {folder.name}"
        return write_bundle(partial, rows, labeller.mechanism, source, labeller.randomised_by, total, levels)
