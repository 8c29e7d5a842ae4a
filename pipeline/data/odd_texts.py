"""Signs that the texts of a pair are not those that were meant: wrappers, further turns, places of images.

One text may well show a sign, so each is counted over the rows of a source (`source_summary`). All are symmetric in the
two responses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from private_rlhf.data.conversation import RowError, parsed
from private_rlhf.privacy.records import Text

WRAPPED = "a prompt or two responses in JSON or Python around one text (write the text)"
ASKED = "a prompt like 'Q: ... A:' (write the question only, or messages with roles)"
RUNS_ON = "a response that goes on with a turn of the user, 'User:' or 'Human:' (end it before that)"
PLACEHOLDER = "a place for an image, a video or a sound, of which nothing is read (remove such rows)"
_ASKED = re.compile(r"\s*(?:Q|Question|问题?|質問)\s*[:：].*(?:\bA|\bAnswer|答案?|回答)\s*[:：]\s*", re.DOTALL)
_RUNS_ON = re.compile(r"\n\n(?:Human|User):|\n(?:Human|HUMAN|User|USER): .*\n+(?:Assistant|ASSISTANT):")
_PLACEHOLDER = re.compile(r"<(image|video|audio|ImageHere|image_\d+)>(?!.*</\1>)", re.DOTALL)


def signs(prompt: Text, responses: Sequence[Text]) -> Iterator[str]:
    """The signs that a pair shows. Responses in JSON are none where a word of the prompt is JSON."""
    asked = _contents(prompt, "user")
    answers = [text for response in responses for text in _contents(response, "assistant")]
    is_json_meant = "json" in str(prompt).lower()
    if any(map(_is_wrapped, asked)) or (answers and not is_json_meant and all(map(_is_wrapped, answers))):
        yield WRAPPED
    if any(map(_ASKED.fullmatch, asked)):
        yield ASKED
    if any(map(_RUNS_ON.search, answers)):
        yield RUNS_ON
    if any(map(_PLACEHOLDER.search, asked)):
        yield PLACEHOLDER


def _contents(text: Text, role: str) -> list[str]:
    """The text, or the messages of the role."""
    return [text] if isinstance(text, str) else [each["content"] for each in text if each["role"] == role]


def _is_wrapped(text: str) -> bool:
    """True for a literal of one text, or of lists and objects of one element around it."""
    text = text.strip()
    if (text[:1], text[-1:]) not in (("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")):
        return False
    try:
        value = parsed(text, "")
    except RowError:
        return False
    while isinstance(value, list | dict) and len(value) == 1:
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    return isinstance(value, str)
