"""Named shapes of public preference data and of annotation tools, as a table: which columns, and what a row says.

A row becomes judgements: responses to one prompt with scores, of which only the order counts. From a judgement of more
than two responses pairs are taken by a rule that reads no score: one pair, which the texts themselves draw (the two
lowest SHA-256 of prompt and response), or all pairs, whose labels are all of one person and add up. A rule such as
best against worst would tell by the texts that it releases which response was best. So would ties that are left out:
where one of four was chosen, the pairs of the others are ties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from typing import Any, NamedTuple

from private_rlhf.core.errors import UserError
from private_rlhf.data.conversation import RowError, of_both, read_messages
from private_rlhf.data.declared_columns import (
    BESIDE_PROMPT,
    CONVERSATIONS,
    PAIR,
    PROMPTS,
    TIE,
    Options,
    column_value,
    letter,
    number,
    sign,
    strength,
)
from private_rlhf.data.formats import check_lossy
from private_rlhf.data.sources import Row

SEVERAL = (
    "holds more than two responses, and which of their pairs are ties would tell what was chosen; say --ties coin"
    " (data.ties: coin): a fair coin under the key in place of each tie, then the mechanism"
)


class Judgement(NamedTuple):
    """prompt: None where the responses are whole conversations. scores: of each response, the higher the better.
    one_of: they tell one response from all others."""

    prompt: Any
    responses: Sequence[Any]
    scores: Sequence[float]
    labeler: Any = None
    one_of: bool = False


@dataclass(frozen=True)
class Shape:
    """needs: the columns that show it. read: the judgements of a row. more: columns that are read where they are there.
    labelers: its judgements say who judged. auto: taken without --format."""

    needs: tuple[str, ...]
    read: Callable[[Row], Iterable[Judgement]]
    more: tuple[str, ...] = ()
    labelers: bool = False
    auto: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are read."""
        return (*self.needs, *self.more)


def pairs(judgement: Judgement, options: Options) -> Iterator[tuple[Any, Any, int]]:
    """(one response, another, +1 where the one is preferred, -1 where the other is, 0 for a tie) by `options.pairs`."""
    prompt, responses, scores, _, one_of = judgement
    if len(responses) < 2 or len(scores) != len(responses) or any(score != score for score in scores):
        raise RowError("does not hold two responses with a judgement of each; repair or remove the row")
    places: Sequence[int] = range(len(responses))
    if len(responses) > 2:  # whatever the scores are: neither a refusal nor the order of pairs may tell them
        if options.ties == "drop" or (one_of and options.ties is None):
            raise RowError(SEVERAL)
        texts = [json.dumps([prompt, each], sort_keys=True, default=repr).encode() for each in responses]
        places = sorted(places, key=lambda place: sha256(texts[place]).digest())
        places = places[:2] if options.pairs == "one" else places
    for one, other in combinations(places, 2):
        preferred = sign(scores[one] - scores[other])
        if not preferred and options.ties is None:
            raise RowError(TIE)
        yield responses[one], responses[other], preferred


# --- parts of readers -------------------------------------------------------------------------------------------------


def _get(row: Row, name: str) -> Any:
    return column_value(row, name, ())


def _two(prompt: str, one: str, other: str, score: Callable[[Row], Sequence[float]], labeler: str = "") -> Any:
    """A reader of two responses in columns."""

    def read(row: Row) -> list[Judgement]:
        responses = (_get(row, one), _get(row, other))
        return [Judgement(_get(row, prompt), responses, score(row), row.get(labeler))]

    return read


def _strength(name: str) -> Callable[[Row], Sequence[float]]:
    """A signed strength, -3 to 3: below 0 the first response is better."""

    def score(row: Row) -> Sequence[float]:
        if abs(value := strength(_get(row, name))) > 3:
            raise RowError(f"has a value in {name!r} that is not from -3 to 3, of which 0 is a tie; repair the row")
        return -value, 0.0

    return score


def _columns(one: str, other: str) -> Callable[[Row], Sequence[float]]:
    """One number for each response."""
    return lambda row: (number(_get(row, one)), number(_get(row, other)))


def _named(name: str, first: str, second: str, *ties: str) -> Callable[[Row], Sequence[float]]:
    """A name for the preferred response."""
    signs = {first: 1.0, second: -1.0, **dict.fromkeys(ties, 0.0)}

    def score(row: Row) -> Sequence[float]:
        value = letter(_get(row, name))
        if value not in signs:
            raise RowError(f"has a value in {name!r} that is none of {', '.join(signs)}; write one, or remove the row")
        return signs[value], 0.0

    return score


def _chosen(value: Any, count: int) -> list[float]:
    """Scores where the index of one response says that it is preferred to each other one."""
    if (place := strength(value)) not in range(count):
        raise RowError("has a choice that is not the index of one of its responses; repair or remove the row")
    return [float(index == place) for index in range(count)]


def _up_to_turn(row: Row, name: str) -> Any:
    """A conversation up to the answer that was judged: number `turn`, where the row says it."""
    messages, turn = _get(row, name), row.get("turn")
    if turn is None:
        return messages
    messages = read_messages(messages, f"column {name!r}")
    answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    if number(turn) not in range(1, len(answers) + 1):
        raise RowError("judges a turn that a conversation does not have; repair or remove the row")
    return messages[: answers[int(number(turn)) - 1] + 1]


def _list(value: Any, where: str) -> list[Any]:
    """A list, also one that was written as JSON."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise RowError(f"column {where!r} is not a list; repair or remove the row")
    return value


def _fields(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"column {where!r} is not an object; repair or remove the row")
    return value


# --- readers ----------------------------------------------------------------------------------------------------------


def _kaggle(row: Row) -> list[Judgement]:
    """Lists of user turns and of each model's answers to them."""
    asked, *answered = (_list(_get(row, name), name) for name in ("prompt", "response_a", "response_b"))
    if not asked or any(len(answers) != len(asked) for answers in answered):
        raise RowError("does not hold one response of each model to every prompt; repair or remove the row")
    sides = [
        [
            {"role": role, "content": text or ""}
            for turn in zip(asked, answers, strict=True)
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        for answers in answered
    ]
    return [Judgement(None, sides, _columns("winner_model_a", "winner_model_b")(row))]


def _summarize(row: Row) -> list[Judgement]:
    info, summaries = _fields(_get(row, "info"), "info"), _list(_get(row, "summaries"), "summaries")
    post = info.get("post") or info.get("article")
    if not isinstance(post, str):
        raise RowError("holds neither a post nor an article in 'info'; repair or remove the row")
    heads = {name: info[name] for name in ("subreddit", "title") if info.get(name)}
    if not all(isinstance(head, str) for head in heads.values()):  # as one that is given twice
        raise RowError("holds a subreddit or a title that is not text in 'info'; repair or remove the row")
    start = "".join(f"{name.upper()}: {head}\n\n" for name, head in heads.items())
    texts = [_fields(each, "summaries").get("text") for each in summaries]
    prompt = f"{start}POST: {post}\n\nTL;DR:"
    return [Judgement(prompt, texts, _chosen(_get(row, "choice"), len(texts)), row.get("worker"), one_of=True)]


def _openai(row: Row) -> list[Judgement]:
    given = _fields(_get(row, "input"), "input")
    messages = _get(given, "messages")
    if given.get("tools") and isinstance(messages, list) and messages and isinstance(messages[0], dict):
        messages = [messages[0] | {"tools": given["tools"]}, *messages[1:]]
    responses = [row.get(name) for name in ("preferred_output", "non_preferred_output")]
    return [Judgement(messages, responses, (1, 0))]


def _ranked(prompt: str, answers: str, text: str, rank: str, order: int) -> Callable[[Row], list[Judgement]]:
    """A list of objects with a text and a score (order 1) or a rank from 1, the best (order -1)."""

    def read(row: Row) -> list[Judgement]:
        each = [_fields(answer, answers) for answer in _list(_get(row, answers), answers)]
        scores = [order * number(answer.get(rank)) for answer in each]
        return [Judgement(_get(row, prompt), [answer.get(text) for answer in each], scores)]

    return read


def _webgpt(row: Row) -> list[Judgement]:
    asked = _get(row, "question")
    prompt = asked.get("full_text") if isinstance(asked, dict) else asked
    responses = (_get(row, "answer_0"), _get(row, "answer_1"))
    return [Judgement(prompt, responses, _columns("score_0", "score_1")(row))]


def _responses(row: Row) -> list[Judgement]:
    """A list of responses beside scores, ranks (1 is best) or the index of the chosen one."""
    responses = _list(_get(row, "responses"), "responses")
    kinds = [name for name in ("scores", "ranks", "choice") if row.get(name) is not None]
    if len(kinds) != 1:
        raise RowError("needs one of 'scores', 'ranks' and 'choice' beside 'responses'; add or remove columns")
    if kinds == ["choice"]:
        return [Judgement(_get(row, "prompt"), responses, _chosen(row["choice"], len(responses)), one_of=True)]
    order = -1 if kinds == ["ranks"] else 1
    scores = [order * number(each) for each in _list(row[kinds[0]], kinds[0])]
    return [Judgement(_get(row, "prompt"), responses, scores)]


def _one_against_several(row: Row) -> list[Judgement]:
    """`chosen` or `rejected` is a list of texts: one of all responses was chosen (or rejected)."""
    one, other = (value if isinstance(value, list) else [value] for value in (row.get("chosen"), row.get("rejected")))
    if min(len(one), len(other)) > 1:
        raise RowError("holds several texts on both sides, which may be turns of a dialogue; write messages with roles")
    if len(one) + len(other) > 2 and any(text in other for text in one):
        raise RowError("holds one text among the chosen and the rejected; repair or remove the row")
    scores = [1.0] * len(one) + [0.0] * len(other)
    return [Judgement(_get(row, "prompt"), [*one, *other], scores, one_of=True)]


def _task(fields: Mapping[str, Any], names: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """(prompt, names of the responses) of an annotation task: `names`, response_1 and the like, or all other fields."""
    prompts = [name for name in (*PROMPTS, "context", "text") if name in fields]
    others = [name for name in fields if name not in prompts]
    alike = [name for name in others if name.startswith(("response", "answer"))]
    answers = [name for name in names if name in fields] or (alike if len(alike) > 1 else others)
    if len(prompts) != 1 or len(answers) < 2:
        raise RowError("does not hold one prompt and two responses among its fields; name them prompt, response_1 ...")
    check_lossy([fields], (prompts[0], *answers), BESIDE_PROMPT + CONVERSATIONS)
    return fields[prompts[0]], answers


def _of_two(names: Sequence[str], preferred: str) -> list[float]:
    if len(names) != 2:
        raise RowError("has more than two fields that may be responses; name the two response_1 and response_2")
    return [float(name == preferred) for name in names]


def _of_one_question(judged: Sequence[tuple[Any, Judgement]]) -> list[Judgement]:
    """The judgements of (question, judgement) pairs. RowError for several questions."""
    if len({str(question) for question, _ in judged}) > 1:
        raise RowError("holds judgements of two questions, of which one can be the label; export one of them")
    return [judgement for _, judgement in judged]


def _argilla(row: Row) -> list[Judgement]:
    fields, judged = _fields(_get(row, "fields"), "fields"), []
    prompt, names = _task(fields)
    for question, answers in _fields(_get(row, "responses"), "responses").items():
        for answer in _list(answers, "responses"):
            if not isinstance(answer, dict) or answer.get("status", "submitted") != "submitted":
                continue
            value = answer.get("value")
            if isinstance(value, str) and value in (*names, *_TIED):
                scores = _of_two(names, value)
            elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
                ranks = {str(each.get("value")): number(each.get("rank")) for each in value}
                scores = [-ranks.get(name, float("nan")) for name in names]
            elif isinstance(value, list) and sorted(map(str, value)) == sorted(names):
                scores = [-float(list(map(str, value)).index(name)) for name in names]
            else:
                continue  # another question of the same task: a rating, a text
            responses = [fields[name] for name in names]
            judged.append((question, Judgement(prompt, responses, scores, answer.get("user_id"))))
    return _of_one_question(judged)


def _label_studio(row: Row) -> list[Judgement]:
    data, judged = _fields(_get(row, "data"), "data"), []
    for annotation in _list(_get(row, "annotations"), "annotations"):
        by = _fields(annotation, "annotations").get("completed_by")
        labeler = by.get("email", by.get("id")) if isinstance(by, dict) else by
        for result in () if annotation.get("was_cancelled") else _list(annotation.get("result"), "annotations"):
            if (kind := _fields(result, "result").get("type")) not in ("pairwise", "choices"):
                continue
            value = _fields(result.get("value"), "value")
            tags = str(result.get("to_name")).split(",") if kind == "pairwise" else ()
            prompt, names = _task(data, tags)
            if kind == "pairwise":
                if names != sorted(names) and names != list(tags):
                    raise RowError("does not tell which field stood left; name the fields as the tags that show them")
                preferred = names[_named("selected", "left", "right")(value)[0] < 0]
            elif (preferred := ",".join(map(str, _list(_get(value, "choices"), "choices")))) not in (*names, *_TIED):
                continue  # a question about something else
            judgement = Judgement(prompt, [data[name] for name in names], _of_two(names, preferred), labeler)
            judged.append((result.get("from_name"), judgement))
    return _of_one_question(judged)


def _sharegpt(row: Row) -> list[Judgement]:
    """A talk and two answers to it, or two talks that begin as it does."""
    talk, sides = _get(row, "conversations"), [row.get(name) for name in PAIR]
    start = read_messages(talk, "column 'conversations'")[:1] if isinstance(talk, list) else []
    listed = [side for side in sides if isinstance(side, list)]
    talks = of_both(lambda side: read_messages(side, "one of 'chosen'/'rejected'"), listed)
    whole = len(talks) == 2 and all(start and side[:1] == start for side in talks)
    return [Judgement(None if whole else talk, sides, (1, 0))]


def _unpaired(row: Row) -> list[Judgement]:
    raise RowError(
        "holds one response with a label of its own (KTO), which is not read: a preference needs two responses to one"
        " prompt; pair the rows of each prompt, or give the accepted ones as data.demonstrations if they are public"
    )


def _pku(row: Row) -> list[Judgement]:
    raise RowError("holds two labels; choose by name: --format pku-better or --format pku-safer (data.format)")


_PKU = ("prompt", "response_0", "response_1")
_TIED = ("tie", "Tie")


def _pku_by(name: str) -> Shape:
    return Shape((*_PKU, name), _two(*_PKU, lambda row: _chosen(_get(row, name), 2)), auto=False)


SHAPES: dict[str, Shape] = {
    "helpsteer2": Shape(
        ("prompt", "response_1", "response_2", "preference_strength"),
        _two("prompt", "response_1", "response_2", _strength("preference_strength")),
    ),
    "helpsteer3": Shape(
        ("context", "response1", "response2", "overall_preference"),
        _two("context", "response1", "response2", _strength("overall_preference")),
    ),
    "arena": Shape(
        ("conversation_a", "conversation_b", "winner"),
        lambda row: [
            Judgement(
                None,
                [_up_to_turn(row, name) for name in ("conversation_a", "conversation_b")],
                _named("winner", "model_a", "model_b", "tie", "tie (bothbad)", "both_bad")(row),
                row.get("judge"),
            )
        ],
        more=("judge", "turn"),
        labelers=True,
    ),
    "arena-kaggle": Shape(
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"), _kaggle
    ),
    "shp": Shape(
        ("history", "human_ref_A", "human_ref_B", "labels"),
        _two("history", "human_ref_A", "human_ref_B", _named("labels", "1", "0")),
    ),
    "pku-better": _pku_by("better_response_id"),
    "pku-safer": _pku_by("safer_response_id"),
    "pku": Shape((*_PKU, "better_response_id", "safer_response_id"), _pku),
    "webgpt": Shape(("question", "answer_0", "answer_1", "score_0", "score_1"), _webgpt),
    "openai-summarize": Shape(("info", "summaries", "choice"), _summarize, more=("worker",), labelers=True),
    "openai-preference": Shape(("input", "preferred_output", "non_preferred_output"), _openai),
    "nectar": Shape(("prompt", "answers"), _ranked("prompt", "answers", "answer", "rank", -1)),
    "ultrafeedback": Shape(
        ("instruction", "completions"), _ranked("instruction", "completions", "response", "overall_score", 1)
    ),
    "responses": Shape(("prompt", "responses"), _responses, more=("scores", "ranks", "choice")),
    "argilla": Shape(("fields", "responses"), _argilla, labelers=True),
    "label-studio": Shape(("data", "annotations"), _label_studio, labelers=True),
    "label-studio-min": Shape(
        ("prompt", "answer1", "answer2", "pw"),
        _two("prompt", "answer1", "answer2", _named("pw", "left", "right"), "annotator"),
        more=("annotator",),
        labelers=True,
    ),
    "sharegpt": Shape(("conversations", "chosen", "rejected"), _sharegpt),
    "several": Shape(("prompt", "chosen", "rejected"), _one_against_several, auto=False),
    "kto": Shape(("prompt", "completion", "label"), _unpaired),
}
"""By the name that --format and data.format take."""


def shape_of(columns: Iterable[str], options: Options) -> str | None:
    """The name of the shape that the options or the columns name; None for `chosen` and `rejected`, or a label column.

    UserError: a format that does not exist.
    """
    if options.format is not None:
        if options.format not in SHAPES:
            raise UserError(f"--format must be one of {', '.join(SHAPES)}, got {options.format!r}")
        return options.format
    if options.label_column is not None:
        return None
    present = set(columns)
    pair = {*PAIR} if present >= {*PAIR} else set()  # says more than a list of all responses beside it
    fitting = [name for name, shape in SHAPES.items() if shape.auto and pair <= {*shape.needs} <= present]
    return max(fitting, key=lambda name: len(SHAPES[name].needs), default=None)
