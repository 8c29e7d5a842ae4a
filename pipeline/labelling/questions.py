"""Questions to a labeller, and their two files: questions out, answers in, one JSON object a line.

    questions: {"id": "17", "prompt": "…", "response_a": "…", "response_b": "…"}
    answers:   {"id": "17", "label": 1}     1: prefers response_a, -1: response_b, null: skipped, which is public

An answer has the form of `private-rlhf label-filter`. Each question is a labelling event, named by its id; whoever
asks chooses the ids. A pair under two ids is one pair (`Question.record`): nobody answers it twice. Which response is
response_a must carry no information: `make_question` decides it by the texts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from private_rlhf.core.atomic import write_text
from private_rlhf.core.documents import DocumentError, parse_json
from private_rlhf.core.errors import MOST_NAME, UserError, is_name
from private_rlhf.privacy.records import Text, encode_text, is_blank, record_id

MOST_LINE = 1 << 20
"""Bytes of a line of either file."""
MOST_FILE = 1 << 30
LABELS = (1, -1, None)
NONE: Mapping[str, float] = MappingProxyType({})
_FIELDS = ("id", "prompt", "response_a", "response_b")


@dataclass(frozen=True)
class Question:
    """One labelling event: which of two different responses to a prompt is better? Texts are all strings, or all lists
    of {"role", "content"} messages. id: at most 200 printable characters.

    Raises: ValueError, in words that follow the question's place.
    """

    id: str
    prompt: Text
    response_a: Text
    response_b: Text

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not is_name(self.id):
            raise ValueError(f"has an id that is not one line of at most {MOST_NAME} printable characters")
        texts = (self.prompt, self.response_a, self.response_b)
        kinds = {_kind(text) for text in texts}
        if len(kinds) > 1:
            raise ValueError("has prompt and responses that are not all text, or all lists of messages")
        if any(map(is_blank, texts)):
            raise ValueError("has an empty prompt or response")
        if self.response_a == self.response_b:
            raise ValueError("has two responses that are the same")

    @cached_property
    def record(self) -> str:
        """The id of its unordered pair, whatever its own id is."""
        return record_id(self.prompt, (self.response_a, self.response_b))

    def as_json(self) -> dict[str, Any]:
        """The object of its line."""
        return {name: getattr(self, name) for name in _FIELDS}


def make_question(id: str, prompt: Text, one: Text, other: Text) -> Question:
    """The question about an unordered pair: response_a is the one whose SHA-256 is smaller. Raises: as `Question`."""
    question = Question(id, prompt, one, other)
    first, second = sorted((one, other), key=lambda text: sha256(encode_text(text)).digest())
    return replace(question, response_a=first, response_b=second)


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, in its order. UserError: the first line that is none, or an id that comes twice."""
    questions: dict[str, Question] = {}
    for number, row in read_rows(path):
        if set(row) != set(_FIELDS):
            raise UserError(f"{path}, line {number}: must have the fields {', '.join(_FIELDS)} and no others; fix it")
        try:
            question = Question(**row)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; fix or remove it") from None
        if question.id in questions:
            raise UserError(f"{path}, line {number}: its id was there before; each question is an event of its own")
        questions[question.id] = question
    return list(questions.values())


def read_answers(path: Path, asked: Collection[str], whole: bool = False) -> dict[str, int | None]:
    """Labels by question id; empty where the file does not exist. whole: of `read_rows`. UserError: a line that is no
    answer, an id that was not asked or comes twice with different labels. The message repeats no label."""
    answers: dict[str, int | None] = {}
    for number, row in read_rows(path, whole) if path.exists() else ():
        add_answer(answers, row, asked, f"{path}, line {number}")
    return answers


def add_answer(answers: dict[str, int | None], row: Mapping[str, Any], asked: Collection[str], where: str) -> None:
    """Enters one answer. UserError as `read_answers`."""
    id, label = row.get("id"), row.get("label")
    if set(row) != {"id", "label"} or not isinstance(id, str):
        raise UserError(f'{where}: must be an answer of the form {{"id": "…", "label": 1}}; fix it')
    if isinstance(label, bool) or not isinstance(label, int | None) or label not in LABELS:
        raise UserError(f"{where}: its label must be 1, -1 or null; fix it")
    if id not in asked:
        raise UserError(f"{where}: answers a question that was not asked; remove it")
    if answers.setdefault(id, label) != label:
        raise UserError(f"{where}: answers its question a second time, and differently; keep the first answer")


def write_questions(path: Path, questions: Iterable[Question], mode: int = 0o644) -> None:
    """Writes the file whole."""
    write_text(path, "".join(line(question.as_json()) for question in questions), mode)


def write_answers(path: Path, answers: Mapping[str, int | None], epsilons: Mapping[str, float] = NONE) -> None:
    """Writes the file whole, for its owner. epsilons: as `answer_lines`."""
    write_text(path, "".join(answer_lines(answers, epsilons)), 0o600)


def answer_lines(answers: Mapping[str, int | None], epsilons: Mapping[str, float]) -> Iterator[str]:
    """A line of each answer, with its `epsilon` where each has one of its own (`Labeller.epsilons`)."""
    for id, label in answers.items():
        yield line({"id": id, "label": label} | ({"epsilon": epsilons[id]} if epsilons else {}))


def line(row: Mapping[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def read_rows(path: Path, whole: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line. whole: a last line without its end is still being written, and is left out.

    UserError for a line that is not a JSON object in UTF-8, or is too long, and for a pipe or device.
    """
    if path.is_fifo() or path.is_char_device():
        raise UserError(f"{path}: is a pipe or device, which may never end; give a file of JSON lines")
    try:
        with path.open("rb") as file:
            total = 0
            for number, data in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                total += len(data)
                if len(data) > MOST_LINE or total > MOST_FILE:
                    raise UserError(f"{path}, line {number}: is over {MOST_LINE >> 20} MiB; split or remove it")
                if whole and not data.endswith(b"\n"):
                    return
                if data.strip():
                    yield number, parse_row(data, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines") from None


def parse_row(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. UserError, which names no value of it."""
    try:
        row = parse_json(data.decode())
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text; fix it") from None
    except DocumentError as error:
        raise UserError(f"{where}: {error}; fix it") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be a JSON object; fix it")
    return row


def unasked(questions: Sequence[Question], known: Mapping[str, Question]) -> list[Question]:
    """Those with new ids. UserError for a known id with other texts: it is another event and needs another id."""
    new: dict[str, Question] = {}
    for question in questions:
        before = known.get(question.id) or new.get(question.id)
        if before is None:
            new[question.id] = question
        elif before != question:
            raise UserError(f"question {question.id!r} was asked with other texts: a new question needs a new id")
    return list(new.values())


def answers_of_pairs(
    questions: Iterable[Question], asked: Iterable[Question], answers: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Answers by id to those of `questions` whose pair was answered under another id in `asked`: the same draw again,
    for a second one would cost another ε."""
    drawn: dict[str, Question] = {}
    for question in asked:
        if question.id in answers:
            drawn.setdefault(question.record, question)
    repeats: dict[str, int | None] = {}
    for question in questions:
        if (first := drawn.get(question.record)) is not None:
            label = answers[first.id]
            repeats[question.id] = label if label is None or first.response_a == question.response_a else -label
    return repeats


def _kind(text: object) -> type:
    """str for text, list for messages. ValueError for anything that is neither, or that UTF-8 cannot hold."""
    parts = [text]
    if isinstance(text, list) and all(isinstance(turn, dict) and set(turn) == {"role", "content"} for turn in text):
        parts = [part for turn in text for part in turn.values()]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("has a prompt or response that is neither text nor a list of role and content")
    try:
        "".join(map(str, parts)).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character") from None
    return type(text)
