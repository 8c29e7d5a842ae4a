"""A source cut into chunks that workers read on their own, each in bounded memory.

JSONL is cut into ranges of bytes at line ends, Parquet into row groups; what is only read from the front (compressed
text, CSV, arrays, saved and hub data sets) is read by the parent, which hands on whole lines or rows. `read_chunk`
turns a chunk into columns: by Arrow's readers where the chunk is plainly well formed, else row by row.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
from private_rlhf.core.errors import UserError
from private_rlhf.data.formats import columns_like
from private_rlhf.data.layout import Layout
from private_rlhf.data.sources import (
    MOST_LINE_BYTES,
    Part,
    Row,
    check_line,
    is_compressed,
    jsonl_rows,
    open_lines,
    parquet_file,
    present,
    table_rows,
    two_spellings,
)
from private_rlhf.privacy.batches import Columns

CHUNK_BYTES = 16 << 20
CHUNK_ROWS = 16384
_PARQUET_ROWS = 32768


@dataclass(frozen=True)
class Chunk:
    """A piece of a part. name, unit: as in `Part`. before: lines or rows before it, None if that must be counted.

    One of: bytes `start` to `end` of `path` (JSONL); row groups `start` to `end` of `path` (Parquet); `lines`, whole
    JSON lines; `rows`.
    """

    name: str
    unit: str
    before: int | None = 0
    path: Path | None = None
    start: int = 0
    end: int = 0
    lines: bytes | None = None
    rows: list[tuple[int, Row]] | None = None

    def size(self) -> int:
        """Bytes of the source's files that the chunk stands for, as far as known; for progress bars."""
        return self.end - self.start if self.unit == "line" and self.path else 0


def cut(part: Part, wanted: Sequence[str], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The chunks of a part, in file order. UserError where the part itself cannot be read."""
    path = part.files[0] if len(part.files) == 1 else None
    if part.unit == "line" and path is not None:
        yield from (_cut_compressed if is_compressed(path) else _cut_lines)(part, path, chunk_bytes)
    elif path is not None and path.name.lower().endswith(".parquet"):
        yield from _cut_parquet(part, path)
    else:
        rows = part.rows(wanted)
        while some := list(islice(rows, CHUNK_ROWS)):
            kept = [(number, {name: row[name] for name in wanted if name in row}) for number, row in some]
            yield Chunk(part.name, part.unit, rows=kept)


def _cut_lines(part: Part, path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    with open_lines(path) as file:
        size = path.stat().st_size
        start = 0
        while start < size:
            file.seek(min(start + chunk_bytes, size))
            check_line(part.name, len(file.readline(MOST_LINE_BYTES + 1)))
            end = file.tell()
            yield Chunk(part.name, part.unit, None if start else 0, path, start, end)
            start = end


def _cut_compressed(part: Part, path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    before = 0
    with open_lines(path) as file:
        while data := file.read(chunk_bytes):
            rest = file.readline(MOST_LINE_BYTES + 1)
            check_line(part.name, len(rest))
            data += rest
            yield Chunk(part.name, part.unit, before, lines=data)
            before += data.count(b"\n")


def _cut_parquet(part: Part, path: Path) -> Iterator[Chunk]:
    with parquet_file(path) as file:
        counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    before = start = rows = 0
    for group, count in enumerate(counts):
        rows += count
        if rows >= _PARQUET_ROWS or group == len(counts) - 1:
            yield Chunk(part.name, part.unit, before, path, start, group + 1)
            before, start, rows = before + rows, group + 1, 0


def read_chunk(chunk: Chunk, layout: Layout) -> Iterator[Columns]:
    """The chunk's rows as columns, one batch or (large row groups) several. UserError names the first bad row."""
    if chunk.unit == "line":
        data = chunk.lines if chunk.lines is not None else _bytes_of(chunk)
        table = _arrow_lines(data, layout.read, layout.watched) if layout.fast else None
        columns = layout.fast_columns(table) if table is not None else None
        yield columns if columns is not None else _slow_lines(chunk, data, layout)
    elif chunk.rows is not None:
        yield layout.row_columns(chunk.rows, f"{chunk.name}, {chunk.unit}")
    else:
        yield from _parquet_columns(chunk, layout)


def _bytes_of(chunk: Chunk) -> bytes:
    assert chunk.path is not None
    with open_lines(chunk.path) as file:
        file.seek(chunk.start)
        return file.read(chunk.end - chunk.start)


def _slow_lines(chunk: Chunk, data: bytes, layout: Layout) -> Columns:
    before = chunk.before
    if before is None:
        try:
            return layout.row_columns(jsonl_rows(chunk.name, io.BytesIO(data), layout.wanted, 1), "")
        except UserError:
            before = _lines_before(chunk)  # counted only now that a message must name the line
    rows = jsonl_rows(chunk.name, io.BytesIO(data), layout.wanted, before)
    return layout.row_columns(rows, f"{chunk.name}, {chunk.unit}")


def _lines_before(chunk: Chunk) -> int:
    assert chunk.path is not None
    count, left = 0, chunk.start
    with open_lines(chunk.path) as file:
        while left:
            data = file.read(min(left, 1 << 20))
            count, left = count + data.count(b"\n"), left - len(data)
    return count


def _key_names(data: bytes) -> set[str]:
    """The names that JSON lines give to values, with texts that look like one: those of the first line, and others
    whose end (a quote, a colon) no name of the first line has."""
    names = set(json.loads(data.partition(b"\n")[0]))
    known = (b'(?<!"%b")' % re.escape(name.encode(errors="surrogatepass")) for name in names)
    for end in re.finditer(b'"(?=\\s*:)' + b"".join(known), data):
        with suppress(ValueError):  # an escaped quote inside a text
            names.add(json.loads(data[data.rfind(b'"', 0, end.start()) : end.end()]))
    return names


def _arrow_lines(data: bytes, wanted: Sequence[str], watched: tuple[str, ...]) -> pa.Table | None:
    """Arrow's reading of JSON lines, or None where it could differ from the row reader's.

    Every line must be `{...}` from the first byte to the last: between two lines `}` and `{` cannot both stand inside
    one object, so each line holds whole objects, and as many rows as lines means one each. Numbers for text, nulls,
    missing and double columns, two spellings of one column, bad escapes and bad UTF-8 all lead to None.
    """
    array = np.frombuffer(data, np.uint8)[: len(data) - data.endswith(b"\n")]
    breaks = np.flatnonzero(array == 10)
    if not len(array) or array[0] != ord("{") or array[-1] != ord("}") or not _is_utf8(data):
        return None
    if np.diff(breaks, prepend=-1, append=len(array)).max() > MOST_LINE_BYTES:
        return None
    if not ((array[breaks - 1] == ord("}")) & (array[breaks + 1] == ord("{"))).all():
        return None
    schema = pa.schema([(name, pa.string()) for name in wanted])
    reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    for others in ("error", "ignore"):
        try:
            parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
            table = pj.read_json(pa.BufferReader(data), read_options=reading, parse_options=parsing)
            names = _key_names(data) if others == "ignore" else set()
            odd = two_spellings(names, wanted) or columns_like(names, watched)
            return None if odd or len(table) != len(breaks) + 1 else table
        except (pa.ArrowException, ValueError):
            continue
    return None


def _is_utf8(data: bytes) -> bool:
    ends = np.array([0, len(data)], np.int64)
    whole = pa.Array.from_buffers(pa.large_string(), 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _parquet_columns(chunk: Chunk, layout: Layout) -> Iterator[Columns]:
    assert chunk.path is not None
    assert chunk.before is not None
    number = chunk.before
    with parquet_file(chunk.path) as file:
        names = present(chunk.path, file.schema_arrow.names, layout.wanted)
        groups = list(range(chunk.start, chunk.end))
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=names, use_threads=False):
            table = pa.Table.from_batches([batch])
            columns = layout.fast_columns(table) if layout.fast else None
            if columns is None:
                columns = layout.row_columns(table_rows([table], number), f"{chunk.name}, {chunk.unit}")
            yield columns
            number += len(table)
