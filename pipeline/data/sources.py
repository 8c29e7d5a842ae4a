"""Rows of a data source, streamed: JSON, CSV, Parquet and Arrow files, folders of splits, saved `datasets`, hub ids.

A source becomes a list of parts (one per file), each of which yields (row number, {column: value}) in file order
without ever holding the file in memory. Nothing is cached on disk. Error messages name the file and the row, never a
column position, a byte offset or a value: those would differ when chosen and rejected change places, and a message is
released too (design: label-dependent side channels). Errors from parsers are raised `from None`, since they may carry
the row's text.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from private_rlhf.core.errors import MOST_NAME, UserError
from private_rlhf.data.folders import is_undivided, no_split, split_files, split_names
from private_rlhf.data.other_files import arrow_batches, elements
from private_rlhf.data.release import is_release
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import fold_name
from private_rlhf.recipe import SUFFIXES, is_hub_id

Row = dict[str, Any]
Rows = Callable[[Sequence[str]], Iterator[tuple[int, Row]]]

BATCH_ROWS = 1024
MOST_LINE_BYTES = 16 << 20
MOST_GROUP_BYTES = 1 << 30
"""Of a Parquet row group when it is unpacked, unless `MOST_ROW_BYTES` for each of its rows are more."""
MOST_ROW_BYTES = 64 << 10
MOST_BLANK_LINES = 100_000
"""In a row."""
SIGNS = {
    b"version https://git-lfs": "is a pointer of Git LFS and not the file; fetch the file with `git lfs pull`",
    b"\x1f\x8b": "is a gzip file; end its name with .gz",
    b"\x28\xb5\x2f\xfd": "is a zstd file; end its name with .zst",
    b"PAR1": "is a Parquet file; end its name with .parquet",
}
"""First bytes, and what a file is that has them beside its name."""
TWICE = object()
"""In place of a value that a JSON object gives twice; no reader takes it for a text or a number."""


@dataclass(frozen=True)
class Part:
    """One file (or saved or hub data set) of a source.

    name: as the user knows it, for messages. unit: "line" or "row", what the row numbers (from 1) count.
    columns: all columns, or None where each row has its own (JSONL). rows(wanted): the rows, with at least the wanted
    columns that exist. files: what `source_chunks` reads; empty for a hub data set.
    """

    name: str
    unit: str
    columns: tuple[str, ...] | None
    rows: Rows
    files: tuple[Path, ...] = ()

    @property
    def is_csv(self) -> bool:
        """True for texts only, among which a missing value may be a word."""
        names = (path.name.lower().removesuffix(".gz").removesuffix(".zst") for path in self.files)
        return any(name.endswith((".csv", ".tsv")) for name in names)


def open_source(source: str | Path, split: str | None = None, release: bool = False) -> list[Part]:
    """The parts of a source. UserError if there is no such file or split, or if a file cannot be opened.

    split: which of a folder's or data set's splits, "train" if None; "eval" also finds validation, valid, dev and
    test. release: also accept a released bundle (its prompts are public; its labels are not true labels).
    """
    path = Path(source)
    if is_hub_id(source):
        return [_open_hub(str(source), split or "train")]
    if path.is_dir():
        return _open_folder(path, split or "train", release)
    if path.is_file():
        if split not in (None, "train"):
            raise UserError(f"{path}: is one file and has no split {split!r}; give a folder that holds {split}.jsonl")
        return [_open_file(path)]
    raise UserError(f"{source}: no such file or folder; check the path")


def run_splits(source: str | Path, split: str | None = None) -> tuple[str | None, ...]:
    """The splits that a run reads: training and evaluation, or one of which a tenth is held out. split: data.split."""
    path = Path(source).expanduser()
    return (split,) if split or path.is_file() or is_undivided(path) else ("train", "eval")


def source_chunks(source: str | Path, split: str | None = None) -> Iterator[bytes]:
    """The source's bytes, injectively framed, for a *keyed* digest; never digest them without a key."""
    for part in open_source(source, split):
        for path in part.files:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    yield frame(chunk)
            yield frame(b"")
        if not part.files:
            for _, row in part.rows(()):
                yield frame(json.dumps(row, sort_keys=True, default=str).encode())


def _open_file(path: Path) -> Part:
    name = path.name.lower()
    with open_lines(path) as file:  # unpacked
        start = file.read(24)
    for sign, fault in SIGNS.items():
        if start.startswith(sign) and not (sign == b"PAR1" and name.endswith(".parquet")):
            raise UserError(f"{path}: {fault}")
    try:
        plain = name.removesuffix(".gz").removesuffix(".zst")
        if plain.endswith(".json") and _is_array(path):
            return Part(str(path), "row", None, partial(_array_rows, path), (path,))
        if plain.endswith((".jsonl", ".ndjson", ".json")):
            return Part(str(path), "line", None, partial(_jsonl_rows, path), (path,))
        if name.endswith(".parquet"):
            with parquet_file(path) as table:
                columns = tuple(table.schema_arrow.names)
                _check_groups(path, table.metadata)
            return Part(str(path), "row", columns, partial(_parquet_rows, path), (path,))
        if plain.endswith((".csv", ".tsv")):
            with open_lines(path) as file:
                first = next(_lines(path, file), "")
            mark = max(",;\t", key=first.count)  # spreadsheets of many countries write semicolons
            with open_lines(path) as file:
                header = tuple(next(csv.reader(_lines(path, file), delimiter=mark), ()))
            texts = any(len(name) > MOST_NAME or "\n" in name.strip() for name in header)
            if first and (texts or not header or first.lower().startswith("sep=")):
                raise UserError(f"{path}: does not begin with a line of names of columns; let it stand first")
            return Part(str(path), "row", header, partial(_csv_rows, path, header, mark), (path,))
        if name.endswith((".arrow", ".feather")):
            with arrow_batches(path) as (names, _):
                return Part(str(path), "row", tuple(names), partial(_arrow_rows, path), (path,))
    except csv.Error:
        raise UserError(f"{path}: the header is not valid CSV; quote fields with double quotes") from None
    raise UserError(f"{path}: unknown kind of file; use one of {', '.join(SUFFIXES)}")


def _open_folder(folder: Path, split: str, release: bool) -> list[Part]:
    if is_release(folder):
        if release:
            return [_open_file(path) for path in sorted(folder.glob("part-*.parquet"))]
        raise UserError(f"{folder}: is a released bundle, whose labels are private already; give the raw preferences")
    if (folder / "dataset_dict.json").is_file():
        for name in split_names(split):
            if (folder / name).is_dir():
                return [_open_saved(folder / name)]
        raise no_split(folder, split, sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        if split != "train":
            raise no_split(folder, split, ["train"])
        return [_open_saved(folder)]
    return [_open_file(path) for path in split_files(folder, split)]


def _lines(name: str | Path, file: BinaryIO, before: int = 0) -> Iterator[str]:
    """Lines (split at \\n alone, which stays) decoded one by one, so that an error can name the line."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), before + 1):
        check_line(name, len(line), f", line {number}")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name}, line {number}: is not UTF-8 text; convert the file to UTF-8") from None


def check_line(name: str | Path, size: int, where: str = "") -> None:
    """UserError for a line of more bytes than a row can need: it would have to be held in memory."""
    if size > MOST_LINE_BYTES:
        raise UserError(f"{name}{where}: has a line of over {MOST_LINE_BYTES >> 20} MiB; end rows with line breaks")


def is_compressed(path: Path) -> bool:
    """By its name."""
    return path.name.lower().endswith((".gz", ".zst"))


@contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """A text file's bytes, decompressed. UserError if it cannot be read or is not a whole compressed file."""
    try:
        with _opened(path) as file:
            yield cast(BinaryIO, file)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"{path}: is not a whole gzip file (truncated or damaged); copy it again") from None
    except OSError as error:
        if error.errno is None:  # Arrow's decompression
            raise UserError(f"{path}: is not a whole zstd file (truncated or damaged); copy it again") from None
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _opened(path: Path) -> Any:
    name = path.name.lower()
    if name.endswith(".zst"):
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), 1 << 20)
    return gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb")


def _is_array(path: Path) -> bool:
    """True if the text begins with a bracket: a JSON array of rows, not JSON lines."""
    with open_lines(path) as file:
        return file.read(1 << 18).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _array_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with open_lines(path) as file:
        for number, text in enumerate(elements(path, file, MOST_LINE_BYTES), 1):
            yield number, _json_row(f"{path}, row {number}", text, wanted)


def _jsonl_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with open_lines(path) as file:
        yield from jsonl_rows(path, file, wanted)


def jsonl_rows(name: str | Path, lines: BinaryIO, wanted: Sequence[str], before: int = 0) -> Iterator[tuple[int, Row]]:
    """The rows of JSON lines. name: of the file, for messages. wanted: columns that no row may give twice. before:
    lines before the first one."""
    last = before
    for number, line in enumerate(_lines(name, lines, before), before + 1):
        if number - last > MOST_BLANK_LINES:
            raise UserError(f"{name}, line {number}: {MOST_BLANK_LINES} empty lines came before it; remove them")
        if not line.isspace():
            last = number
            yield number, _json_row(f"{name}, line {number}", line, wanted)


def no_later_one(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object in which what is given twice has no value, where `json` would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        row |= {key: TWICE for key, times in Counter(key for key, _ in pairs).items() if times > 1}
    return row


class NestedTooDeeply(UserError):
    """The error of a JSON row whose nesting only Arrow, which passes over columns that are not wanted, can read."""


def _json_row(where: str, text: str, wanted: Sequence[str]) -> Row:
    try:
        row = json.loads(text, object_pairs_hook=no_later_one)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError:
        problem = "holds a lone surrogate, which is not valid Unicode; repair or remove the row"
        raise UserError(f"{where}: {problem}") from None
    except (ValueError, RecursionError) as error:
        kind = NestedTooDeeply if isinstance(error, RecursionError) else UserError
        raise kind(f"{where}: is not valid JSON; each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: is not a JSON object; each line must be one object with named columns")
    if twice := [column for column in wanted if row.get(column) is TWICE]:
        raise UserError(f"{where}: has column {twice[0]!r} twice; keep one")
    return row


def present(path: Path, columns: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The wanted columns that there are, or all. UserError for one that is there twice."""
    if twice := [name for name in wanted if columns.count(name) > 1]:
        raise UserError(f"{path}: has column {twice[0]!r} twice; keep one")
    return [name for name in columns if name in wanted or not wanted]


def two_spellings(columns: Collection[str], wanted: Sequence[str]) -> str | None:
    """The fault of a column beside a wanted one whose name differs in case, Unicode form or white space only."""
    names = {fold_name(column): column for column in wanted if column in columns}
    for column in columns:
        other = names.get(fold_name(column), column)
        if other != column:
            return f"has the columns {other!r} and {column!r}, two spellings of one name; keep or rename one"
    return None


def _csv_rows(path: Path, header: tuple[str, ...], mark: str, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """UserError for a row that is not one of the header's fields: in one sentence, as a quote that is not closed makes
    the one fault in the first of two responses and the other in the second."""
    present(path, header, wanted)
    number = 0
    try:
        with open_lines(path) as file:
            reader = csv.reader(_lines(path, file), strict=True, delimiter=mark)
            next(reader, None)
            for values in filter(None, reader):
                if len(values) != len(header):
                    raise csv.Error
                number += 1
                yield number, dict(zip(header, values, strict=True))
    except csv.Error:
        raise UserError(
            f"{path}, row {number + 1}: is not valid CSV, has another number of fields than the header ({len(header)}),"
            f" or has a field of over {csv.field_size_limit()} characters; quote fields with double quotes, or use"
            " JSONL"
        ) from None


@contextmanager
def parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file that is open for reading. UserError if it cannot be read, or not as a whole Parquet file."""
    damaged = UserError(f"{path}: is not a whole Parquet file (truncated or damaged); copy it again")
    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (pa.ArrowException, UnicodeDecodeError):  # the latter for names of columns
        raise damaged from None
    try:
        with file:
            yield file
    except UnicodeDecodeError:
        raise UserError(f"{path}: holds text that is not UTF-8; convert it to UTF-8") from None
    except (pa.ArrowException, OSError):
        raise damaged from None


def _check_groups(path: Path, metadata: Any) -> None:
    """UserError for row groups that say of themselves that they take more memory than that many texts do. A page that
    says something else is Parquet's own limit, 2 GiB."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    if any(group.total_byte_size > max(MOST_GROUP_BYTES, group.num_rows * MOST_ROW_BYTES) for group in groups):
        raise UserError(f"{path}: has a row group of over {MOST_GROUP_BYTES >> 20} MiB in few rows; write smaller ones")


def _parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with parquet_file(path) as file:
        columns = present(path, file.schema_arrow.names, wanted)
        yield from table_rows(file.iter_batches(batch_size=BATCH_ROWS, columns=columns))


def _arrow_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with arrow_batches(path) as (names, batches):
        kept = present(path, names, wanted)
        pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, len(batch), BATCH_ROWS))
        yield from table_rows(piece.select(kept) for piece in pieces)


def table_rows(tables: Iterable[pa.RecordBatch | pa.Table], before: int = 0) -> Iterator[tuple[int, Row]]:
    """The rows of tables, counted on from one to the next. before: rows before the first one."""
    rows = (dict(zip(table.schema.names, values, strict=True)) for table in tables
            for values in zip(*(column.to_pylist() for column in table.columns), strict=True))  # fmt: skip
    return enumerate(rows, before + 1)


def _open_saved(folder: Path) -> Part:
    """A `Dataset.save_to_disk` folder: memory-mapped by `datasets`, read in batches, nothing cached."""
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
        columns = tuple(data.column_names)
    except Exception:  # a damaged folder fails in as many ways as it has files
        raise UserError(f"{folder}: is not a whole saved data set; save it again with `save_to_disk`") from None

    def rows(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        kept = data.select_columns(present(folder, columns, wanted))
        try:
            yield from table_rows(kept.with_format("arrow").iter(batch_size=BATCH_ROWS))
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            raise UserError(f"{folder}: is damaged; save it again with `save_to_disk`") from None

    files = tuple(path for path in sorted(folder.iterdir()) if path.is_file())
    return Part(str(folder), "row", columns, rows, files)


def _open_hub(name: str, split: str) -> Part:
    """A hub data set, streamed: no copy of the raw labels is left in the `datasets` cache."""
    import datasets

    try:
        splits = list(datasets.get_dataset_split_names(name))
        chosen = next((candidate for candidate in split_names(split) if candidate in splits), None)
        data = datasets.load_dataset(name, split=chosen, streaming=True) if chosen else None
    except Exception as error:  # the hub client's errors have no common class
        raise UserError(
            f"{name}: is no file or folder here, and the hub does not give it ({type(error).__name__});"
            " check the path or the connection"
        ) from None
    if data is None:
        raise no_split(name, split, splits)
    columns = tuple(data.column_names) if data.column_names else None
    return Part(name, "row", columns, lambda wanted: enumerate(iter(data), 1))
