"""One checked conversation, from every way in which files write it: a list of {"role", "content"} with only texts.

Roles are system, user, assistant and tool; other spellings of them are mapped, unknown ones refused. Parts of type text
are joined. Nothing of a message is dropped unread: another modality or key is refused by name, unless it is empty. Keys
of `MESSAGE_KEYS` are read where data.message_keys names them (`check_texts`), and rendered by the chat template; null
values in their objects are absent ones, as Arrow writes these. Message lists that were written as text (JSON, or
Python's repr as CSV exports have it) are parsed where that is exact. Transcripts ("Human: ... Assistant: ...") become
messages.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from private_rlhf.data.release import MESSAGE_KEYS
from private_rlhf.data.sources import no_later_one
from private_rlhf.privacy.records import Message, Text, encode_text, to_json

T = TypeVar("T")
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    "tool": "tool",
}
"""Names of roles, in lower case, and what they mean."""
ASSISTANT = "\n\nAssistant:"
MARKS = re.compile(
    r"<\|[A-Za-z][A-Za-z0-9_]{2,30}\|>|<\|turn>|<(?:start|end)_of_turn>|<</?SYS>>|\[gMASK\]|<extra_id_\d+>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<｜.{1,60}?｜>"
    r"|\[\|(?:system|user|Human|assistant|AI|endofturn)\|\]|###\s?(?:Instruction|Response|Human|Assistant):"
)
"""Special tokens and what chat templates put around turns: a text that holds them is templated already."""
STARTS = ("<bos>", "<s>")
ENDS = ("</s>", "<eos>")
"""Of a text that is templated already; elsewhere, and as a pair at the start, they are HTML, or what it is about."""
_MARK_BYTES = re.compile("|".join((MARKS.pattern, *STARTS, *ENDS)).encode())
_BEGINNINGS = {b"<": b"|seb<\xef/", b"[": b"I/gSAT|", b"#": b"#"}
"""First bytes of marks, and the second ones."""
MARKED = (
    "holds a special token or a mark of a chat template in a text: it was templated already, or would end a turn twice;"
    " take the marks out, or say --special-tokens keep (data.special_tokens: keep), which takes them as plain text"
)
ANOTHER_TURN = (
    "holds a line that begins with 'Human:', 'User:' or 'System:' inside a turn of the assistant; begin all turns with"
    " the same names after an empty line, or say --special-tokens keep (data.special_tokens: keep), which takes it as"
    " the assistant's words"
)
NOT_READ = (
    "which is not read and would be lost: name it in data.message_keys, if the chat template renders it, or remove it"
)
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_LIST = re.compile(
    r"""\s*Q?(?:\[\s*\{\s*Q(?:role|content|from|value)Q\s*:|\{\s*Q(?:role|from)Q\s*:.*Q(?:content|value)Q\s*:"""
    r"""|\{\s*Q(?:content|value)Q\s*:.*Q(?:role|from)Q\s*:|\{\s*Q(?:messages|conversations?)Q\s*:\s*\[)""".replace(
        "Q", r"""\\?['"]"""
    ),
    re.DOTALL,
)
"""The beginning of a list of messages as text, also of one that was written twice."""
_HEAD = re.compile(r"\s*(System|Human|User):")
_ANOTHER_TURN = re.compile(r"\n(?:Human|User|System):")
_NEARLY = re.compile(
    r"\s*[#*<\[|]*\s*(?:human|user|prompter|system|assistant|人类|用户|ユーザー|사용자)[\]>*|]*\s*[:：]"
    r"|\[Round \d+\]\s+问|\s*(?:\[(?:human|user)\]|(?:system|user|human)\n)",
    re.IGNORECASE,
)
_NEARLY_END = re.compile(r"(?:\bassistant|助手|アシスタント|어시스턴트)\W{0,3}[:：]\s*$", re.IGNORECASE)


class RowError(Exception):
    """An error of one row; whoever reads the rows adds the file and the row number."""


class MarkedTexts(RowError):
    """The error of a row whose texts hold `MARKS`, or further turns of a transcript."""


def of_both(read: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
    """`read` of each value; where several are at fault, the error that comes first by its text, whichever it is of."""
    results, faults = [], []
    for value in values:
        try:
            results.append(read(value))
        except RowError as error:
            faults.append(str(error))
    if faults:
        raise RowError(min(faults))
    return results


def check_texts(texts: Sequence[Text], keys: Collection[str], special_tokens: str, transcripts: bool = False) -> None:
    """RowError for a key of a message that is not among `keys`, and, unless special tokens are kept, for marks, and in
    messages of transcripts for a line in which somebody else goes on after the assistant.
    UnicodeEncodeError for a lone surrogate, which a text inside a text can still hold as an escape."""
    messages = [message for text in texts if not isinstance(text, str) for message in text]
    read = {"role", "content", *keys, *(["tool_call_id"] if "tool_calls" in keys else [])}
    if unread := sorted({repr(key) for message in messages if len(message) > 2 for key in message if key not in read}):
        raise RowError(f"holds a message with {unread[0]}, {NOT_READ}")
    contents = [*(text for text in texts if isinstance(text, str)), *(str(message["content"]) for message in messages)]
    "".join(contents).encode()
    if special_tokens == "error" and any(map(_is_templated, contents)):
        raise MarkedTexts(MARKED)
    spoken = (str(message["content"]) for message in messages if transcripts and message["role"] == "assistant")
    if special_tokens == "error" and any(map(_ANOTHER_TURN.search, spoken)):
        raise MarkedTexts(ANOTHER_TURN)


def _is_templated(text: str) -> bool:
    marked = ("<" in text or "[" in text or "###" in text) and MARKS.search(text) is not None
    text = text.strip()
    return marked or text.endswith(ENDS) or (text.startswith(STARTS) and "</s>" not in text)


def holds_marks(data: bytes) -> bool:
    """True if UTF-8 bytes hold one of the marks above; looks only where its first two bytes stand, in vectors."""
    for first, after in _BEGINNINGS.items():
        if first in data:  # to look for one byte takes a tenth of the time of a pattern
            array = np.frombuffer(data, np.uint8)
            places = np.flatnonzero(array[:-1] == ord(first))
            places = places[np.isin(array[places + 1], tuple(after))]
            if any(_MARK_BYTES.match(data, place) for place in places.tolist()):
                return True
    return False


# --- messages ---------------------------------------------------------------------------------------------------------


def is_written_list(value: Any) -> bool:
    """True for a text that begins as a list of messages, or one message, does."""
    return isinstance(value, str) and _LIST.match(value) is not None


def read_messages(value: Any, where: str) -> list[Message]:
    """The checked messages of a list, of one message, or of a text that writes a list. RowError names `where`."""
    while is_written_list(value):
        value = parsed(value, where)
    if isinstance(value, dict):
        value = next((value[name] for name in ("messages", "conversations", "conversation") if name in value), [value])
    if not isinstance(value, list):
        raise RowError(f"{where} is not a list of messages, as it is in the first row; convert it")
    messages = [_message(turn, where) for turn in value]
    if any("tools" in message for message in messages[1:]):
        raise RowError(f"{where} holds 'tools' after the first message; repair or remove the row")
    return messages


def parsed(text: str, where: str) -> Any:
    """The value that JSON or Python writes so. RowError names `where`."""
    for parse in (lambda text: json.loads(text, object_pairs_hook=no_later_one), ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise RowError(f"{where} holds a list as text that is not exactly JSON or Python; write it as JSON")


def _message(turn: Any, where: str) -> Message:
    role_key, text_key = ("from", "value") if isinstance(turn, dict) and "from" in turn else ("role", "content")
    role = turn.get(role_key) if isinstance(turn, dict) else None
    if not isinstance(role, str) or not {text_key, "tool_calls"} & set(turn):
        raise RowError(f"{where} holds a message without a 'role' and a 'content' text; repair or remove the row")
    filled = {key: value for key, value in turn.items() if key not in (role_key, text_key) and value not in _EMPTY}
    if unread := sorted(repr(key) for key in filled if key not in MESSAGE_KEYS):
        raise RowError(f"{where} holds a message with {unread[0][:40]}, which is not read and would be lost; remove it")
    if (role := ROLES.get(role.strip().lower())) is None:
        raise RowError(f"{where} holds a message of an unknown role; use {', '.join(sorted(set(ROLES.values())))}")
    content = turn.get(text_key)
    text = "" if content is None and "tool_calls" in filled else _content(content, where)
    return {"role": role, "content": text, **{key: key_value(key, filled[key], where) for key in filled}}


def key_value(key: str, value: Any, where: str) -> Any:
    """The checked value of one of `MESSAGE_KEYS`, also one that was written as JSON."""
    listed = MESSAGE_KEYS[key] is list
    if listed and isinstance(value, str):
        value = parsed(value, where)
    try:
        plain = _without_nulls(value)
        text = to_json(plain)
    except (TypeError, ValueError, RecursionError):
        plain, text = None, ""
    if not isinstance(plain, list if listed else str) or (listed and not all(isinstance(each, dict) for each in plain)):
        kind = "list of JSON objects" if listed else "text"
        raise RowError(f"{where} holds a {key!r} that is not a {kind}; repair or remove the row")
    text.encode()  # as in check_texts
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _content(content: Any, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        fault = "whose 'content' is null" if content is None else "without a 'role' and a 'content' text"
        raise RowError(f"{where} holds a message {fault}; repair or remove the row")
    return content


def _part(part: Any, where: str) -> str:
    filled = {key: value for key, value in part.items() if value not in _EMPTY} if isinstance(part, dict) else {}
    text = part["text"] if filled.keys() <= {"type", "text"} and "text" in filled else None
    if isinstance(text, str) and filled.get("type", "text") == "text":
        return text
    raise RowError(f"{where} holds a part of a message that is not text; only texts are read, so remove such rows")


def framed(texts: tuple[Text, ...], system: Any, tools: Any) -> tuple[Text, ...]:
    """A prompt and responses as messages, with a system message and tools from columns of their own."""
    prompt, *responses = texts
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        responses = [[{"role": "assistant", "content": response}] for response in responses]
    if system is not None and not isinstance(system, str):
        raise RowError("holds a system message that is not text; convert it")
    if system and prompt[:1] != [{"role": "system", "content": system}]:
        if prompt and prompt[0]["role"] == "system":
            raise RowError("holds two different system messages; repair or remove the row")
        prompt = [{"role": "system", "content": system}, *prompt]
    if tools not in _EMPTY and prompt:
        stated = key_value("tools", tools, "column 'tools'")
        if prompt[0].get("tools", stated) != stated:
            raise RowError("holds two different lists of tools; repair or remove the row")
        prompt = [prompt[0] | {"tools": stated}, *prompt[1:]]
    return (prompt, *responses)


def cut_prompt(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Length of the prompt that two conversations share: up to the last place where both go on with the assistant.

    They share what is released in the same bytes: 1 and 1.0, or an object with its keys in another order, would show
    whose version the prompt is."""
    shared = common(*([each if len(each) == 2 else encode_text([each]) for each in side] for side in (first, second)))
    if shared == len(first) == len(second):
        return shared
    for place in range(min(shared, len(first) - 1, len(second) - 1), -1, -1):
        if first[place]["role"] == second[place]["role"] == "assistant":
            return place
    return 0


def check_turns(prompt: Sequence[Message], responses: Sequence[Sequence[Message]], where: str) -> None:
    """RowError for a system message after the start, or a response that does not begin and end with the assistant."""
    if any(message["role"] == "system" for turns in (prompt[1:], *responses) for message in turns):
        raise RowError("holds a system message after the first, or two different ones; repair or remove the row")
    ends = [message for turns in responses for message in (*turns[:1], *turns[-1:])]
    if responses[0] != responses[1] and any(message["role"] != "assistant" for message in ends):
        raise RowError(f"{where} does not begin and end with an assistant message after the prompt; repair the row")


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common prefix, by bisection on slices."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


# --- transcripts ------------------------------------------------------------------------------------------------------


def is_transcript(text: str) -> bool:
    """True for "Human:", "User:" or "System:" at the start, whatever empty lines come before."""
    return _HEAD.match(text) is not None


def is_nearly_transcript(text: str) -> bool:
    """True for a text that begins or ends as turns of a dialogue do, in a form that is not read."""
    return _NEARLY.match(text) is not None or _NEARLY_END.search(text[-40:]) is not None


def transcript(text: str) -> str:
    """The transcript with two newlines before each mark, also the first; line ends as in Unix if marks have others."""
    if "\r\n\r\nAssistant:" in text:
        text = text.replace("\r\n", "\n")
    return f"\n\n{text.lstrip()}"


def transcript_turns(piece: str, head: str) -> list[Message]:
    """Messages of a piece that begins with a mark; one space after a mark belongs to it. head: the transcript, whose
    first mark says which marks it has."""
    match = _HEAD.match(head)
    speakers = {"Human": "Human", "User": "User", "System": "System|Human|User"}[match[1] if match else "Human"]
    pieces = re.split(rf"\n\n({speakers}|Assistant):", piece)
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": ROLES[mark.lower()], "content": content.removeprefix(" ")} for mark, content in turns]
