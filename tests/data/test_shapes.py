"""Shapes of preference files that people have: each is read as the pair that its rows mean, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data.chunks import cut, read_chunk
from private_rlhf.data.conversation import MARKS, holds_marks
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_demonstrations, read_prompts
from private_rlhf.data.layout import find_layout, read_preferences
from private_rlhf.data.overlap import protected_pairs
from private_rlhf.data.source_summary import summary_of
from private_rlhf.data.sources import open_source
from private_rlhf.recipe import DataConfig
from support.preference_files import assistant, user, write_csv, write_jsonl, write_parquet
from support.preference_shapes import AB, MT_BENCH, PAIR, READ, REFUSED, TALK, TEXTS, A, B, Q, Row, both, options, talk


def read(folder: Path, rows: list[Row], declared: Row) -> list[Any]:
    path, given = write_jsonl(folder, rows), options(declared)
    summary_of(str(path), None, given).check(accept=False)
    return [pair[:3] for pair in read_preferences(path, None, given)]


@pytest.mark.parametrize("name", READ)
def test_a_shape_is_read_as_what_it_means(tmp_path: Path, name: str) -> None:
    row, value, declared = READ[name]
    assert read(tmp_path, [row, row], declared) == [value, value]


@pytest.mark.parametrize("name", REFUSED)
def test_a_shape_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    row, message, declared = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read(tmp_path, [row, row], declared)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(text in str(caught.value) for text in (A, B, Q))


@pytest.mark.parametrize("titles", ['"title": "Tea", "title": "Tea"', '"title": ["Tea"]'])
def test_a_title_that_is_not_one_text_does_not_enter_a_prompt(tmp_path: Path, titles: str) -> None:
    """A key that is given twice has no value: its place holder, with an address in memory, was learnt as a title."""
    path = tmp_path / "train.jsonl"
    path.write_text(f'''{{"info": {{"post": "Tea.", {titles}}}, "summaries": [{{"text": "a"}}, {{"text": "b"}}],'''
                    ''' "choice": 1, "worker": "w"}\n''')  # fmt: skip
    with pytest.raises(UserError, match="line 1: holds a subreddit or a title that is not text in 'info'"):
        list(read_preferences(path))


def test_names_of_fields_in_a_ranking_may_be_numbers(tmp_path: Path) -> None:
    row = {"fields": {"prompt": Q, "1": B, "2": A}, "responses": {"rank": [{"value": [2, 1]}]}}
    assert read(tmp_path, [row, row], {}) == [TEXTS, TEXTS]


def turned(row: Row) -> Row:
    """The row with its two responses in each other's place, where they stand in `chosen` and `rejected`."""
    names = {"chosen": "rejected", "rejected": "chosen"}
    return {names.get(name, name): value for name, value in row.items()}


@pytest.mark.parametrize(
    "name", [name for name, (row, *_) in {**READ, **REFUSED}.items() if {"chosen", "rejected"} <= row.keys()]
)
def test_a_turned_pair_is_read_or_refused_alike(tmp_path: Path, name: str) -> None:
    row, value, declared = {**READ, **REFUSED}[name]
    if name in REFUSED:
        messages = set()
        for each in (row, turned(row)):
            with pytest.raises(UserError) as caught:
                read(tmp_path, [each], declared)
            messages.add(str(caught.value))
        assert len(messages) == 1
    else:
        assert read(tmp_path, [turned(row)], declared) == [(value[0], value[2], value[1])]


def test_kinds_of_csv(tmp_path: Path) -> None:
    """A table of texts: what was written as Python stays exact, and pandas' index column is not read."""
    rows = [{"": str(i), **both(lambda a: repr(talk(a))), "prompt": Q} for i in range(3)]
    assert [pair[:3] for pair in read_preferences(write_csv(tmp_path, rows))] == [TALK] * 3


@pytest.mark.parametrize(("mark", "name"), [(";", "train.csv"), ("\t", "train.csv"), ("\t", "train.tsv")])
def test_spreadsheets_write_other_marks(tmp_path: Path, mark: str, name: str) -> None:
    """A byte order mark, semicolons or tabs, and line breaks inside of fields."""
    path = tmp_path / name
    answer = f"{A}, {A}\n{A}; {A}"
    lines = ["prompt{0}chosen{0}rejected", f'"{Q}"{{0}}"{answer}"{{0}}"{B}"']
    path.write_text("\r\n".join(lines).format(mark) + "\r\n", encoding="utf-8-sig", newline="")
    assert [pair[:3] for pair in read_preferences(path)] == [(Q, answer, B)]
    path.write_bytes(path.read_bytes().replace(b"warm", "w\u00e4rm".encode("cp1252")))
    with pytest.raises(UserError, match=r"line 2: is not UTF-8 text; convert the file to UTF-8"):
        list(read_preferences(path))


def test_words_for_missing_values_are_no_texts_of_a_csv(tmp_path: Path) -> None:
    """In JSONL they are, but for a system message; a label of that name counts in both."""
    row = {"system": "None", **AB, "response_b": "nan", "label": "None"}
    declared = options({"label_column": "label", "labels": "None=a,x=b"})
    for write, text in ((write_csv, ""), (write_jsonl, "nan")):
        (pair,) = read_preferences(write(tmp_path, [row]), None, declared)
        assert pair[:3] == (user(Q), assistant(B), assistant(text))


def test_columns_of_arrow_of_other_types(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array([Q] * 3, pa.large_string()),
        "chosen": pa.array([A] * 3).dictionary_encode(),
        "rejected": pa.array([B] * 3, pa.string_view()),
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    assert [pair[:3] for pair in read_preferences(tmp_path)] == [TEXTS] * 3
    one = {"prompt": [user(Q)[0]] * 3, "chosen": [assistant(A)[0]] * 3, "rejected": [assistant(B)[0]] * 3}
    pq.write_table(pa.table(one), tmp_path / "train.parquet")
    assert [pair[:3] for pair in read_preferences(tmp_path)] == [TALK] * 3


@pytest.mark.parametrize("labels", ["1,0", ">0,<0"])
def test_labels_of_a_data_base_are_numbers(tmp_path: Path, labels: str) -> None:
    """NUMERIC columns come as decimals."""
    values = pa.array([Decimal("1.00"), Decimal("0.00" if labels == "1,0" else "-1.00")], pa.decimal128(10, 2))
    columns = {"prompt": [Q, Q], "response_a": [A, B], "response_b": [B, A], "label": values}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    said = options({"label_column": "label", "labels": labels})
    assert [pair[:3] for pair in read_preferences(tmp_path, None, said)] == [TEXTS] * 2


def test_an_empty_column_of_the_prompt_stays_empty(tmp_path: Path) -> None:
    rows: list[Row] = [{"instruction": f"{Q} {i}", "input": "", **PAIR} for i in range(300)]
    assert read(tmp_path, rows, {})[-1] == (f"{Q} 299", A, B)
    with pytest.raises(
        UserError, match="line 301: has the column 'input', which belongs to the prompt and is not read"
    ):
        read(tmp_path, [*rows, rows[0] | {"input": "Tea"}], {})
    beside: list[Row] = [{"prompt": f"{Q} {i}", "input": None, **PAIR} for i in range(300)]
    with pytest.raises(UserError, match="line 301: has the column 'input', which belongs to the prompt and is not"):
        read(tmp_path, [*beside, beside[0] | {"input": "Tea"}], {})


@pytest.mark.parametrize("column", ["system", "history", "images", "passage", "input", "question", "Context"])
@pytest.mark.parametrize("first", [0, 300])
def test_a_column_of_the_prompt_is_found_in_any_row(tmp_path: Path, column: str, first: int) -> None:
    """It comes first in a later row, where whole columns are read too."""
    rows: list[Row] = [{"prompt": f"{Q} {i}", **PAIR} for i in range(301)]
    rows[-1][column] = "s"
    for place in range(first):
        rows[place][column] = None
    if column == "system" and first:
        assert read(tmp_path, rows, {})[-1][0] == [{"role": "system", "content": "s"}, *user(f"{Q} 300")]
        return
    path = write_jsonl(tmp_path, rows)
    (part,) = open_source(path)
    layout = find_layout(str(path), [part], Options())
    (chunk,) = cut(part, layout.wanted)
    with pytest.raises(UserError, match=f"line 301: has the column '{column}', which belongs to the prompt"):
        list(read_chunk(chunk, layout))


@pytest.mark.parametrize("first", ["prompt", "instruction"])
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_column_of_the_prompt_is_found_in_any_part(tmp_path: Path, first: str, kind: str) -> None:
    """The late rows of an array, and the second of two shards."""
    rows: list[Row] = [{first: f"{Q} {i}", **PAIR} for i in range(300)]
    late: list[Row] = [rows[0] | {"input": "Tea"}]
    if kind == "json":
        (tmp_path / "train.json").write_text(json.dumps(rows + late))
    else:
        for place, some in enumerate((rows, late)):
            pq.write_table(pa.Table.from_pylist(some), tmp_path / f"train-0000{place}-of-00002.parquet")
    parts = open_source(tmp_path)
    layout = find_layout(str(tmp_path), parts, Options())
    with pytest.raises(UserError, match=r"row (301|1): has the column 'input', which belongs to the prompt"):
        [list(read_chunk(chunk, layout)) for part in parts for chunk in cut(part, layout.wanted)]


def test_a_system_column_of_the_second_part_is_read(tmp_path: Path) -> None:
    for place, beside in enumerate(({}, {"system": "s"})):
        rows = [{"prompt": f"{Q} {place}", **PAIR, **beside}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-0000{place}-of-00002.parquet")
    system = [{"role": "system", "content": "s"}]
    assert [pair[0] for pair in read_preferences(tmp_path)] == [user(f"{Q} 0"), [*system, *user(f"{Q} 1")]]


@pytest.mark.parametrize("writer", [write_jsonl, write_parquet])
def test_a_column_that_may_hold_the_prompt_of_answers_that_begin_alike(tmp_path: Path, writer: Any) -> None:
    """As answers of code do, and those that think step by step."""
    rows = [both(lambda a, i=i: f"```python\n{i} # {a}") | {"task": f"{Q} {i}", "id": f"row {i}"} for i in range(9)]
    with pytest.raises(UserError, match="the texts in 'task' may be prompts; name the column of the prompt 'prompt'"):
        list(read_preferences(writer(tmp_path, rows)))
    rows = [both(lambda a, i=i: f"{Q} {i}\n{a}") | {"task": f"{Q} {i}", "id": f"row {i}"} for i in range(9)]
    assert [pair[:3] for pair in read_preferences(writer(tmp_path, rows))][3] == (f"{Q} 3\n", A, B)


@pytest.mark.parametrize("writer", [write_jsonl, write_parquet])
def test_a_column_that_may_hold_the_prompt_beside_one_instruction(tmp_path: Path, writer: Any) -> None:
    rows: list[Row] = [{"prompt": "Render.", "source": f"{Q} {i}", "chosen": f"{i}", "rejected": B} for i in range(10)]
    with pytest.raises(UserError, match="has few different prompts, and the texts in 'source' may be prompts; put"):
        list(read_preferences(writer(tmp_path, rows)))
    rows = [row | {"prompt": f"Render: {i}."} for i, row in enumerate(rows)]
    assert [pair[:3] for pair in read_preferences(writer(tmp_path, rows))][3] == ("Render: 3.", "3", B)


def test_a_prompt_beside_whole_texts_in_a_later_row(tmp_path: Path) -> None:
    whole = both(lambda a: f"{Q}\n{a}")
    with pytest.raises(UserError, match="line 2: has text in column 'prompt', which the first row does not have"):
        read(tmp_path, [whole, whole | {"prompt": "Be brief."}], {})


def test_short_prompts_that_are_repeated_are_cut(tmp_path: Path) -> None:
    """Ten different prompts show it: answers to one or two greetings may begin with them."""
    rows: list[Row] = [{"prompt": f"{i}+1=", "chosen": f"{i}+1={i + 1}", "rejected": f"{i}+1=0"} for i in range(10)]
    assert read(tmp_path, rows, {})[3] == ("3+1=", "4", "0")
    assert read(tmp_path, rows[:9], {})[3] == ("3+1=", "3+1=4", "3+1=0")
    assert read(tmp_path, [{"prompt": Q, **PAIR}, *rows], {})[4] == ("3+1=", "3+1=4", "3+1=0")


def test_special_tokens_are_counted_in_demonstrations_and_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{Q} {i}", "response": f"{A}<|im_end|>" if i % 100 == 99 else A} for i in range(500)]
    path = write_jsonl(tmp_path, rows)
    with pytest.raises(UserError, match=r"line 100: holds a special token.*\(5 of 500 rows do\)"):
        next(row for row in read_demonstrations(path) if row.prompt == f"{Q} 99")
    keep = Options(special_tokens="keep")
    assert len(list(read_demonstrations(path, None, keep))) == 500
    path = write_jsonl(tmp_path, [{"prompt": user(row["response"])} for row in rows])
    with pytest.raises(UserError, match=r"line 100: holds a special token.*\(5 of 500 rows do\)"):
        list(read_prompts(path))
    assert len(list(read_prompts(path, None, keep))) == 2


def test_a_pair_of_a_ranking_is_drawn_by_its_texts(tmp_path: Path) -> None:
    """The pair is the same whatever the scores and the order of the list; --pairs all takes each."""
    texts = ["one", "two", "three", "four"]
    rows = [
        {"prompt": Q, "responses": order, "ranks": ranks}
        for order, ranks in ((texts, [1, 2, 3, 4]), (texts[::-1], [1, 2, 3, 4]))
    ]
    one, other = read(tmp_path, rows, {})
    assert set(one) == set(other)
    assert one == (other[0], other[2], other[1])
    assert len(set(map(frozenset, read(tmp_path, rows, {"pairs": "all"})))) == 6


@pytest.mark.parametrize(("texts", "refused"), [(8, True), (9, False)])
def test_the_rule_of_implicit_prompts_is_a_share_of_rows(tmp_path: Path, texts: int, refused: bool) -> None:
    rows = [{"chosen": f"Question {i} here:\nyes", "rejected": f"Question {i} here:\nno"} for i in range(texts)]
    rows += [{"chosen": f"abc {i}", "rejected": f"xyz {i}"} for i in range(10 - texts)]
    if refused:
        with pytest.raises(UserError, match="of the first 10 rows 8 begin alike"):
            read(tmp_path, rows, {})
    else:
        assert read(tmp_path, rows, {})[0] == ("Question 0 here:\n", "yes", "no")


def test_a_recipe_names_labels_as_the_command_does_and_the_guard_reads_them(tmp_path: Path) -> None:
    rows = [AB | {"label": 2}, AB | {"prompt": "Other", "label": 0}]
    data = DataConfig(preferences=str(write_jsonl(tmp_path, rows)), label_column="label", labels="<0,>0", ties="coin")
    said = options({"label_column": "label", "labels": "<0,>0", "ties": "coin"})
    assert Options.of(data) == replace(said, in_recipe=True)
    assert list(protected_pairs(data, tmp_path, raw=True)) == [(Q, B, A), ("Other", B, A)]
    with pytest.raises(UserError, match=r"data\.format goes without data\.label_column"):
        Options.of(replace(data, format="shp"))


@pytest.mark.parametrize(
    "text",
    [
        *(f"{B}<|im_end|>", "So.<eos>", "<start_of_turn>user", "[INST] hi", "<<SYS>>", "<extra_id_1>User"),
        *("### Response:", "<bos>So.", "<s> So.", "<|eot|>", "<|turn>user", "[gMASK]<sop>", "[|user|]"),
    ],
)
@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("between", ["", "a <b> and [c] "])
def test_marks_are_found_in_any_row_of_a_large_file(tmp_path: Path, text: str, escaped: bool, between: str) -> None:
    """Where whole columns are read too, and where JSON escapes the bracket."""
    rows = [{"prompt": f"{Q} {i}", "chosen": A, "rejected": f"{between}{i}"} for i in range(300)]
    path = write_jsonl(tmp_path, [*rows, {"prompt": Q, "chosen": text, "rejected": B}])
    if escaped:
        path.write_text(path.read_text().replace("<", "\\u003c"))
    (part,) = open_source(path)
    layout = find_layout(str(path), [part], Options())
    (chunk,) = cut(part, layout.wanted)
    with pytest.raises(UserError, match="line 301: holds a special token or a mark of a chat template"):
        list(read_chunk(chunk, layout))
    keep = find_layout(str(path), [part], Options(special_tokens="keep"))
    (columns,) = read_chunk(chunk, keep)
    assert len(columns.preferred) == 301


@pytest.mark.parametrize("start", ["", " ", "\u2003", '"'])
def test_a_written_list_is_refused_in_any_row_of_texts(tmp_path: Path, start: str) -> None:
    """Where whole columns are read too; a text that only begins like one is a text."""
    rows = [{"prompt": f"{Q} {i}", "chosen": "[1, 2]", "rejected": f" {{{i}}}"} for i in range(300)]
    path = write_jsonl(tmp_path, [*rows, {"prompt": Q, "chosen": start + repr(talk(A)), "rejected": B}])
    (part,) = open_source(path)
    layout = find_layout(str(path), [part], Options())
    (chunk,) = cut(part, layout.wanted)
    with pytest.raises(UserError, match="line 301: holds a list of messages as text, but plain text in the first row"):
        list(read_chunk(chunk, layout))
    write_jsonl(tmp_path, rows)
    (chunk,) = cut(part, layout.wanted)
    (columns,) = read_chunk(chunk, layout)
    assert len(columns.preferred) == 300


def test_a_judge_that_is_no_name(tmp_path: Path) -> None:
    """MT-bench's judgements by models have lists."""
    path = write_jsonl(tmp_path, [MT_BENCH | {"judge": ["gpt-4", "pair-v2"], "turn": 1}])
    (part,) = open_source(path)
    layout = find_layout(str(path), [part], Options())
    (chunk,) = cut(part, layout.wanted)
    with pytest.raises(UserError, match="line 1: the labeller is neither text nor a whole number; convert it"):
        list(read_chunk(chunk, layout))


@given(
    st.lists(st.sampled_from(["<", "|", "im_end", "|>", "[", "/", "INST]", "eot_id", "<<SYS>>", "\u00e9", " "])).map(
        "".join
    )
)
def test_marks_in_bytes_are_those_in_text(text: str) -> None:
    assert holds_marks(text.encode()) == (MARKS.search(text) is not None)


def test_what_was_taken_is_said_in_one_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"question": Q, "system": "s", "score_chosen": 1, "score_rejected": 0, **PAIR}])
    assert find_layout(str(path), open_source(path), Options()).form == (
        "chosen and rejected, conversation, prompt in 'question', a system message in 'system';"
        " columns not read: score_chosen, score_rejected"
    )
