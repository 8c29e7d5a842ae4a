"""Raw data that nobody writes by accident: lines without end, doubled columns, a release taken for raw preferences."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data import chunks, sources
from private_rlhf.data.chunks import cut, read_chunk
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.layout import find_layout
from private_rlhf.data.sources import open_source
from private_rlhf.privacy.records import record_id

ROW = {"prompt": "p", "chosen": "c", "rejected": "r"}


def read(path: Path, options: Options | None = None) -> int:
    """How many rows the engine reads."""
    parts, options = open_source(path), options or Options()
    layout = find_layout(str(path), parts, options)
    found = (part for each in parts for chunk in cut(each, layout.wanted, 1 << 20)
             for part in read_chunk(chunk, layout))  # fmt: skip
    return sum(len(columns.preferred) for columns in found)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("first", [True, False])
def test_a_line_without_end_is_refused_in_little_memory(tmp_path: Path, name: str, first: bool) -> None:
    """64 MiB in 64 kB of gzip; a reader of whole lines would hold it all, and decode it."""
    path = tmp_path / name
    good = (json.dumps(ROW) + "\n").encode()
    with gzip.open(path, "wb", 1) if name.endswith(".gz") else path.open("wb") as file:
        file.write((b"" if first else good) + b'{"prompt": "' + b"x" * 1000)
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n')
    tracemalloc.start()
    with pytest.raises(UserError, match="has a line of over 16 MiB"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 << 20


def test_a_row_group_that_unpacks_to_far_more_than_its_rows_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte of one letter is a Parquet file of kilobytes; many rows of ordinary size are none."""
    monkeypatch.setattr(sources, "MOST_GROUP_BYTES", 1 << 20)
    table = pa.Table.from_pylist([ROW | {"prompt": "x" * (2 << 20)}] * 2)
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    with pytest.raises(UserError, match="has a row group of over 1 MiB in few rows; write smaller ones"):
        open_source(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist([ROW | {"prompt": "x" * 2000}] * 2000), tmp_path / "y.parquet")
    assert read(tmp_path / "y.parquet") == 2000


@pytest.mark.parametrize("space", ["", " "])
def test_every_reader_has_the_same_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    """A line that begins with a space is read row by row, the others by Arrow."""
    path, line = tmp_path / "x.jsonl", space + json.dumps(ROW | {"prompt": "x" * 300}) + "\n"
    path.write_text(json.dumps(ROW) + "\n" + line)
    for bound in (len(line), len(line) - 1):
        for module in (sources, chunks):
            monkeypatch.setattr(module, "MOST_LINE_BYTES", bound)
        if bound == len(line):
            assert read(path) == 2
        else:
            with pytest.raises(UserError, match="has a line of over"):
                read(path)


DOUBLED = {
    "plain.jsonl": '{"prompt": "p", "chosen": "a", "rejected": "b", "chosen": "b"}\n',
    "equal.jsonl": '{"prompt": "p", "chosen": "a", "chosen": "a", "rejected": "b"}\n',
    "second.jsonl": json.dumps(ROW) + '\n{"prompt": "p", "prompt": "q", "chosen": "a", "rejected": "b"}\n',
    "slow.jsonl": json.dumps(ROW) + '\n {"prompt": "p", "rejected": "c", "chosen": "a", "rejected": "b"}\n',
    "x.csv": "prompt,chosen,rejected,chosen\np,a,b,c\n",
}


@pytest.mark.parametrize("name", DOUBLED)
def test_a_column_that_is_given_twice(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(DOUBLED[name])
    with pytest.raises(UserError, match="twice; keep one"):
        read(path)


@pytest.mark.parametrize(
    "names", [("chosen", "rejected", "chosen"), ("prompt", "chosen", "rejected", "system", "system")]
)
def test_a_doubled_column_of_parquet_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Without a prompt beside it the last of two was read; a doubled system message was called a file without rows."""
    texts = [pa.array([f"What is the number {i}? {place}" for i in range(9)]) for place in range(len(names))]
    pq.write_table(pa.table(texts, names=list(names)), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=f"has column '{names[-1]}' twice; keep one"):
        read(tmp_path / "x.parquet")


def test_doubled_keys_elsewhere(tmp_path: Path) -> None:
    """In Parquet, in messages and in extra columns; a column that nobody asked for may be doubled."""
    text = pa.array(["t"])
    table = pa.table([text, pa.array(["a"]), pa.array(["b"]), pa.array(["c"])],
                     names=["prompt", "chosen", "rejected", "chosen"])  # fmt: skip
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match="twice; keep one"):
        read(tmp_path / "x.parquet")
    path = tmp_path / "x.jsonl"
    path.write_text('{"chosen": [{"role": "user", "content": "c", "content": "d"}], "rejected": []}\n')
    with pytest.raises(UserError, match="holds a message without"):
        read(path)
    path.write_text(json.dumps(ROW)[:-1] + ', "note": {"a": 1, "a": 2}}\n')
    with pytest.raises(UserError, match="gives a key twice"):
        read(path, Options(columns=("note",)))
    assert read(path) == 1
    path.write_text(json.dumps(ROW)[:-1] + ', "note": 1, "note": 2}\n')
    assert read(path) == 1


@pytest.mark.parametrize("name", ["part-00000.parquet", "copy.parquet", "copy.jsonl", "copy.csv"])
def test_rows_of_a_release_are_no_raw_data(tmp_path: Path, name: str) -> None:
    """Its labels are noisy already; compared with the true ones they would give the flips away by their number."""
    row = ROW | {"record_id": record_id("p", ("c", "r"))}
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif name.endswith(".csv"):
        path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    else:
        path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="is a row of a release"):
        read(path)
    path.with_suffix(".jsonl").write_text(json.dumps(row | {"record_id": "17"}) + "\n")
    assert read(path.with_suffix(".jsonl")) == 1


def test_names_of_parquet_columns_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "chosen": ["c"], "rejected": ["r"]}), path)
    path.write_bytes(path.read_bytes().replace(b"chosen", b"ch\xffsen"))
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        read(path)
