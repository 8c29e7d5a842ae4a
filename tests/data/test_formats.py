"""What rows mean: every preference format against hand-made values, demonstrations, prompts, bad input by message."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data.conversation import common as _common
from private_rlhf.data.formats import implicit_text, read_demonstrations, read_prompts
from private_rlhf.data.layout import read_preferences
from private_rlhf.privacy.records import RawPair
from support.preference_files import (
    CASES,
    STYLES,
    WRITERS,
    Row,
    assistant,
    triples,
    user,
    write_csv,
    write_jsonl,
    write_parquet,
)

GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}


def one(folder: Path, row: Row) -> tuple[Any, Any, Any]:
    (pair,) = read_preferences(write_jsonl(folder, [row]))
    return pair[:3]


def expected(style: str, prompt: str, chosen: str, rejected: str) -> tuple[Any, Any, Any]:
    if style in ("explicit_messages", "implicit_messages", "mixed_messages"):
        if style != "explicit_messages" and chosen == rejected:
            return user(prompt) + assistant(chosen), [], []
        return user(prompt), assistant(chosen), assistant(rejected)
    if style == "dialogue":
        before = [*user("Hello"), *assistant("Hi, what is it?"), *user(prompt)]
        return before, assistant(chosen), assistant(rejected)
    return prompt, chosen, rejected


@pytest.mark.parametrize(("style", "writer"), CASES)
def test_every_format_in_every_file(tmp_path: Path, style: str, writer: str) -> None:
    rows = [STYLES[style](*triple) | {"score": 1.0} for triple in triples()]
    read = list(read_preferences(WRITERS[writer](tmp_path, rows)))
    assert len(read) == len(rows)
    for pair, triple in zip(read, triples(), strict=True):
        assert isinstance(pair, RawPair)
        if style == "implicit":  # the split falls where the texts part, one trailing space aside
            assert pair.prompt + pair.chosen == triple[0] + triple[1]  # type: ignore[operator]
            assert pair.prompt + pair.rejected == triple[0] + triple[2]  # type: ignore[operator]
        else:
            assert pair[:3] == expected(style, *triple)
    if writer != "shards":
        assert [pair.row for pair in read] == list(range(1, len(rows) + 1))


def test_implicit_text_splits_as_trl_does() -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    assert implicit_text(row) == ("The sky is", " blue.", " green.")
    assert implicit_text({"chosen": "Q: A", "rejected": "Q: "})[0] == "Q:"
    assert implicit_text({"chosen": "abc", "rejected": "xyz"}) == ("", "abc", "xyz")
    assert implicit_text({"chosen": "abc ", "rejected": "xyz "}) == ("", "abc ", "xyz ")


def test_dialogue_prompt_ends_with_the_last_shared_assistant_mark(tmp_path: Path) -> None:
    start = "\n\nHuman: a \n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    prompt = [*user("a "), *assistant("b"), *user("c")]
    row = {"chosen": start + " Yes, one.", "rejected": start + " Yes, two.\n\nHuman"}
    assert one(tmp_path, row) == (prompt, assistant("Yes, one."), assistant("Yes, two.\n\nHuman"))
    longer = {"chosen": start + " same\n\nHuman: d\n\nAssistant: e", "rejected": start + " same"}
    assert one(tmp_path, longer) == (
        prompt,
        [*assistant("same"), *user("d"), *assistant("e")],
        assistant("same"),
    )
    parted = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: x\n\nAssistant: b"}
    assert one(tmp_path, parted)[0] == []


def test_extra_keys_of_rows_are_dropped_and_those_of_messages_refused(tmp_path: Path) -> None:
    row = {"prompt": user("p"), "chosen": assistant("a"), "rejected": assistant("b")}
    with pytest.raises(UserError, match="line 1: column 'prompt' holds a message with 'score', which is not read"):
        one(tmp_path, row | {"prompt": [user("p")[0] | {"score": 3}]})
    assert one(tmp_path, row | {"score": 9, "labeler": "x"}) == (user("p"), assistant("a"), assistant("b"))


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_prefix_by_bisection(first: str, second: str) -> None:
    shared = _common(first, second)
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 1] != second[shared : shared + 1] or shared == len(first) == len(second)


def test_reading_streams(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + "not json\n")
    pairs = read_preferences(path)
    assert next(pairs) == ("p", "a", "b", 1)
    with pytest.raises(UserError, match=r"train\.jsonl, line 2: is not valid JSON; each line must be one JSON object$"):
        next(pairs)


BAD_PAIRS: list[tuple[list[Row], str]] = [
    ([GOOD, {"prompt": "p", "chosen": "a"}], "line 2: lacks one of 'chosen'/'rejected'; add it, or remove the row"),
    (
        [{"prompt": "p", "chosen": "a", "rejetced": "b"}],
        "line 1: lacks one of 'chosen'/'rejected'; the nearest is 'rejetced'",
    ),
    ([GOOD, GOOD | {"rejected": None}], "line 2: one of 'chosen'/'rejected' is null; fill it in, or remove the row"),
    ([GOOD, GOOD | {"chosen": 3}], "line 2: one of 'chosen'/'rejected' is neither text nor a list of messages"),
    ([GOOD, {"chosen": "a", "rejected": "b", "promt": "p"}], "line 2: has no column 'prompt'; the nearest is 'promt'"),
    ([GOOD, GOOD | {"prompt": None}], "line 2: column 'prompt' is null"),
    ([GOOD | {"prompt": None}], "line 1: column 'prompt' is null"),
    ([GOOD, GOOD | {"prompt": 5}], "line 2: column 'prompt' is not text"),
    ([GOOD, GOOD | {"prompt": 1234567890}], "line 2: column 'prompt' is not text"),
    ([GOOD, GOOD | {"prompt": user("p")}], "line 2: column 'prompt' is not text"),
    (
        [GOOD | {"chosen": assistant("a")}],
        "line 1: one of 'chosen'/'rejected' is text and the other a list of messages",
    ),
    ([{"chosen": [{"role": "user"}], "rejected": user("x")}], "holds a message without a 'role' and a 'content' text"),
    (
        [GOOD, {"chosen": user("a"), "rejected": user("b")}],
        "line 2: 'chosen' and 'rejected' are lists of messages, but text",
    ),
    ([GOOD | {"rejected": ["b"]}, {"prompt": "p", "chosen": "a"}], "line 2: one of 'chosen'/'rejected' is null"),
    ([GOOD | {"rejected": ["b"]}, {"prompt": "p", "rejected": "a"}], "line 2: one of 'chosen'/'rejected' is null"),
    (
        [{"chosen": user("q") + assistant("a"), "rejected": user("q") + assistant("b")}, GOOD],
        "line 2: 'chosen' and 'rejected' are text, but",
    ),
    ([], "holds no rows; give a data set with at least one"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_PAIRS)
def test_bad_preference_rows(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(UserError) as caught:
        list(read_preferences(write_jsonl(tmp_path, rows)))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "train.jsonl"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("writer", [write_parquet, write_csv])
def test_missing_columns_name_the_nearest_one(tmp_path: Path, writer: Any) -> None:
    source = writer(tmp_path, [{"prompt": "p", "chosen": "a", "rejecte": "b"}])
    with pytest.raises(
        UserError, match=r"has no column 'rejected'; the nearest is 'rejecte'; rename or add it \(found: "
    ):
        list(read_preferences(source))


def test_demonstrations(tmp_path: Path) -> None:
    chat = [*user("p"), *assistant("q"), *user("s"), *assistant("r")]
    cases: list[tuple[Row, tuple[Any, Any]]] = [
        ({"prompt": "p", "response": "r", "score": 1}, ("p", "r")),
        ({"prompt": "p", "completion": "r"}, ("p", "r")),
        ({"prompt": user("p"), "completion": assistant("r")}, (user("p"), assistant("r"))),
        ({"messages": chat}, (chat[:3], assistant("r"))),
    ]
    for row, value in cases:
        for writer in (write_jsonl, write_parquet):
            assert list(read_demonstrations(writer(tmp_path, [row, row]))) == [value, value]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD, "tuning on preferred answers would reveal the labels; give demonstrations with"),
        (
            {"prompt": "p", "respons": "r"},
            "needs 'prompt' and 'response' .* the nearest is 'respons'; rename or add them",
        ),
        ({"prompt": "p", "response": None}, "line 1: column 'response' is null"),
        ({"prompt": "p", "response": 4}, "column 'response' is not text, as 'prompt' is; write both as text, or both"),
        ({"prompt": "p", "response": assistant("r")}, "column 'response' is not text, as 'prompt' is"),
        ({"prompt": user("p"), "response": user("r")}, "'response' does not begin and end with an assistant message"),
        ({"prompt": assistant("p"), "response": assistant("r")}, "column 'prompt' does not end with a user message"),
        ({"prompt": "p", "response": "\n"}, "line 1: column 'response' is empty; fill it in, or remove the row"),
        ({"prompt": "p", "completion": "r", "label": False}, "a label each .KTO.; keep the accepted ones, and remove"),
        ({"prompt": "p", "input": "tea", "response": "r"}, "has the column 'input', which belongs to the prompt"),
        ({"prompt": "Human: p\n\nAssistant:", "response": "r"}, "begins or ends like a transcript"),
        ({"messages": user("p")}, "line 1: column 'messages' does not end with an assistant message after a prompt"),
    ],
)
def test_bad_demonstrations(tmp_path: Path, row: Row, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(read_demonstrations(write_jsonl(tmp_path, [row])))


@pytest.mark.parametrize("name", ["messages", "conversation"])
@pytest.mark.parametrize("before", [[*user("Hi"), *assistant("Hello")], assistant("Hello"), user("tea?")])
def test_an_earlier_conversation_beside_the_prompt(tmp_path: Path, name: str, before: Any) -> None:
    """It would be lost. A copy of the prompt and its answer would not, nor, for prompts, the turns after one."""
    row: Row = {"prompt": "p", "response": "r"}
    path = write_jsonl(tmp_path, [row, row | {name: before}])
    for read in (read_prompts, read_demonstrations):
        with pytest.raises(UserError, match=f"line 2: has the column '{name}', which belongs to the prompt"):
            list(read(path))
    talk = [*user("p"), *assistant("r")]
    assert list(read_demonstrations(write_jsonl(tmp_path, [row | {name: talk}]))) == [("p", "r")]
    assert list(read_prompts(write_jsonl(tmp_path, [row | {name: [*talk, *user("tea?")]}]))) == ["p"]


@pytest.mark.parametrize("name", ["contexts", "options", "previous_messages"])
def test_a_part_of_the_prompt_that_only_begins_in_it(tmp_path: Path, name: str) -> None:
    parts = [*user("p"), *assistant("r"), *user("tea?")] if name == "previous_messages" else ["p", "lost"]
    for read in (read_prompts, read_demonstrations):
        with pytest.raises(UserError, match=f"line 1: has the column '{name}', which belongs to the prompt"):
            list(read(write_jsonl(tmp_path, [{"prompt": "p", "response": "r", name: parts}])))


@pytest.mark.parametrize("labels", [(None, False), (1, 0), ("True", "False"), (1.0, math.nan), (" FALSE ", "")])
@pytest.mark.parametrize("writer", [write_jsonl, write_csv])
def test_demonstrations_with_a_label_each(tmp_path: Path, labels: tuple[Any, Any], writer: Any) -> None:
    """As tables and exports write booleans, and with none in the first row."""
    rows = [{"prompt": "p", "completion": "r", "label": label} for label in labels]
    with pytest.raises(UserError, match=r"holds responses with a label each .KTO.; keep the accepted ones"):
        list(read_demonstrations(writer(tmp_path, rows)))
    topics = [*rows, rows[0] | {"label": "tea"}]
    assert list(read_demonstrations(writer(tmp_path, topics))) == [("p", "r")] * 3


def test_prompts_from_columns_and_messages(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("b", "a", "b", " ", "c")]
    assert list(read_prompts(write_jsonl(tmp_path, rows))) == ["b", "a", "c"]
    chats = [{"messages": [*user("p"), *assistant("r")]}, {"messages": user("q")}, {"messages": user("p")}]
    assert list(read_prompts(write_jsonl(tmp_path, chats))) == [user("p"), user("q")]
    assert list(read_prompts(write_parquet(tmp_path, [{"prompt": user("p")}]))) == [user("p")]
    assert list(read_prompts(write_jsonl(tmp_path, [{"prompt": json.dumps(user("p"))}]))) == [user("p")]
    same = [{"prompt": "So: p", "question": "p"}]
    assert list(read_prompts(write_jsonl(tmp_path, same))) == ["So: p"]


def test_prompts_of_preferences_come_in_an_order_of_their_own(tmp_path: Path) -> None:
    """A file sorted by the chosen answer must not pass its order on."""
    rows = [{"prompt": f"p{i % 7}", "chosen": f"{i:02d}", "rejected": "x"} for i in range(20)]
    forward = list(read_prompts(write_jsonl(tmp_path, rows)))
    assert sorted(forward) == [f"p{i}" for i in range(7)]
    assert list(read_prompts(write_jsonl(tmp_path, rows[::-1]))) == forward


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"promt": "p"}], "line 1: has no column 'prompt' or 'messages'; the nearest is 'promt'; rename or add it"),
        ([{"prompt": "p"}, {"prompt": 3}], "line 2: column 'prompt' is not text"),
        ([{"prompt": assistant("p")}], "column 'prompt' does not end with a user message"),
        ([{"prompt": "p", "instruction": "tea"}], "has the column 'instruction', which belongs to the prompt"),
        ([{"prompt": "Human: p\n\nAssistant:"}], "begins or ends like a transcript"),
        ([{"prompt": "p", "chosen": "a"}], "line 1: lacks one of 'chosen'/'rejected'"),
        ([{"prompt": "  "}], "holds no prompt with text in it"),
    ],
)
def test_bad_prompts(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(read_prompts(write_jsonl(tmp_path, rows)))


def test_real_preferences() -> None:
    home = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    if not home:
        pytest.skip("PRIVATE_RLHF_TEST_DATA is not set, so the real HH-RLHF rows are not read")
    folder = Path(home) / "hh_helpful"
    train, evaluation = list(read_preferences(folder)), list(read_preferences(folder, split="eval"))
    assert (len(train), len(evaluation)) == (2100, 1000)
    first = json.loads((folder / "train.jsonl").read_text(encoding="utf-8").split("\n", 1)[0])
    assert train[0][:3] == (first["prompt"], first["chosen"], first["rejected"])
    assert sum(len(pair.chosen) > len(pair.rejected) for pair in evaluation) == 591
