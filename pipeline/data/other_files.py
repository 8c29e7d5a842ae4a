"""Files beside JSON lines, CSV and Parquet: JSON arrays and Arrow IPC, read in pieces of bounded memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from private_rlhf.core.errors import UserError

_PIECE = 1 << 18
_FILE_MAGIC = b"ARROW1"
_MARKS = {("begin", "["): "first", ("first", "]"): "end", ("after", ","): "next", ("after", "]"): "end"}
"""(where a reader of a JSON array stands, the mark that it meets) -> where it stands then."""


def elements(name: str | Path, file: BinaryIO, most: int) -> Iterator[str]:
    """The texts of the elements of a JSON array, each of at most `most` characters. UserError: not a whole one."""
    decode, scan = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode
    text, place, number, state = "", 0, 0, "begin"
    while True:
        piece = file.read(_PIECE)
        try:
            text, place = text[place:] + decode(piece, not piece), 0
        except UnicodeDecodeError:
            raise UserError(f"{name}: is not UTF-8 text; convert the file to UTF-8") from None
        while True:
            while place < len(text) and text[place].isspace():
                place += 1
            mark = text[place : place + 1]
            if (state, mark) in _MARKS:
                place, state = place + 1, _MARKS[state, mark]
            elif mark and state in ("first", "next"):
                try:
                    _, end = scan(text, place)
                except (ValueError, RecursionError):
                    break  # unless more of it follows
                yield text[place:end]
                place, state, number = end, "after", number + 1
            else:
                break
        if not piece or len(text) - place > most or (mark and state not in ("first", "next")):
            break
    if state != "end" or text[place:].strip():
        raise UserError(f"{name}, row {number + 1}: is not valid JSON; the file must be one whole array of objects")


@contextmanager
def arrow_batches(path: Path) -> Iterator[tuple[list[str], Iterator[pa.RecordBatch]]]:
    """(Names of columns, record batches) of an Arrow file or stream, mapped into memory. UserError: it is not one."""
    try:
        with pa.memory_map(str(path)) as source:
            whole = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            source.seek(0)
            with pa.ipc.open_file(source) if whole else pa.ipc.open_stream(source) as reader:
                batches = (reader.get_batch(place) for place in range(reader.num_record_batches)) if whole else reader
                yield list(reader.schema.names), iter(batches)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        raise UserError(f"{path}: is not a whole Arrow file (truncated or damaged); copy it again") from None
