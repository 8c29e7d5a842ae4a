"""Meanings of the columns of a labelled source, and the way from its rows to `batches.Columns`.

`chosen` and `rejected` (with or without `prompt`, see `formats`), whose order is the preference; `response_a` and
`response_b` with a declared label; or a named shape (`shapes`). Beside them columns that name the labeller, the event
(empty: none) and the record that a label corrects, and extra columns, which are released as they are.

Explicit text goes column by column where Arrow reads it (`fast_columns`). Everything else, and every row in which
something is wrong, goes row by row, so that both ways give the same rows and the same messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from private_rlhf.core.errors import UserError, one_line
from private_rlhf.data.conversation import RowError, check_texts, framed, holds_marks, is_written_list, read_messages
from private_rlhf.data.declared_columns import (
    BESIDE_PROMPT,
    CONVERSATIONS,
    FLAGS,
    LOST,
    PAIR,
    PARTS,
    PROMPTS,
    RESPONSES,
    SYSTEMS,
    TIE,
    VERDICT_COLUMNS,
    Options,
    column_value,
    is_filled,
    letter,
    meaning,
    verdict,
    without_words,
)
from private_rlhf.data.formats import (
    SHARE,
    Converted,
    Converter,
    MarkedSource,
    asked_in,
    check_lossy,
    check_pair,
    columns_like,
    counted,
    explicit_text,
    implicit_text,
    naming,
    pair_converter,
    peek,
    require_columns,
    words,
)
from private_rlhf.data.shapes import SHAPES, pairs, shape_of
from private_rlhf.data.sources import TWICE, Part, Row, open_source, two_spellings
from private_rlhf.privacy.batches import Columns, blank_texts, edge_bytes
from private_rlhf.privacy.records import MESSAGES, TEXT, RawPair, encode_text, fold_name, is_blank, record_id

MODELS = ("model", "generator", "system", "policy", "engine")
ANSWERS = ("response", "answer", "output", "completion", "generation", "summary", "candidate", "text")
LETTERS = ("a", "b")
ENDS = (LETTERS, ("1", "2"), ("0", "1"))
"""Beginnings and ends of the names of two columns that hold a row's models, or its responses."""
LEAST_PROMPTS = 10  # rows by which it is judged whether prompts are few
LONGEST_NAME = 40  # characters of a model's
LABELER = "\0labeler"  # in rows that a shape made: no file's column has this name
DOOR = (
    "; response_a and response_b with a label are read by --label-column and --labels (data.label_column, data.labels),"
    " shapes of public data and annotation tools by --format (data.format)"
)
_BEGINS_LIST = np.frombuffer(b"[{\"' \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\xc2\xe1\xe2\xe3", np.uint8)
"""First bytes of a written list, and of white space that may come before it."""
MOST_NAMED = 20  # columns in a line
MOST_SPELLINGS = 1000  # of a run, whose facts stay in memory


def spelling_digests(spellings: Mapping[str, str]) -> list[list[str]]:
    """Digests of (name, spelling) of labellers as JSON types, of the first `MOST_SPELLINGS`."""
    some = islice(spellings.items(), MOST_SPELLINGS)
    return [[blake2b(text.encode(), digest_size=8).hexdigest() for text in (name, spelling)] for spelling, name in some]


def respelled(digests: Iterable[list[list[str]]]) -> int:
    """The number of spellings of labellers beyond one for each; digests: from `spelling_digests`."""
    names, spellings = (set(each) for each in zip(*chain([("", "")], *digests), strict=True))
    return len(spellings) - len(names)


@dataclass(frozen=True)
class Layout:
    """A way to read rows, as the options and the first rows called for; picklable.

    convert: of rows with `chosen`, `rejected` and mostly `prompt`. shape: the name of the shape that rows have before;
    None for that form, or a label column. prompt, system, tools: columns with these. watched: columns that belong to
    the prompt, in any spelling, and must be empty in every row. unread: columns that are not read. csv: of a CSV.
    """

    options: Options
    convert: Converter
    shape: str | None = None
    prompt: str = "prompt"
    system: str | None = None
    tools: str | None = None
    watched: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    csv: bool = False

    @property
    def kind(self) -> bytes:
        """`records.TEXT` or `records.MESSAGES`: the same for all rows."""
        return TEXT if self.convert.__name__.endswith("text") and not (self.system or self.tools) else MESSAGES

    @property
    def wanted(self) -> tuple[str, ...]:
        """All columns that are looked at."""
        return (*self.read, *self.watched)

    @property
    def read(self) -> tuple[str, ...]:
        """All columns that are read."""
        pair = (self.prompt, *(PAIR if self.options.labels is None else (*RESPONSES, *self.options.label_columns)))
        pair = pair if self.shape is None else SHAPES[self.shape].columns
        return tuple(dict.fromkeys((*pair, *filter(None, (self.system, self.tools)), *self.options.beside)))

    @property
    def plain(self) -> Layout:
        """The layout of the rows that `pairs` makes."""
        options = replace(self.options, format=None, label_column=None, labels=None)
        return replace(self, options=options, shape=None, prompt="prompt", watched=())

    @property
    def as_it_stands(self) -> bool:
        """True if rows hold three texts and no other column."""
        plain = self.convert is explicit_text and self.kind == TEXT and self.shape is None
        return plain and self.prompt == "prompt" and not self.unread

    @property
    def form(self) -> str:
        """The form that the rows were taken for, and the columns that are not read, in one line for people."""
        shape = self.shape or " and ".join(PAIR if self.options.labels is None else RESPONSES)
        unread = ", ".join(map(one_line, self.unread[:MOST_NAMED])) + (", ..." if len(self.unread) > MOST_NAMED else "")
        prompt = "" if self.prompt == "prompt" else f", prompt in {self.prompt!r}"
        system = "" if self.system is None else f", a system message in {self.system!r}"
        form = "conversation" if self.system or self.tools else self.convert.__name__.replace("_", " ")
        return f"{shape}, {form}{prompt}{system}; columns not read: {unread or 'none'}"

    @property
    def fast(self) -> bool:
        """True if whole columns of strings can be read."""
        names = {self.options.labeler_column, self.options.event_column}
        plain = set(self.options.beside) <= names and '"' not in "".join(self.options.beside)
        judged = self.shape or self.options.labels or self.kind == MESSAGES or self.prompt != "prompt"
        return self.convert is explicit_text and not self.options.columns and plain and not judged

    def fast_columns(self, table: pa.Table) -> Columns | None:
        """The columns of a table of strings without nulls; None if it is anything else."""
        if any(table.column(name).null_count < len(table) for name in table.schema.names if name not in self.read):
            return None
        arrays: dict[str, pa.Array] = {}
        for name in self.read:
            once = len(table.schema.get_all_field_indices(name)) == 1
            array = _one_array(table.column(name)) if once else None
            if array is None:
                return None
            arrays[name] = array
        if self.options.special_tokens == "error":
            buffers = (arrays[name].buffers()[2] for name in ("prompt", *PAIR))
            if any(holds_marks(buffer.to_pybytes()) for buffer in buffers if buffer is not None):
                return None
        prompt, first, second = (arrays[name] for name in ("prompt", *PAIR))
        if any(map(_has_written_list, (prompt, first, second))):
            return None
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
        filled = LABELER if self.shape is not None and SHAPES[self.shape].labelers else None
        return self.options.labeler_column or filled, self.options.event_column

    def row_columns(self, rows: Iterable[tuple[int, Row]], where: str) -> Columns:
        """The columns of rows read one by one. where: file and unit, for messages. UserError: the first bad row."""
        texts: list[list[Any]] = [[], [], []]
        preferred: list[int] = []
        blank: list[bool] = []
        named: tuple[list[str], list[str]] = ([], [])
        corrects: list[bool] = []
        levels: list[int] = []
        extra: list[str] = []
        encoded = self.kind == MESSAGES
        dropped: Counter[str] = Counter()
        for number, row, (converted, sign) in self.judged_rows(rows, where, dropped):
            with naming(f"{where} {number}"):
                if not sign and self.options.ties == "drop":
                    dropped["ties"] += 1
                    continue
                for values, name in zip(named, self._names, strict=True):
                    if name is not None:
                        values.append(_name_of(row, name, optional=name != self.options.labeler_column))
                if self.options.corrects_column is not None:
                    corrects.append(self._corrects(row, converted))
                if self.options.epsilon_column is not None:
                    levels.append(self.options.level(column_value(row, self.options.epsilon_column, ())))
                if self.options.columns:
                    extra.append(_json_of(row, self.options.columns))
                encodings = [encode_text(text) for text in converted]
            for column, text, data in zip(texts, converted, encodings, strict=True):
                column.append(data if encoded else text)
            preferred.append(sign)
            blank.append(any(map(is_blank, converted)))
        prompt, first, second = (pa.array(column, pa.large_string()) for column in texts)
        columns = Columns(
            prompt, first, second, np.array(preferred, np.int8), self.kind,
            np.array(blank, bool),
            named[0] if self._names[0] else None, named[1] if self._names[1] else None,
            pa.array(extra, pa.large_string()) if self.options.columns else None,
            np.array(corrects, bool) if self.options.corrects_column else None,
            np.array(levels, np.uint8) if self.options.epsilon_column else None,
            dropped=dropped, tie_coins=self.options.ties == "coin",
        )
        return self._folded(columns)

    def judged_rows(
        self, rows: Iterable[tuple[int, Row]], where: str, dropped: Counter[str] | None = None
    ) -> Iterator[tuple[int, Row, tuple[Converted, int]]]:
        """(number, the row with `chosen` and `rejected` in it, ((prompt, first, second), +1 if the first response is
        preferred, -1 if the second is, 0 for a tie)) of every pair of every row. dropped: gets the count of rows that
        nobody has judged. UserError: the first bad row."""
        wanted, read = self.wanted, self.read
        lossy: dict[tuple[str, ...], bool] = {}  # most rows have the columns of the one before
        for number, row in rows:
            with naming(f"{where} {number}", self.renamed):
                if (names := tuple(row)) not in lossy:
                    if fault := two_spellings(names, wanted):
                        raise RowError(fault)
                    lossy[names] = bool(columns_like(names, self.watched, read))
                if lossy[names]:
                    check_lossy([row], read, self.watched)
                found = [(pair, (self._converted(pair), sign)) for pair, sign in self.pairs(row)]
            if dropped is not None and not found:
                dropped["unjudged"] += 1
            yield from ((number, *each) for each in found)

    def _converted(self, pair: Row) -> Converted:
        pair = without_words(pair) if self.csv else pair
        texts: Any = self.convert(pair)
        if self.system or self.tools:
            columns = (pair.get(name or "") for name in (self.system, self.tools))
            texts = framed(texts, *(column if is_filled(column) else None for column in columns))
        self._check(texts, self.options.special_tokens)
        return texts

    def _check(self, texts: Converted, special_tokens: str) -> None:
        transcripts = self.convert.__name__.endswith("dialogue")
        check_texts(texts, self.options.message_keys, special_tokens, transcripts)

    def renamed(self, text: str) -> str:
        """The text of an error with the names that the file's responses have, in place of `chosen` and `rejected`."""
        if self.options.labels is not None:
            for name, own in zip(PAIR, RESPONSES, strict=True):
                text = text.replace(repr(name), repr(own))
        elif self.shape is not None and "chosen" not in SHAPES[self.shape].columns:
            for name in ("'chosen'/'rejected'", "'chosen' and 'rejected'"):
                text = text.replace(name, "the responses")
        return text

    def marked(self, parts: Sequence[Part], fault: MarkedSource) -> UserError:
        """The error of all rows with special tokens. fault: of the first one."""
        kept = replace(self, options=replace(self.options, special_tokens="keep"))
        rows = marked = 0
        for part in parts:
            for *_, (texts, _) in kept.judged_rows(part.rows(self.wanted), f"{part.name}, {part.unit}"):
                rows += 1
                try:
                    self._check(texts, "error")
                except RowError:
                    marked += 1
        return counted(fault, marked, rows)

    def pairs(self, row: Row) -> list[tuple[Row, int]]:
        """The pairs of a row, with `chosen`, `rejected` and (mostly) `prompt`, and what was judged, as above.

        Without a label column or a shape `chosen` is the preferred response.
        """
        options = self.options
        if self.shape is not None:
            names = filter(None, (*options.beside, self.system, self.tools))
            beside = {name: row[name] for name in names if name in row}
            found = []
            for judgement in SHAPES[self.shape].read(row):
                prompt = {} if judgement.prompt is None else {"prompt": judgement.prompt}
                for one, other, sign in pairs(judgement, options):
                    texts = {"chosen": one, "rejected": other, LABELER: judgement.labeler}
                    found.append(({**beside, **prompt, **texts}, sign))
            return found
        sign = 1
        if options.labels is not None:
            sign = options.score([column_value(row, name, self.wanted) for name in options.label_columns])
            if not sign and options.ties is None:
                raise RowError(TIE)
            row = _as_pair(row)
        if self.prompt != "prompt":
            row = {**row, "prompt": column_value(row, self.prompt, self.wanted)}
        return [(row, sign)]

    def _corrects(self, row: Row, converted: Converted) -> bool:
        """True if the row corrects an earlier label. RowError if it names another record, or is no event of its own."""
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


def find_layout(source: str, parts: Sequence[Part], options: Options) -> Layout:
    """Look at the columns and the first rows. UserError: no rows, a column is missing, or rows have no known form."""
    for part in parts:
        number, row = (0, {}) if part.columns else next(iter(part.rows(())), (0, {}))
        if names := part.columns or tuple(row):
            return _layout_of(part, names, parts, options)
        if number:
            raise UserError(f"{part.name}, {part.unit} {number}: holds no column; add the texts, or remove the row")
    raise UserError(f"{source}: holds no rows; give a data set with at least one")


def _layout_of(part: Part, names: tuple[str, ...], parts: Sequence[Part], options: Options) -> Layout:
    shape = shape_of(names, options)
    names = tuple(dict.fromkeys((*names, *chain.from_iterable(each.columns or () for each in parts))))
    layout = Layout(options, explicit_text, shape, csv=part.is_csv)
    needed = SHAPES[shape].needs if shape is not None else layout.wanted[1:]
    for each in parts:
        if each.columns:
            require_columns(each, (*needed, *options.beside), DOOR if shape is None else "")
            if fault := two_spellings(each.columns, layout.wanted):
                raise UserError(f"{each.name}: {fault}")
    beside = (*columns_like(names, (*BESIDE_PROMPT, *LOST)), *chain.from_iterable(_numbered(names, ("",))))
    beside = (*beside, *(name for name in names if name.lower().startswith(ANSWERS)))
    wanted = (*layout.wanted, *PROMPTS, *CONVERSATIONS, *PARTS, *beside, *LOST, "record_id")
    for each in parts:
        first, rows = peek(each.rows(wanted if shape is not None or {*PROMPTS} & {*names} else ()))  # all columns
        for number, _ in first[:1]:
            names = tuple(dict.fromkeys(chain(names, *(row for _, row in first))))
            with naming(f"{each.name}, {each.unit} {number}", layout.renamed):
                return _choose(layout, names, [row for _, row in first], each)
        next(rows, None)  # raises what is wrong with the first row
    raise UserError(f"{part.name}: holds no rows; give a data set with at least one")


def _choose(layout: Layout, names: tuple[str, ...], rows: list[Row], part: Part) -> Layout:
    """The layout with what the first rows of a part show. RowError: they do not fit."""
    options, first, by_columns = layout.options, rows[0], layout.shape is None
    if fault := two_spellings(first, layout.wanted):
        raise RowError(fault)
    pair = PAIR if options.labels is None else RESPONSES
    if by_columns:
        if any(name not in first for name in pair):
            check_pair(first if options.labels is None else _as_pair(first), DOOR)
        _refuse_names(rows, names, options)
        layout = _with_prompt(layout, names, rows, pair)
        lists = [first[name] for name in pair if isinstance(first[name], list)] if options.labels is None else []
        if any(each and all(isinstance(text, str) for text in each) for each in lists):
            layout = replace(layout, shape="several")
    lost = BESIDE_PROMPT if {*PAIR} <= {*layout.read} else (*BESIDE_PROMPT, *FLAGS)
    check_lossy(rows, layout.read, lost)
    samples: list[Row] = []
    asked: list[tuple[Row, Any]] = []
    for place, row in enumerate(rows):
        try:
            found = [pair for pair, _ in layout.pairs(row)]
        except RowError:
            if not place:
                raise
            continue
        samples += found
        asked += [(row, pair.get("prompt")) for pair in found[:1]]
    if not samples:
        raise RowError(
            "holds no judgement that was given, nor do the rows after it: a ranking, left or right, or the name of a"
            " response's field; give rows with one"
        )
    converter = pair_converter(samples)
    few = by_columns and _have_few_prompts(asked, pair)
    others = [name for name in names if name not in layout.read] if few or converter is implicit_text else []
    whole = [row for _, row in peek(part.rows(()))[0]] if others else []  # with all columns
    if hidden := [name for name in others if _may_be_prompt(name, whole, pair)]:
        lack, remedy = "no column 'prompt'", "name the column of the prompt 'prompt'"
        lack, remedy = ("few different prompts", "put them into the prompts") if few else (lack, remedy)
        raise RowError(f"has {lack}, and the texts in {hidden[0]!r} may be prompts; {remedy}, or remove this one")
    verdicts = (name for name in names if name.lower() in VERDICT_COLUMNS)
    judged = [name for name in verdicts if all(verdict(row.get(name)) is not None for row in rows)]
    beside = (*lost, *judged, *(layout.watched if by_columns else _outside(asked)))
    watched = dict.fromkeys((*beside, *columns_like(names, beside)))
    layout = replace(layout, watched=tuple(name for name in watched if name not in layout.read))
    unread = sorted(set(names) - {*layout.wanted, "record_id"})
    layout = replace(layout, convert=converter, unread=tuple(unread))
    _refuse_released(layout, first)
    return layout


def _refuse_names(rows: Sequence[Row], names: Sequence[str], options: Options) -> None:
    """RowError for names in the place of texts in `chosen` and `rejected`, and for labels that name a row's models."""
    if options.labels is None:
        if all(_are_names(row, names) for row in rows):
            remedy = "put the texts there, or, if these are the answers, remove the columns that they seem to name"
            raise RowError(f"holds names of columns or models in 'chosen' and 'rejected'; {remedy}")
        return
    means = meaning(options.labels)
    for models in _numbered(names, MODELS):
        meant = [[means.get(letter(row.get(name))) for name in models] for row in rows]
        if not any(None in each for each in meant) and any(each != [1, -1] for each in meant):
            declared = f"declares models by {options.key('labels')}, and these change places"
            raise RowError(f"{declared}; write in the label which response it prefers")


def _are_names(row: Row, names: Sequence[str]) -> bool:
    """True for two responses that are the row's models, or ends of names of columns: b and a, of output_a, output_b;
    or that are short beside two longer texts in such columns or in a list, which the prompt does not hold."""
    one, other = (str(row.get(name)).strip().lower() for name in PAIR)
    models = ({str(row.get(name)).strip().lower() for name in pair} for pair in _numbered(names, MODELS))
    lower = {name.lower() for name in names}
    ends = any(name.endswith(one) and name.removesuffix(one) + other in lower for name in lower)
    longest, prompt = max(len(one), len(other)), words(" ".join(str(row.get(name)) for name in PROMPTS))
    listed = (row.get(name) for name in names if name.lower().startswith(ANSWERS))
    columns = ([row.get(name) for name in pair] for pair in _numbered(names, ANSWERS + LETTERS))
    pairs = (pair[:2] for pair in (*listed, *columns) if isinstance(pair, list) and len(pair) > 1)
    texts = (list(map(words, map(str, pair))) for pair in pairs)
    longer = any(len(text) > longest and len(second) > longest and text not in prompt for text, second in texts)
    return one != other and (ends or (longer and longest <= LONGEST_NAME) or {one, other} in models)


def _numbered(names: Sequence[str], starts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Two columns each, whose names differ at the end: output_a and output_b."""
    columns = {name.lower(): name for name in names if name.lower().startswith(starts)}
    pairs = ((name.removesuffix(one) + two, name) for one, two in ENDS for name in columns if name.endswith(one))
    return [(columns[name], columns[other]) for other, name in pairs if other in columns]


def _with_prompt(layout: Layout, names: tuple[str, ...], rows: list[Row], pair: tuple[str, str]) -> Layout:
    """The layout with the columns of the prompt and of a system message, where responses do not hold them."""
    beside = layout.options.beside
    systems = [name for name in SYSTEMS if name in names and name not in beside]
    tools = "tools" if "tools" in names and "tools" in layout.options.message_keys else None
    layout = replace(layout, system=(*systems, None)[0], tools=tools)
    responses = [rows[0].get(name) for name in pair]
    answers = any(map(_answers_only, responses))
    if not answers and all(isinstance(each, str) == is_written_list(each) for each in responses):
        return layout
    known = ("prompt",) if "prompt" in names else PROMPTS
    candidates = [name for name in known if name in names and name not in beside]
    if answers and not candidates:
        candidates = [name for name in CONVERSATIONS if name in names and name not in beside]
        if not candidates:
            raise RowError("holds answers without a prompt; name the column of the prompt 'prompt'")
    prompts = [name for name in candidates if any(is_filled(row.get(name)) for row in rows)] or candidates[:1]
    if len(prompts) > 1:
        listed = ", ".join(map(repr, prompts))
        raise RowError(f"has the columns {listed}, each of which may hold the prompt; name one of them 'prompt'")
    layout = replace(layout, prompt=(*prompts, "prompt")[0])
    others = (*(PROMPTS if known != ("prompt",) else ()), *_outside([(row, row.get(layout.prompt)) for row in rows]))
    return replace(layout, watched=tuple(name for name in others if name not in layout.read))


def _outside(asked: Sequence[tuple[Row, Any]]) -> tuple[str, ...]:
    """Names of `PROMPTS`, `CONVERSATIONS` and `PARTS` but for columns with texts or turns of a user, all of which the
    prompts hold, or beside messages. asked: rows with their prompts."""
    talks = any(not isinstance(prompt, str) or is_written_list(prompt) for _, prompt in asked)

    def is_inside(name: str) -> bool:
        texts = [(words(text), prompt) for row, prompt in asked for text in asked_in(row.get(name))]
        return any(text for text, _ in texts) and (talks or all(text in words(prompt) for text, prompt in texts))

    return tuple(name for name in PROMPTS + CONVERSATIONS + PARTS if not is_inside(name))


def _may_be_prompt(name: str, rows: Sequence[Row], pair: tuple[str, str]) -> bool:
    """True for a column of different texts of several words that not both responses hold."""
    texts = [words(str(row.get(name))) for row in rows]
    several = sum(len(text.split()) > 2 or not text.isascii() for text in texts)
    held = sum(all(text in words(str(row.get(each))) for each in pair) for text, row in zip(texts, rows, strict=True))
    return several >= SHARE * len(rows) > 2 * held and 2 * len({*texts}) > len(rows)


def _have_few_prompts(asked: Sequence[tuple[Row, Any]], pair: tuple[str, str]) -> bool:
    """True if most rows share their prompt with nine others, and not their responses, as copies of a question do."""
    prompts = {str(prompt) for _, prompt in asked if prompt}
    answers = {str(sorted(str(row.get(name)) for name in pair)) for row, _ in asked}
    rows = len(asked)
    return rows >= LEAST_PROMPTS and SHARE * rows <= rows - len(prompts) < rows < 2 * len(answers)


def _answers_only(response: Any) -> bool:
    """True for messages that begin with the assistant's: the prompt is elsewhere."""
    with suppress(RowError, IndexError):
        return read_messages(response, "")[0]["role"] == "assistant"
    return False


def read_preferences(source: str | Path, split: str | None = None, options: Options | None = None) -> Iterator[RawPair]:
    """Stream the raw preference pairs of a source: the true labels, so call it where those may be read. Of a tie the
    first response counts as chosen. UserError: no such source or split, a missing column, a row that does not fit, or
    no rows at all."""
    return (pair for pair, _ in read_rows(source, split, options))


def read_rows(source: str | Path, split: str | None, options: Options | None) -> Iterator[tuple[RawPair, Row]]:
    """The pairs of `read_preferences`, each with its row."""
    parts = open_source(source, split)
    layout = find_layout(str(source), parts, options or Options(ties="coin", special_tokens="keep"))

    def stream() -> Iterator[tuple[RawPair, Row]]:
        try:
            for part in parts:
                for number, row, ((prompt, *responses), sign) in layout.judged_rows(
                    part.rows(layout.wanted), f"{part.name}, {part.unit}"
                ):
                    chosen, rejected = responses if sign >= 0 else responses[::-1]
                    yield RawPair(prompt, chosen, rejected, number), row
        except MarkedSource as fault:
            raise layout.marked(parts, fault) from None

    return stream()


def _refuse_released(layout: Layout, row: Row) -> None:
    """RowError for a row of a release, which names its pair as only a release does."""
    for pair, _ in layout.pairs(row)[:1] if isinstance(row.get("record_id"), str) else ():
        prompt, *responses = layout.convert(pair)
        with suppress(ValueError):  # two equal responses, or half a character: nothing that was ever released
            if record_id(prompt, responses) == row["record_id"]:
                raise RowError("is a row of a release, whose label is private already; give the raw preferences")


def _as_pair(row: Row) -> Row:
    names = dict(zip(RESPONSES, PAIR, strict=True))
    return {names.get(name, name): value for name, value in row.items() if name not in PAIR}


def _name_of(row: Row, name: str, optional: bool = True) -> str:
    """A labeller, event or record: text or a whole number; "" for none (an empty text; null but for a labeller)."""
    if optional and row.get(name, "") is None:
        return ""
    value = column_value(row, name, ())
    if isinstance(value, bool) or not isinstance(value, str | int):
        what = "the labeller" if name == LABELER else f"column {name!r}"
        raise RowError(f"{what} is neither text nor a whole number; convert it")
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


def _has_written_list(texts: pa.Array) -> bool:
    """True if one of the texts is a list of messages, see `is_written_list`."""
    if not len(places := np.flatnonzero(np.isin(edge_bytes(texts)[0], _BEGINS_LIST))):
        return False
    candidates = texts.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)]))  # no pandas
    trimmed = pc.utf8_ltrim_whitespace(candidates)
    rows = pc.indices_nonzero(pc.match_substring_regex(trimmed, r"""^["']?[\[{]"""))
    return any(is_written_list(candidates[row].as_py()) for row in rows.to_pylist())


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
