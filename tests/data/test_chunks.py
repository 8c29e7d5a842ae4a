"""Chunks and Arrow's readers against reading row by row: the same rows, the same refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data.chunks import Chunk, cut, read_chunk
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import explicit_text
from private_rlhf.data.layout import Layout, find_layout, read_preferences
from private_rlhf.data.sources import open_source

LAYOUT = Layout(Options(), explicit_text)
ODD = ["", " ", "é", "\u2028", "\U0001f600", "\0", '"', "\\", "}\n{", "]", "x" * 99]
text = st.text(max_size=8) | st.sampled_from(ODD)
value = text | st.none() | st.integers() | st.floats() | st.lists(st.integers(), max_size=2) | st.booleans()
row = st.fixed_dictionaries({"prompt": text, "chosen": text, "rejected": text}, optional={"score": value, "é": value})
odd_row = st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "score"]), value, max_size=4)


def slow(path: Path) -> list[tuple[str, str, str]] | str:
    try:
        return [(str(pair.prompt), str(pair.chosen), str(pair.rejected)) for pair in read_preferences(path)]
    except UserError as error:
        return str(error)


def fast(path: Path, chunk_bytes: int) -> tuple[list[tuple[str, str, str]] | str, bool]:
    """What the chunks hold, and whether Arrow read all of them."""
    rows: list[tuple[str, str, str]] = []
    fallen = []

    class Watched(Layout):
        def row_columns(self, *arguments: object) -> object:  # type: ignore[override]
            fallen.append(1)
            return super().row_columns(*arguments)  # type: ignore[arg-type]

    try:
        (part,) = open_source(path)
        layout = find_layout(str(path), [part], Options())
        for chunk in cut(part, layout.wanted, chunk_bytes):
            for columns in read_chunk(chunk, Watched(layout.options, layout.convert)):
                texts = (columns.prompt, columns.first, columns.second)
                rows += zip(*(column.to_pylist() for column in texts), strict=True)
        return rows, not fallen
    except UserError as error:
        return str(error), not fallen


@settings(max_examples=60)
@given(st.lists(row, min_size=1, max_size=8), st.booleans(), st.sampled_from([1, 40, 1 << 20]), st.booleans())
def test_good_lines_are_read_by_arrow_and_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], ascii: bool, size: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = [json.dumps(r, ensure_ascii=ascii) for r in ({"prompt": "p", "chosen": "a", "rejected": "b"}, *rows)]
    path.write_text("\n".join(lines) + "\n" * end, newline="\n")
    read, by_arrow = fast(path, size)
    assert read == slow(path)
    plain = not any(isinstance(value, float) for r in rows for value in r.values())  # NaN is not for Arrow
    assert by_arrow or not plain


@settings(max_examples=80)
@given(
    st.lists(st.one_of(row.map(json.dumps), odd_row.map(json.dumps), st.text(max_size=10)), max_size=6),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.sampled_from([1, 60, 1 << 20]),
)
@example(['{"prompt": "p", "chosen":', '"a", "rejected": "b"} {"prompt": "", "chosen": "c", "rejected": ""}'], "\n", 9)
@example(['{"prompt": "p", "prompt": "q", "chosen": "a", "rejected": "b"}'], "\n", 999)
@example(['{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}'], "\n", 999)
@example(['{"prompt": "\\ude00", "chosen": "a", "rejected": "b"}'], "\n", 999)
@example(['{"prompt": "p", "chosen": "a", "rejected": "b", "x": "\\udc00"}'], "\n", 999)
@example(['{"prompt": "p", "chosen": "a\tb", "rejected": "b"}'], "\n", 999)
@example(['{"prompt": "p", "chosen": "a", "rejected": "b", "x": 01}'], "\n", 999)
@example(['{"prompt": "p", "chosen": "a", "rejected": "b", "x": [1,]}'], "\n", 999)
@example(["{}"], "\n", 999)
def test_odd_lines_give_the_same_rows_or_the_same_message(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], between: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    first = json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"})
    path.write_bytes(between.join([first, *lines]).encode("utf-8", "surrogatepass"))
    assert fast(path, size)[0] == slow(path)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
@pytest.mark.parametrize("column", ["chosen", "other"])
def test_bytes_that_are_no_text_are_refused_alike(tmp_path: Path, bad: bytes, column: str) -> None:
    path = tmp_path / "train.jsonl"
    good = b'{"prompt": "p", "chosen": "a", "rejected": "b", "other": "x"}\n'
    path.write_bytes(good * 3 + good.replace(b'"a"' if column == "chosen" else b'"x"', b'"%b"' % bad) + good)
    message = slow(path)
    assert isinstance(message, str)
    assert "line 4: is not UTF-8 text" in message
    for size in (1, 100, 1 << 20):
        assert fast(path, size)[0] == message


def test_ranges_cover_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * i, "chosen": "a", "rejected": "b"}) + "\n" for i in range(50)))
    (part,) = open_source(path)
    for size in (1, 7, 100, 1000, 1 << 20):
        chunks = list(cut(part, ("prompt",), size))
        assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
        assert chunks[-1].end == path.stat().st_size
        assert sum(chunk.size() for chunk in chunks) == path.stat().st_size


def test_gzip_lines_are_cut_at_line_ends_and_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl.gz"
    lines = [json.dumps({"prompt": f"p{i}", "chosen": "a", "rejected": "b"}) for i in range(40)]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines))
    read, by_arrow = fast(path, 100)
    assert by_arrow
    assert read == slow(path)
    lines[33] = "{"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines))
    assert fast(path, 100)[0] == slow(path)
    assert "line 34: is not valid JSON" in str(slow(path))


def test_parquet_groups_are_read_by_arrow_and_nulls_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "n": i} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    read, by_arrow = fast(path, 1)
    assert by_arrow
    assert read == slow(path)
    rows[41]["chosen"] = None
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    assert fast(path, 1)[0] == slow(path)
    assert "row 42: one of 'chosen'/'rejected' is null" in str(slow(path))


def test_a_chunk_of_rows_names_its_unit() -> None:
    chunk = Chunk("d.csv", "row", rows=[(9, {"prompt": "p", "chosen": None, "rejected": "b"})])
    with pytest.raises(UserError, match=r"^d\.csv, row 9: one of 'chosen'/'rejected' is null"):
        list(read_chunk(chunk, LAYOUT))
