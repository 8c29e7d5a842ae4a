"""Meanings of the rows of a source: preference pairs, demonstrations, prompts.

Preferences (the form is decided by the first rows, the same for all rows):
- text: `prompt`, `chosen`, `rejected`; a prompt that nine in ten of the first rows repeat at the head of both responses
  is cut there, and must then be in every row;
- conversations: message lists, with the prompt in a column or as what both begin with. Where they part, both must go on
  with the assistant;
- transcripts ("Human: ... Assistant: ..."): the prompt ends with the last "Assistant:" that both share;
- implicit text (TRL's): the prompt is the common prefix, if `implicit_rule` finds that they share one.

Named shapes and label columns become such rows first (`layout`, `shapes`). Neither what is accepted nor what is said
about it depends on which of the two responses is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.data.conversation import (
    ASSISTANT,
    MarkedTexts,
    RowError,
    check_texts,
    check_turns,
    common,
    cut_prompt,
    framed,
    is_nearly_transcript,
    is_transcript,
    is_written_list,
    of_both,
    read_messages,
    transcript,
    transcript_turns,
)
from private_rlhf.data.declared_columns import (
    BESIDE_PROMPT,
    CONVERSATIONS,
    LOST,
    MISSING,
    PAIR,
    PARTS,
    PROMPTS,
    SYSTEMS,
    VERDICT_COLUMNS,
    Options,
    column_value,
    is_filled,
    letter,
    nearest,
    verdict,
    without_words,
)
from private_rlhf.data.render import Demonstration
from private_rlhf.data.sources import Part, Row, open_source
from private_rlhf.privacy.records import Message, Text, encode_text, fold_name, is_blank

FIRST_ROWS = 200
"""By which a form is chosen."""
SHARE = 0.9
"""Of the first rows, from which on a form is taken as theirs."""
SHORTEST_PROMPT = 8
"""Characters that two texts must share for them to share a prompt."""
SHORT_PROMPTS = 10
"""Different shorter ones by which it is judged whether responses repeat them, where no prompt is longer."""
_BOUNDARY = re.compile(r"""(?:\n\s*|[:?!.;>\])}"'`*|#=…。？！：]\s*)$""")
NEARLY = (
    "begins or ends like a transcript, in a form that is not read: each turn begins with 'Human:' (or 'User:',"
    " 'System:') or 'Assistant:' after an empty line, and a prompt ends with 'Assistant:'; convert it"
)
ONE_SIDED = "repeats the prompt at the start of one response only; take it out of it, or repeat it in both"
_ASKED = PROMPTS + CONVERSATIONS + PARTS
_WHERE = "one of 'chosen'/'rejected'"


def read_demonstrations(
    source: str | Path, split: str | None = None, options: Options | None = None
) -> Iterator[Demonstration]:
    """Stream demonstrations: `prompt` and `response`, TRL's `prompt` and `completion`, or `messages`. options: of
    message keys and special tokens.

    Preference data is refused with a UserError: fine-tuning on the preferred answers would put the true labels into
    the model.
    """
    wanted = ("prompt", "response", "completion", "messages", "label", *PAIR)
    texts = _stream(source, open_source(source, split), wanted, _demonstration_converter, options or Options())
    return map(Demonstration._make, texts)


def read_prompts(source: str | Path, split: str | None = None, options: Options | None = None) -> Iterator[Text]:
    """Prompts, each once: from a `prompt` column, from `messages`, or from preference rows (raw or released). options:
    as of `read_demonstrations`.

    Prompts of preference rows come in an order of their own (by hash), since the order of such rows may tell their
    labels.
    """
    wanted = ("prompt", "messages", *PAIR)
    parts = open_source(source, split, release=True)
    from_pairs = [False]

    def choose(rows: Sequence[Row]) -> TextConverter:
        if set(PAIR) & rows[0].keys():
            from_pairs[0] = True
            convert = pair_converter(rows)
            return lambda row: convert(row)[:1]
        return _prompt_converter(rows)

    def distinct() -> Iterator[Text]:
        seen: dict[bytes, Text | None] = {}
        for (prompt,) in _stream(source, parts, wanted, choose, options or Options()):
            digest = sha256(encode_text(prompt)).digest()
            if digest in seen or is_blank(prompt):
                continue
            seen[digest] = prompt if from_pairs[0] else None
            if not from_pairs[0]:
                yield prompt
        if not seen:
            raise UserError(f"{source}: holds no prompt with text in it; check the `prompt` column")
        yield from (prompt for _, prompt in sorted(seen.items()) if prompt is not None)

    return distinct()


def peek(rows: Iterator[tuple[int, Row]]) -> tuple[list[tuple[int, Row]], Iterator[tuple[int, Row]]]:
    """(The first rows, all rows); an error among the first ones is raised where it stands."""
    first: list[tuple[int, Row]] = []
    fault: list[UserError] = []
    try:
        first.extend(islice(rows, FIRST_ROWS))
    except UserError as error:
        fault.append(error)

    def everything() -> Iterator[tuple[int, Row]]:
        yield from first
        if fault:
            raise fault[0]
        yield from rows

    return first, everything()


class MarkedSource(UserError):
    """The error of one row with special tokens, before all such rows are counted."""


@contextmanager
def naming(where: str, renamed: Callable[[str], str] = str) -> Iterator[None]:
    """Errors of rows as UserErrors that name the row. renamed: gives their texts the names that the file has."""
    try:
        yield
    except RowError as error:
        kind = MarkedSource if isinstance(error, MarkedTexts) else UserError
        raise kind(f"{where}: {renamed(str(error))}") from None
    except UnicodeEncodeError:
        fault = "holds a lone surrogate, which is not valid Unicode; repair or remove the row"
        raise UserError(f"{where}: {fault}") from None


def _stream(
    source: str | Path,
    parts: list[Part],
    wanted: Sequence[str],
    choose: Callable[[Sequence[Row]], TextConverter],
    options: Options,
) -> Iterator[tuple[Text, ...]]:
    """Convert every row with the converter that `choose` picks for the first ones."""
    convert: TextConverter | None = None
    faults: list[MarkedSource] = []
    rows = 0
    for part in parts:
        first, stream = peek(part.rows((*wanted, *_ASKED, *BESIDE_PROMPT)))
        for number, given in stream:
            rows, row = rows + 1, without_words(given) if part.is_csv else given
            try:
                with naming(f"{part.name}, {part.unit} {number}"):
                    convert = convert or choose([each for _, each in first])
                    texts = _with_columns(convert(row), row, options)
                    check_texts(texts, options.message_keys, options.special_tokens)
            except MarkedSource as fault:
                faults.append(fault)
            if not faults:
                yield texts
    if convert is None:
        raise UserError(f"{source}: holds no rows; give a data set with at least one")
    if faults:
        raise counted(faults[0], len(faults), rows)


def counted(fault: MarkedSource, count: int, rows: int) -> UserError:
    """The error of the first row with special tokens, with the number of such rows among all."""
    return UserError(f"{fault} ({count} of {rows} rows do)")


def _with_columns(texts: tuple[Text, ...], row: Row, options: Options) -> tuple[Text, ...]:
    """The texts with the system message and the tools of the row's columns."""
    check_lossy([row], (*SYSTEMS, *options.message_keys), BESIDE_PROMPT)
    if isinstance(texts[0], str) and len(row.keys() & {*_ASKED}) > 1:
        prompt = words(texts[0])
        asked = {name: asked_in(row.get(name)) for name in _ASKED}
        if len(texts) == 1:  # later turns of its conversation do not belong to a prompt
            asked |= {name: asked[name][:1] for name in CONVERSATIONS}
        held = (name for name, said in asked.items() if said and all(words(text) in prompt for text in said))
        check_lossy([row], tuple(held), _ASKED)
    system = next((row[name] for name in SYSTEMS if is_filled(row.get(name))), None)
    tools = row.get("tools")
    return framed(texts, system, tools) if system or tools else texts


def asked_in(value: Any) -> list[str]:
    """The texts of the user in a cell: a text, texts, or messages."""
    with suppress(RowError):
        if isinstance(value, list) or is_written_list(value):
            return [message["content"] for message in read_messages(value, "") if message["role"] == "user"]
    value = list(value.values()) if isinstance(value, dict) else value
    return list(map(str, value)) if isinstance(value, list) else [str(value or "")]


def columns_like(columns: Collection[str], names: Collection[str], read: Collection[str] = ()) -> list[str]:
    """The columns that are one of the names in some spelling, but for those that are read."""
    folded = {fold_name(name) for name in names}
    spelt = ((column, fold_name(column).replace(" ", "_")) for column in sorted(columns) if column not in read)
    return [column for column, name in spelt if name in folded]


_columns_like = lru_cache(maxsize=64)(columns_like)  # most rows have the columns of the one before


def check_lossy(rows: Sequence[Mapping[str, Any]], read: tuple[str, ...], names: tuple[str, ...]) -> None:
    """RowError for one of the columns, which belong to the prompt or to the label, that is not empty and not read."""
    filled = (name for row in rows for name in _columns_like(tuple(row), names, read) if is_filled(row[name])
              and (name.lower() not in VERDICT_COLUMNS or verdict(row[name]) is False))  # fmt: skip
    if name := min(filled, default=None):
        usual = "belongs to the prompt and is not read; put it into the prompt, or remove it"
        raise RowError(f"has the column {name!r}, which {LOST.get(name.lower(), usual)}")


def _string(row: Row, name: str, known: Sequence[str] = ()) -> str:
    value = column_value(row, name, known)
    if not isinstance(value, str):
        raise RowError(f"column {name!r} is not text, as it is in the first row; convert it")
    return value


def require_columns(part: Part, needed: Sequence[str], door: str = "") -> None:
    """UserError, with the nearest names and `door`, if a part that knows its columns lacks one."""
    present = part.columns or ()
    missing = [name for name in needed if name not in present]
    if missing:
        names = " and ".join(map(repr, missing))
        hint = nearest(missing, present, needed)
        found = ", ".join(present)
        raise UserError(f"{part.name}: has no column {names}{hint}; rename or add it (found: {found}){door}")


# ---------------------------------------------------------------- preference pairs

Converted = tuple[Text, Text, Text]
Converter = Callable[[Row], Converted]
TextConverter = Callable[[Row], tuple[Text, ...]]


def check_pair(row: Row, door: str = "") -> None:
    """Say what is wrong with `chosen` and `rejected`, in words that are the same when the two change places."""
    values = [row.get(name) for name in PAIR]
    if any(name not in row for name in PAIR):
        inside = (value[0] if isinstance(value, list) and value else value for value in row.values())
        if any(isinstance(value, dict) and {*PAIR} <= value.keys() for value in inside):
            raise RowError("holds rows inside of a column; write each of them as a row of its own")
        hint = nearest(PAIR, row, ("prompt", *PAIR))
        raise RowError(f"lacks one of 'chosen'/'rejected'{hint}; add it, or remove the row{door}")
    if any(value is None for value in values):
        raise RowError("one of 'chosen'/'rejected' is null; fill it in, or remove the row")
    if not all(isinstance(value, str | list | dict) for value in values):
        raise RowError("one of 'chosen'/'rejected' is neither text nor a list of messages; convert it")
    if any(isinstance(value, dict) and value and all(map(str.isdecimal, value)) for value in values):
        raise RowError("holds the columns of a table; write its rows (in pandas to_json with orient='records')")
    if isinstance(values[0], str) != isinstance(values[1], str):
        raise RowError("one of 'chosen'/'rejected' is text and the other a list of messages; use one form for both")


def pair_converter(rows: Sequence[Row]) -> Converter:
    """The converter for the form of these first rows: a row to (prompt, chosen, rejected), RowError if it does not fit.

    RowError: the first row is faulty, or the rows have no form.
    """
    first = rows[0]
    check_pair(first)
    prompt = first.get("prompt", "")
    if prompt is None:
        raise RowError("column 'prompt' is null; fill it in, or remove the column")
    if not isinstance(first.get("prompt", ""), str | list | dict):
        raise RowError("column 'prompt' is neither text nor a list of messages; convert it")
    values = (prompt, *(first[name] for name in PAIR))
    if any(not isinstance(value, str) or is_written_list(value) for value in values):
        _refuse_transcripts(rows)
        return conversation
    texts = [row for row in rows if all(isinstance(row.get(name), str) for name in PAIR)]
    texts = [row for row in texts if row["chosen"] != row["rejected"]]
    if "prompt" not in first:
        if all(is_transcript(first[name]) and ASSISTANT in transcript(first[name]) for name in PAIR):
            return dialogue
        implicit_rule(texts)
        return implicit_text
    if is_transcript(prompt) and _ends_before_answer(prompt, [first[name] for name in PAIR]):
        return prompted_dialogue
    marked = [[is_nearly_transcript(str(row.get(name))) for name in ("prompt", *PAIR)] for row in rows]
    if sum(prompt or (one and other) for prompt, one, other in marked) >= SHARE * len(rows):
        raise RowError(NEARLY)
    asking = [row for row in texts if isinstance(row.get("prompt"), str) and row["prompt"].strip()]
    long = [row for row in asking if len(row["prompt"].strip()) >= SHORTEST_PROMPT]
    texts = asking if not long and len({row["prompt"] for row in asking}) >= SHORT_PROMPTS else long
    starts = [[row[name].startswith(row["prompt"]) for name in PAIR] for row in texts]
    repeated = sum(map(all, starts))
    inside = sum(all(words(row["prompt"]) in words(row[name]) for name in PAIR) for row in long)
    if 2 * sum(one != other for one, other in starts) > len(texts):
        raise RowError(ONE_SIDED)
    if texts and repeated >= SHARE * len(texts):
        return repeated_text
    if inside > (1 - SHARE) * len(long):
        raise RowError(
            f"of the first {len(long)} rows {inside} hold their prompt in both responses, and {repeated} of them"
            " exactly at the start; repeat it at the start of all responses, where it is cut, or take it out of them"
        )
    return explicit_text


def _refuse_transcripts(rows: Sequence[Row]) -> None:
    """RowError for transcripts in the place of prompts."""
    prompts = (row["prompt"] for row in rows if isinstance(row.get("prompt"), str))
    if sum(map(is_nearly_transcript, prompts)) >= SHARE * len(rows):
        raise RowError(NEARLY)


def words(text: str) -> str:
    """The text with single spaces between words."""
    return " ".join(text.split())


def _ends_before_answer(prompt: str, responses: Sequence[str]) -> bool:
    """True if the mark of the answer ends the prompt, or begins the responses."""
    ends = transcript(prompt).rstrip().endswith(ASSISTANT)
    return ends or all(transcript(response).startswith(ASSISTANT) for response in responses)


def implicit_rule(texts: Sequence[Row]) -> None:
    """RowError unless two different texts in a row share what may be a prompt: nine in ten of the rows share
    `SHORTEST_PROMPT` characters, and half of them part after a line break, a mark of punctuation or a bracket.

    Answers that begin alike move the cut into them, as in TRL; that may be so in up to half of the rows.
    """
    starts = [row["chosen"][: common(row["chosen"], row["rejected"])] for row in texts]
    if any(map(is_nearly_transcript, starts[:1])):
        raise RowError(NEARLY)
    long = sum(len(start.strip()) >= SHORTEST_PROMPT for start in starts)
    parted = sum(_BOUNDARY.search(start) is not None for start in starts)
    if starts and (long < SHARE * len(starts) or 2 * parted < len(starts)):
        raise RowError(
            f"has no column 'prompt', and 'chosen' and 'rejected' share no prompt: of the first {len(starts)} rows"
            f" {long} begin alike for {SHORTEST_PROMPT} characters and {parted} part after a line break or punctuation;"
            " name the column of the prompt 'prompt'"
        )


def explicit_text(row: Row) -> Converted:
    """The format of three strings; the one that whole columns can be read in."""
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if not type(prompt) is type(chosen) is type(rejected) is str:
        chosen, rejected = _pair_text(row)
        prompt = _string(row, "prompt", ("prompt", *PAIR))
    if any(map(is_written_list, (prompt, chosen, rejected))):
        raise RowError("holds a list of messages as text, but plain text in the first row; use one form for all rows")
    return prompt, chosen, rejected


def repeated_text(row: Row) -> Converted:
    """Three strings, of which the two responses begin with the prompt."""
    prompt, chosen, rejected = map(str, explicit_text(row))
    if not all(response.startswith(prompt) for response in (chosen, rejected)):
        raise RowError("does not repeat the prompt in both responses, as the first rows do; use one form for all rows")
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _pair_text(row: Row, whole: bool = False) -> tuple[str, str]:
    """The two texts. whole: they hold the prompt, which then stands nowhere else."""
    check_pair(row)
    if whole and is_filled(row.get("prompt")):
        raise RowError("has text in column 'prompt', which the first row does not have; use one form for all rows")
    if not isinstance(row["chosen"], str):
        raise RowError(
            "'chosen' and 'rejected' are lists of messages, but text in the first row; use one form for all rows"
        )
    return row["chosen"], row["rejected"]


def conversation(row: Row) -> Converted:
    """Message lists; with a list as prompt also one text or one message as response."""
    check_pair(row)
    prompt = column_value(row, "prompt", ("prompt", *PAIR)) if "prompt" in row else None
    sides = [row[name] for name in PAIR]
    listed = prompt is not None and (not isinstance(prompt, str) or is_written_list(prompt))
    if isinstance(sides[0], str) and not all(map(is_written_list, sides)):
        if not listed:
            raise RowError(
                "'chosen' and 'rejected' are text, but lists of messages in the first row; use one form for all rows"
            )
        sides = [[{"role": "assistant", "content": text}] for text in sides]
    context = read_messages(prompt, "column 'prompt'") if listed else []
    chosen, rejected = of_both(lambda side: read_messages(side, _WHERE), sides)
    if listed:
        if all(side[: len(context)] == context for side in (chosen, rejected)):
            chosen, rejected = chosen[len(context) :], rejected[len(context) :]
        _check_prompt(context)
    else:
        cut = cut_prompt(chosen, rejected)
        asked = [message["content"].strip() for message in chosen[:cut] if message["role"] == "user"]
        context, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
        if prompt is not None and not context and chosen != rejected:
            context = [{"role": "user", "content": str(prompt)}]
        elif prompt is not None and str(prompt).strip() not in ("", *asked):
            raise RowError("column 'prompt' is not a user message that 'chosen' and 'rejected' share; repair the row")
    check_turns(context, (chosen, rejected), _WHERE)
    return context, chosen, rejected


def implicit_text(row: Row) -> Converted:
    """As TRL: the common prefix, less one trailing space, which then begins both responses."""
    chosen, rejected = _pair_text(row, whole=True)
    shared = common(chosen, rejected)
    if shared and chosen[shared - 1] == " " and shared < max(len(chosen), len(rejected)):
        shared -= 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def dialogue(row: Row) -> Converted:
    """Two transcripts."""
    chosen, rejected = _pair_text(row, whole=True)
    if not (is_transcript(chosen) and is_transcript(rejected)):
        raise RowError(
            "one of 'chosen'/'rejected' does not begin with \"\\n\\nHuman:\" (or User, System) as in the first row;"
            " repair it"
        )
    chosen, rejected = transcript(chosen), transcript(rejected)
    cut = chosen[: common(chosen, rejected)].rfind(ASSISTANT)
    if cut < 0:  # no shared prompt: an empty prompt, which is dropped and counted like any other
        return [], transcript_turns(chosen, chosen), transcript_turns(rejected, rejected)
    prompt, *sides = (transcript_turns(piece, chosen) for piece in (chosen[:cut], chosen[cut:], rejected[cut:]))
    check_turns(prompt, sides, _WHERE)
    return prompt, sides[0], sides[1]


def prompted_dialogue(row: Row) -> Converted:
    """A transcript that ends with "Assistant:" as prompt, or responses that begin so."""
    prompt, *sides = map(str, explicit_text(row))
    head = transcript(prompt).rstrip()
    if not (is_transcript(prompt) and _ends_before_answer(prompt, sides)):
        raise RowError("column 'prompt' is not a transcript that ends with 'Assistant:', as in the first row; repair")
    if head.endswith(ASSISTANT):
        repeated = [transcript(side).startswith(head) for side in sides]
        if len(set(repeated)) > 1:
            raise RowError(ONE_SIDED)
        sides = [ASSISTANT + (transcript(side)[len(head) :] if all(repeated) else side) for side in sides]
    chosen, rejected = (transcript_turns(transcript(side), head) for side in sides)
    context = transcript_turns(head.removesuffix(ASSISTANT), head)
    check_turns(context, (chosen, rejected), _WHERE)
    return context, chosen, rejected


# ---------------------------------------------------------------- demonstrations and prompts


def _demonstration_converter(rows: Sequence[Row]) -> TextConverter:
    row = rows[0]
    if set(PAIR) & row.keys():
        raise RowError(
            "holds preference pairs ('chosen'/'rejected'), and tuning on preferred answers would reveal the labels;"
            " give demonstrations with 'prompt' and 'response' columns"
        )
    labels = {letter(row.get("label")) for row in rows} - {"", *MISSING}
    if labels and labels <= {"true", "false", "0", "1"}:
        raise RowError("holds responses with a label each (KTO); keep the accepted ones, and remove the column 'label'")
    if "messages" in row and "prompt" not in row:
        return _from_messages
    _refuse_transcripts(rows)
    for name in ("response", "completion"):
        if name in row and "prompt" in row:
            return lambda row: _from_columns(row, name)
    known = ("prompt", "response", "completion", "messages")
    hint = nearest(set(known) - row.keys(), row, known)
    raise RowError(f"needs 'prompt' and 'response' (or 'completion') columns, or 'messages'{hint}; rename or add them")


def _from_columns(row: Row, name: str) -> tuple[Text, ...]:
    prompt, response = (column_value(row, each, ("prompt", name)) for each in ("prompt", name))
    if isinstance(prompt, str) and not is_written_list(prompt):
        if not isinstance(response, str) or is_written_list(response):
            raise RowError(f"column {name!r} is not text, as 'prompt' is; write both as text, or both as messages")
    else:
        prompt, response = _check_prompt(_messages(row, "prompt")), _messages(row, name)
        if {message["role"] for message in (*response[:1], *response[-1:])} - {"assistant"}:
            raise RowError(f"column {name!r} does not begin and end with an assistant message; repair the row")
    if is_blank(response):
        raise RowError(f"column {name!r} is empty; fill it in, or remove the row")
    return prompt, response


def _from_messages(row: Row) -> tuple[Text, ...]:
    messages = _messages(row, "messages")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(
            "column 'messages' does not end with an assistant message after a prompt; repair or remove the row"
        )
    return messages[:-1], messages[-1:]


def _messages(row: Row, name: str) -> list[Message]:
    return read_messages(column_value(row, name, (name,)), f"column {name!r}")


def _check_prompt(prompt: list[Message]) -> list[Message]:
    if prompt and prompt[-1]["role"] not in ("user", "tool"):
        raise RowError("column 'prompt' does not end with a user message, and answers are not continued; repair it")
    return prompt


def _prompt_converter(rows: Sequence[Row]) -> TextConverter:
    row = rows[0]
    if "prompt" in row:
        _refuse_transcripts(rows)
        listed = isinstance(row["prompt"], list | dict) or is_written_list(row["prompt"])
        return lambda row: (_check_prompt(_messages(row, "prompt")) if listed else _string(row, "prompt"),)
    if "messages" in row:
        return lambda row: (_prompt_of(_messages(row, "messages")),)
    hint = nearest(("prompt", "messages"), row, ("prompt", "messages"))
    raise RowError(f"has no column 'prompt' or 'messages'{hint}; rename or add it")


def _prompt_of(messages: list[Message]) -> list[Message]:
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
