"""What the rows of a source mean: preference pairs, demonstrations, prompts, in every format people bring.

Preferences (kind decided by the first row, the same for all rows):
- explicit: `prompt`, `chosen`, `rejected` as strings, or all three as message lists (TRL's explicit formats);
- implicit: `chosen` and `rejected` hold the prompt as their common prefix, as strings or as message lists (TRL's
  implicit formats); also message lists beside a prompt string, which then only repeats the first message;
- dialogue: Anthropic's files, "\\n\\nHuman: ... \\n\\nAssistant: ..." in `chosen` and `rejected`; the prompt ends
  with the last "\\n\\nAssistant:" inside the common prefix, and everything becomes messages.

Every other column is dropped (a `score` column tells the label). Prompts are computed from the two responses alike,
and no message says *which* of the two is at fault: whether a row is accepted, and what is said about it, does not
depend on its label.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from private_rlhf.core.errors import UserError
from private_rlhf.data.sources import Part, Row, open_source
from private_rlhf.privacy.records import Message, RawPair, Text, encode_text, is_blank

T = TypeVar("T")
PAIR = ("chosen", "rejected")
MOST_COMPARED = 100
"""Columns among which the nearest to a missing one is looked for."""
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ASSISTANT = "\n\nAssistant:"
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Demonstration(NamedTuple):
    """One example for supervised fine-tuning: strings, or message lists (prompt, then what the assistant says)."""

    prompt: Text
    response: Text


class RowError(Exception):
    """What is wrong with one row; whoever reads the rows adds the file and the row number."""


def read_preferences(source: str | Path, split: str | None = None) -> Iterator[RawPair]:
    """Stream the raw preference pairs of a source: the true labels, so call it where those may be read.

    UserError: no such source or split, a missing column, a row that does not fit, or no rows at all.
    """
    parts = open_source(source, split)
    for part in parts:
        if part.columns:  # an empty file is reported as such below
            require_columns(part, PAIR)
    stream = _stream(source, parts, ("prompt", *PAIR), pair_converter)
    return (RawPair(prompt, chosen, rejected, row) for row, (prompt, chosen, rejected) in stream)


def read_demonstrations(source: str | Path, split: str | None = None) -> Iterator[Demonstration]:
    """Stream demonstrations: `prompt` and `response`, TRL's `prompt` and `completion`, or `messages`.

    Preference data is refused with a UserError: fine-tuning on the preferred answers would put the true labels into
    the model.
    """
    wanted = ("prompt", "response", "completion", "messages", *PAIR)
    stream = _stream(source, open_source(source, split), wanted, _demonstration_converter)
    return (demonstration for _, demonstration in stream)


def read_prompts(source: str | Path, split: str | None = None) -> Iterator[Text]:
    """Prompts, each once: from a `prompt` column, from `messages`, or from preference rows (raw or released).

    Prompts of preference rows come in an order of their own (by hash), since the order of such rows may tell their
    labels.
    """
    wanted = ("prompt", "messages", *PAIR)
    parts = open_source(source, split, release=True)
    from_pairs = [False]

    def choose(row: Row) -> Callable[[Row], Text]:
        if set(PAIR) & row.keys():
            from_pairs[0] = True
            convert = pair_converter(row)
            return lambda row: convert(row)[0]
        return _prompt_converter(row)

    def distinct() -> Iterator[Text]:
        seen: dict[bytes, Text | None] = {}
        for _, prompt in _stream(source, parts, wanted, choose):
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


def _stream(
    source: str | Path, parts: list[Part], wanted: Sequence[str], choose: Callable[[Row], Callable[[Row], T]]
) -> Iterator[tuple[int, T]]:
    """Convert every row with the converter that `choose` picks for the first one."""
    convert: Callable[[Row], T] | None = None
    for part in parts:
        for number, row in part.rows(wanted):
            try:
                if convert is None:
                    convert = choose(row)
                value = convert(row)
            except RowError as error:
                raise UserError(f"{part.name}, {part.unit} {number}: {error}") from None
            yield number, value
    if convert is None:
        raise UserError(f"{source}: holds no rows; give a data set with at least one")


# ---------------------------------------------------------------- columns


def _nearest(missing: Iterable[str], present: Iterable[str], known: Iterable[str]) -> str:
    """The words "; the nearest is ..." for columns that resemble a missing one, the same whichever is missing."""
    others = sorted(set(present) - set(known))[:MOST_COMPARED]
    near = sorted({match for name in missing for match in difflib.get_close_matches(name, others, n=1)})
    return f"; the nearest is {', '.join(map(repr, near))}" if near else ""


def require_columns(part: Part, needed: Sequence[str]) -> None:
    """UserError, with the nearest names, if a part that knows its columns lacks one."""
    present = part.columns or ()
    missing = [name for name in needed if name not in present]
    if missing:
        names = " and ".join(map(repr, missing))
        hint = _nearest(missing, present, needed)
        raise UserError(f"{part.name}: has no column {names}{hint}; rename or add it (found: {', '.join(present)})")


def _check_pair(row: Row) -> None:
    """Say what is wrong with `chosen` and `rejected`, in words that are the same when the two change places."""
    values = [row.get(name) for name in PAIR]
    if any(name not in row for name in PAIR):
        hint = _nearest(PAIR, row, ("prompt", *PAIR))
        raise RowError(f"lacks one of 'chosen'/'rejected'{hint}; add it, or remove the row")
    if any(value is None for value in values):
        raise RowError("one of 'chosen'/'rejected' is null; fill it in, or remove the row")
    if not all(isinstance(value, str | list) for value in values):
        raise RowError("one of 'chosen'/'rejected' is neither text nor a list of messages; convert it")
    if isinstance(values[0], str) != isinstance(values[1], str):
        raise RowError("one of 'chosen'/'rejected' is text and the other a list of messages; use one form for both")


def column_value(row: Row, name: str, known: Sequence[str]) -> Any:
    """The value; RowError if the row has no such column, or null."""
    if name not in row:
        raise RowError(f"has no column {name!r}{_nearest([name], row, known)}; add it, or remove the row")
    if row[name] is None:
        raise RowError(f"column {name!r} is null; fill it in, or remove the row")
    return row[name]


def _string(row: Row, name: str, known: Sequence[str] = ()) -> str:
    value = column_value(row, name, known)
    if not isinstance(value, str):
        raise RowError(f"column {name!r} is not text, as it is in the first row; convert it")
    return value


def _messages(value: Any, where: str) -> list[Message]:
    """The messages with their `role` and `content` alone, as read."""
    if not isinstance(value, list):
        raise RowError(f"{where} is not a list of messages, as it is in the first row; convert it")
    messages = []
    for turn in value:
        if not isinstance(turn, dict) or not (
            isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        ):
            raise RowError(f"{where} holds a message without a 'role' and a 'content' text; repair or remove the row")
        messages.append({"role": turn["role"], "content": turn["content"]})
    return messages


# ---------------------------------------------------------------- preference pairs

Converted = tuple[Text, Text, Text]
Converter = Callable[[Row], Converted]


def pair_converter(row: Row) -> Converter:
    """The converter for this first row's format: a row to (prompt, chosen, rejected), RowError if it does not fit."""
    _check_pair(row)
    explicit = "prompt" in row
    if explicit and row["prompt"] is None:
        raise RowError("column 'prompt' is null; fill it in, or remove the column")
    if isinstance(row["chosen"], list):
        return _explicit_messages if explicit and isinstance(row["prompt"], list) else _implicit_messages
    if explicit:
        return explicit_text
    if all(row[name].startswith("\n\nHuman:") for name in PAIR):
        return _dialogue
    return _implicit_text


def explicit_text(row: Row) -> Converted:
    """The format of three strings; the one that whole columns can be read in."""
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if type(prompt) is type(chosen) is type(rejected) is str:
        return prompt, chosen, rejected
    chosen, rejected = _pair_text(row)
    return _string(row, "prompt", ("prompt", *PAIR)), chosen, rejected


def _pair_text(row: Row) -> tuple[str, str]:
    _check_pair(row)
    if not isinstance(row["chosen"], str):
        raise RowError(
            "'chosen' and 'rejected' are lists of messages, but text in the first row; use one form for all rows"
        )
    return row["chosen"], row["rejected"]


def _pair_messages(row: Row) -> tuple[list[Message], list[Message]]:
    _check_pair(row)
    if not isinstance(row["chosen"], list):
        raise RowError(
            "'chosen' and 'rejected' are text, but lists of messages in the first row; use one form for all rows"
        )
    where = "one of 'chosen'/'rejected'"
    return _messages(row["chosen"], where), _messages(row["rejected"], where)


def _explicit_messages(row: Row) -> Converted:
    chosen, rejected = _pair_messages(row)
    return _messages(column_value(row, "prompt", ("prompt", *PAIR)), "column 'prompt'"), chosen, rejected


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common prefix, by bisection on slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _implicit_messages(row: Row) -> Converted:
    chosen, rejected = _pair_messages(row)
    shared = _common(chosen, rejected)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _implicit_text(row: Row) -> Converted:
    """As TRL: the common prefix, less one trailing space, which then begins both responses."""
    chosen, rejected = _pair_text(row)
    shared = _common(chosen, rejected)
    if shared and chosen[shared - 1] == " " and shared < max(len(chosen), len(rejected)):
        shared -= 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _dialogue(row: Row) -> Converted:
    chosen, rejected = _pair_text(row)
    if not (chosen.startswith("\n\nHuman:") and rejected.startswith("\n\nHuman:")):
        raise RowError("one of 'chosen'/'rejected' does not begin with \"\\n\\nHuman:\" as in the first row; repair it")
    cut = chosen[: _common(chosen, rejected)].rfind(_ASSISTANT)
    if cut < 0:  # no shared prompt: an empty prompt, which is dropped and counted like any other
        return [], _turns(chosen), _turns(rejected)
    return _turns(chosen[:cut]), _turns(chosen[cut:]), _turns(rejected[cut:])


def _turns(dialogue: str) -> list[Message]:
    """Messages of a dialogue that begins with a turn mark; one space after the mark belongs to the mark."""
    pieces = _TURN.split(dialogue)
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": _ROLES[role], "content": content.removeprefix(" ")} for role, content in turns]


# ---------------------------------------------------------------- demonstrations and prompts


def _demonstration_converter(row: Row) -> Callable[[Row], Demonstration]:
    if set(PAIR) & row.keys():
        raise RowError(
            "holds preference pairs ('chosen'/'rejected'), and tuning on preferred answers would reveal the labels;"
            " give demonstrations with 'prompt' and 'response' columns"
        )
    if "messages" in row and "prompt" not in row:
        return _from_messages
    for name in ("response", "completion"):
        if name in row and "prompt" in row:
            return lambda row: _from_columns(row, name)
    known = ("prompt", "response", "completion", "messages")
    hint = _nearest(set(known) - row.keys(), row, known)
    raise RowError(f"needs 'prompt' and 'response' (or 'completion') columns, or 'messages'{hint}; rename or add them")


def _from_columns(row: Row, name: str) -> Demonstration:
    known = ("prompt", name)
    prompt, response = column_value(row, "prompt", known), column_value(row, name, known)
    if isinstance(prompt, str) and isinstance(response, str):
        return Demonstration(prompt, response)
    return Demonstration(_messages(prompt, "column 'prompt'"), _messages(response, f"column {name!r}"))


def _from_messages(row: Row) -> Demonstration:
    messages = _messages(column_value(row, "messages", ("messages",)), "column 'messages'")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(
            "column 'messages' does not end with an assistant message after a prompt; repair or remove the row"
        )
    return Demonstration(messages[:-1], messages[-1:])


def _prompt_converter(row: Row) -> Callable[[Row], Text]:
    if "prompt" in row:
        if isinstance(row["prompt"], list):
            return lambda row: _messages(column_value(row, "prompt", ("prompt",)), "column 'prompt'")
        return lambda row: _string(row, "prompt", ("prompt",))
    if "messages" in row:
        return _prompt_of_messages
    hint = _nearest(("prompt", "messages"), row, ("prompt", "messages"))
    raise RowError(f"has no column 'prompt' or 'messages'{hint}; rename or add it")


def _prompt_of_messages(row: Row) -> Text:
    messages = _messages(column_value(row, "messages", ("messages",)), "column 'messages'")
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
