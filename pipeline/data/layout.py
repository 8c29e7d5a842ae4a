"""What the columns of a labelled source mean to the engine, and how rows become `batches.Columns`.

Two forms. `chosen` and `rejected` (with or without `prompt`, see `formats`): the preference is the columns' order.
`response_a` and `response_b` with a label column: its two values are declared beforehand, the first means that
response_a is preferred, the second that response_b is; anything else is refused, and never shown. Beside them a column
that names the labeller and one that names the event, where an empty value means none, and one by which a label says
that it corrects an earlier one: its record's id, in the rows that do. They are not released unless they are also named
as extra columns; and extra columns, released as they are.

Explicit text goes column by column where Arrow reads it (`fast_columns`); everything else, and every row in which
something is wrong, goes row by row, so that both ways give the same rows and the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from private_rlhf.core.errors import UserError
from private_rlhf.data.formats import (
    PAIR,
    Converted,
    Converter,
    RowError,
    column_value,
    explicit_text,
    pair_converter,
    require_columns,
)
from private_rlhf.data.sources import TWICE, Part, Row, two_spellings
from private_rlhf.privacy.batches import Columns, blank_texts
from private_rlhf.privacy.records import MESSAGES, TEXT, encode_text, fold_name, is_blank, record_id

RESPONSES = ("response_a", "response_b")
MOST_SPELLINGS = 1000  # of a run, whose facts stay in memory
_RESERVED = frozenset({"prompt", "record_id", *PAIR, *RESPONSES})


@dataclass(frozen=True)
class Options:
    """What the holder of the labels declares about the columns; UserError if it does not fit together.

    labels: the values of `label_column` for "response_a preferred" and "response_b preferred". fold_names: spellings of
    a labeller's name are one person (`records.fold_name`), as the key's ledger has it (`Ledger.folds_names`).
    """

    labeler_column: str | None = None
    event_column: str | None = None
    columns: tuple[str, ...] = ()
    label_column: str | None = None
    labels: tuple[str, str] | None = None
    corrects_column: str | None = None
    fold_names: bool = False

    def __post_init__(self) -> None:
        if (self.label_column is None) != (self.labels is None):
            raise UserError(
                "--label-column and --labels go together: name the column and its two values, first the one that says"
                " that response_a is preferred (for example --label-column label --labels A,B)"
            )
        if self.labels is not None and (len(set(self.labels)) != 2 or not all(self.labels)):
            raise UserError("--labels: declare two different values, for example --labels 1,0")
        if self.corrects_column is not None and self.event_column is None:
            raise UserError("--corrects-column needs --event-column: a correction is an event of its own, with a name")
        if len(set(self.columns)) < len(self.columns):
            raise UserError("--columns: names a column twice; name each once")
        if self.label_column in _RESERVED:
            raise UserError(f"--label-column: {self.label_column!r} is a part of the pair; name another column")
        for option, names in (
            ("--columns", self.columns),
            ("--labeler-column", (self.labeler_column,)),
            ("--event-column", (self.event_column,)),
            ("--corrects-column", (self.corrects_column,)),
        ):
            for name in names:
                if name is not None and (name in _RESERVED or name == self.label_column):
                    raise UserError(f"{option}: {name!r} holds the pair or its label; name another column")

    @property
    def pair(self) -> tuple[str, str]:
        """The names of the two responses' columns."""
        return PAIR if self.label_column is None else RESPONSES

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that are read beside prompt and responses."""
        named = (self.labeler_column, self.event_column, self.corrects_column, *self.columns, self.label_column)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def wanted(self) -> tuple[str, ...]:
        """All columns that are read."""
        return ("prompt", *self.pair, *self.beside)


def spelling_digests(spellings: Mapping[str, str]) -> list[list[str]]:
    """Digests of (name, spelling) of labellers as JSON types, of the first `MOST_SPELLINGS`."""
    some = islice(spellings.items(), MOST_SPELLINGS)
    return [[blake2b(text.encode(), digest_size=8).hexdigest() for text in (name, spelling)] for spelling, name in some]


def respelled(digests: Iterable[list[list[str]]]) -> int:
    """The number of spellings of labellers beyond one for each; digests: from `spelling_digests`."""
    names, spellings = (set(each) for each in zip(*chain([("", "")], *digests), strict=True))
    return len(spellings) - len(names)


def parse_labels(text: str | None) -> tuple[str, str] | None:
    """`A,B` as ("A", "B"). UserError unless there are two values."""
    if text is None:
        return None
    values = tuple(value.strip() for value in text.split(","))
    if len(values) != 2:
        raise UserError("--labels: declare two values with a comma between them, for example --labels A,B")
    return values[0], values[1]


@dataclass(frozen=True)
class Layout:
    """The options with the converter that the first row called for; picklable."""

    options: Options
    convert: Converter

    @property
    def kind(self) -> bytes:
        """`records.TEXT` or `records.MESSAGES`: the same for all rows."""
        return TEXT if self.convert.__name__.endswith("text") else MESSAGES

    @property
    def fast(self) -> bool:
        """Whether whole columns of strings can be read."""
        names = {self.options.labeler_column, self.options.event_column}
        plain = set(self.options.beside) <= names and '"' not in "".join(self.options.beside)
        return self.convert is explicit_text and not self.options.columns and plain

    def fast_columns(self, table: pa.Table) -> Columns | None:
        """The columns of a table of strings without nulls; None if it is anything else."""
        arrays: dict[str, pa.Array] = {}
        for name in self.options.wanted:
            once = len(table.schema.get_all_field_indices(name)) == 1
            array = _one_array(table.column(name)) if once else None
            if array is None:
                return None
            arrays[name] = array
        first, second = (arrays[name] for name in self.options.pair)
        prompt = arrays["prompt"]
        blank = blank_texts(prompt) | blank_texts(first) | blank_texts(second)
        labelers, events = (arrays[name].to_pylist() if name else None for name in self._names)
        signs = np.ones(len(table), np.int8)
        return self._folded(Columns(prompt, first, second, signs, TEXT, blank, labelers, events))

    def _folded(self, columns: Columns) -> Columns:
        """The columns with one name for each labeller, where the options say so."""
        if columns.labelers is None or not self.options.fold_names:
            return columns
        spellings = {name: fold_name(name) for name in set(columns.labelers)}
        return replace(columns, labelers=[spellings[name] for name in columns.labelers], spellings=spellings)

    @property
    def _names(self) -> tuple[str | None, str | None]:
        return self.options.labeler_column, self.options.event_column

    def row_columns(self, rows: Iterable[tuple[int, Row]], where: str) -> Columns:
        """The columns of rows read one by one. where: file and unit, for messages. UserError: the first bad row."""
        texts: list[list[Any]] = [[], [], []]
        preferred: list[int] = []
        blank: list[bool] = []
        named: tuple[list[str], list[str]] = ([], [])
        corrects: list[bool] = []
        extra: list[str] = []
        encoded = self.kind == MESSAGES
        checked: set[tuple[str, ...]] = set()  # most rows have the columns of the one before
        for number, row in rows:
            try:
                if (names := tuple(row)) not in checked:
                    _check_columns(names, self.options.wanted)
                    checked.add(names)
                converted, sign = self.pair_of(row)
                for values, name in zip(named, self._names, strict=True):
                    if name is not None:
                        values.append(_name_of(row, name, optional=name != self.options.labeler_column))
                if self.options.corrects_column is not None:
                    corrects.append(self._corrects(row, converted))
                if self.options.columns:
                    extra.append(_json_of(row, self.options.columns))
                encodings = [encode_text(text) for text in converted]
            except RowError as error:
                raise UserError(f"{where} {number}: {error}") from None
            except UnicodeEncodeError:
                raise UserError(
                    f"{where} {number}: holds a lone surrogate, which is not valid Unicode; repair or remove the row"
                ) from None
            for column, text, data in zip(texts, converted, encodings, strict=True):
                column.append(data if encoded else text)
            preferred.append(sign)
            blank.append(any(map(is_blank, converted)))
        prompt, first, second = (pa.array(column, pa.large_string()) for column in texts)
        columns = Columns(
            prompt,
            first,
            second,
            np.array(preferred, np.int8),
            self.kind,
            np.array(blank, bool),
            named[0] if self._names[0] else None,
            named[1] if self._names[1] else None,
            pa.array(extra, pa.large_string()) if self.options.columns else None,
            np.array(corrects, bool) if self.options.corrects_column else None,
        )
        return self._folded(columns)

    def _corrects(self, row: Row, converted: Converted) -> bool:
        """Whether the row corrects an earlier label. RowError if it names another record, or is no event of its own."""
        stated = _name_of(row, str(self.options.corrects_column)).strip().lower()
        if not stated:
            return False
        prompt, first, second = converted
        if first != second and stated != record_id(prompt, (first, second)):
            raise RowError(
                f"corrects {stated!r}, which is not the record of its own pair; an edited text is a new record, and its"
                " label is protected as a new one"
            )
        if not _name_of(row, str(self.options.event_column)):
            raise RowError(f"corrects an earlier label without a name of its own in {self.options.event_column!r}")
        return True

    def pair_of(self, row: Row) -> tuple[Converted, int]:
        """((prompt, first, second), +1 if the first response is preferred else -1)."""
        if self.options.labels is None:
            return self.convert(row), 1
        converted = _with_own_names(lambda: self.convert(_as_pair(row)))
        value = _letter(column_value(row, str(self.options.label_column), self.options.wanted))
        if value not in self.options.labels:
            raise RowError("has a label that --labels does not declare; declare both values, or repair the row")
        return converted, 1 if value == self.options.labels[0] else -1


def find_layout(source: str, parts: Sequence[Part], options: Options) -> Layout:
    """Look at the columns and the first row. UserError: no rows, a column is missing, or the row has no known form."""
    for part in parts:
        if part.columns:
            require_columns(part, (*options.pair, *options.beside))
            if fault := two_spellings(part.columns, options.wanted):
                raise UserError(f"{part.name}: {fault}")
    for part in parts:
        for number, row in part.rows((*options.wanted, "record_id")):
            try:
                _check_columns(row, options.wanted)
                if options.labels is None:
                    layout = Layout(options, pair_converter(row))
                else:
                    layout = Layout(options, _with_own_names(lambda row=row: pair_converter(_as_pair(row))))  # type: ignore[misc]
                _refuse_released(layout, row)
            except RowError as error:
                raise UserError(f"{part.name}, {part.unit} {number}: {error}") from None
            return layout
    raise UserError(f"{source}: holds no rows; give a data set with at least one")


def _refuse_released(layout: Layout, row: Row) -> None:
    """RowError for a row of a release, which names its pair as only a release does."""
    if isinstance(row.get("record_id"), str):
        (prompt, *responses), _ = layout.pair_of(row)
        with suppress(ValueError):  # two equal responses, or half a character: nothing that was ever released
            if record_id(prompt, responses) == row["record_id"]:
                raise RowError("is a row of a release, whose label is private already; give the raw preferences")


def _check_columns(names: Collection[str], wanted: Sequence[str]) -> None:
    """RowError for two columns of a row that are spellings of one name."""
    if fault := two_spellings(names, wanted):
        raise RowError(fault)


def _as_pair(row: Row) -> Row:
    names = dict(zip(RESPONSES, PAIR, strict=True))
    return {names.get(name, name): value for name, value in row.items() if name not in PAIR}


def _with_own_names(convert: Callable[[], Any]) -> Any:
    """What the converters say of `chosen` and `rejected`, said of the two responses."""
    try:
        return convert()
    except RowError as error:
        text = str(error)
        for name, own in zip(PAIR, RESPONSES, strict=True):
            text = text.replace(repr(name), repr(own))
        raise RowError(text) from None


def _letter(value: Any) -> str:
    """A label as it stands in --labels: true and false for booleans, 1 for 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip() if isinstance(value, str | int) else ""


def _name_of(row: Row, name: str, optional: bool = True) -> str:
    """A labeller, event or record: text or a whole number; "" for none (an empty text; null but for a labeller)."""
    if optional and row.get(name, "") is None:
        return ""
    value = column_value(row, name, ())
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"column {name!r} is neither text nor a whole number; convert it")
    text = str(value)
    text.encode()
    return text


def _text_of(value: Any) -> str:
    if value is TWICE:
        raise ValueError("twice")
    return str(value)


def _json_of(row: Row, names: Sequence[str]) -> str:
    for name in names:
        if name not in row:
            raise RowError(f"has no column {name!r}; add it, or remove the row")
    try:
        text = json.dumps([row[name] for name in names], ensure_ascii=False, default=_text_of)
    except (ValueError, RecursionError):
        raise RowError("has an extra column that gives a key twice or is nested too deep; repair the row") from None
    text.encode()
    return text


def _one_array(column: pa.ChunkedArray) -> pa.Array | None:
    """The column as one array, if it holds valid strings alone."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count:
        return None
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # combine_chunks keeps several where one cannot hold all
        return None
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return array
