"""Signs that the texts of a pair are not those that were meant: wrappers, further turns, places of images.

One text may well show a sign, so each is counted over the rows of a source (`source_summary`). All are symmetric in the
two responses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from private_rlhf.data.conversation import RowError, is_nearly_transcript, parsed
from private_rlhf.data.formats import SHORTEST_PROMPT
from private_rlhf.privacy.records import Text

WRAPPED = "a prompt or two responses in JSON or Python around one text (write the text)"
NAMED = "a prompt or two responses that are a path or an address (write what stands there)"
TURNS = "a prompt like 'Q: ... A:', or marks of turns inside messages (write the question only, or messages with roles)"
REPEATED = "a response that begins with the prompt (write the answer only)"
RUNS_ON = "a response that goes on with a turn of the user, 'User:' or 'Human:' (end it before that)"
PLACEHOLDER = "a place for an image, a video or a sound, of which nothing is read (remove such rows)"
ESCAPED = "a text with what an export escaped or decoded wrongly, such as &quot; or \\n\\n (export it again)"
SIGNS = {
    **dict.fromkeys((WRAPPED, NAMED, TURNS), (0.9, 0.9)),
    **dict.fromkeys((RUNS_ON, PLACEHOLDER), (0.01, 0.1)),
    ESCAPED: (0.1, 0.9),
    REPEATED: (0.5, 0.5),
}
"""Shares of the rows over which a sign stops a run: of many rows, and of few."""
_KEYS = {"text", "content", "generated_text", "output", "response", "completion", "choices"}
_OBJECT = re.compile(r"""\s*(?:[A-Z]\w*\()?(?:content|text|id)=['"]|\s*b(['"]).*\1\s*$""", re.DOTALL)
_NAMED = re.compile(r"\s*(?:(?:https?|s3|gs|file)://\S+|[\w./\\-]+\.(?:txt|json|wav|mp3|mp4|png|jpe?g))\s*")
_TURNS = re.compile(
    r"\s*(?:Below is an? .{0,400}?)?(?:Q|Question|Instruction|Customer|Patient|问题?|質問)\s*[:：]"
    r".*(?:\b(?:A|Answer|Response|Output|Agent|Doctor)|答案?|回答)\s*[:：]\s*",
    re.DOTALL,
)
_RUNS_ON = re.compile(r"\n\n(?:Human|User):|\n(?:Human|HUMAN|User|USER): .*\n+(?:Assistant|ASSISTANT):")
_PLACEHOLDER = re.compile(r"<(image|video|audio|ImageHere|image_\d+)>(?!\s*<[a-z/]+[ >]|[^<]*</\1>)")
_ESCAPED = re.compile(r"&(?:amp|quot|lt|gt|nbsp|#0?39|#x27);|â€[™œ“”¦]|Ã[©¨¼¶¤§±³¡]|\A[^\n]*\\n\\n[^\n]*\Z")


def signs(prompt: Text, responses: Sequence[Text]) -> Iterator[str]:
    """The signs that a pair shows. Responses in JSON are none where a word of the prompt is JSON."""
    asked = _contents(prompt, "user")
    answers = [text for response in responses for text in _contents(response, "assistant")] or [""]
    is_json_meant = "json" in str(prompt).lower()
    if any(map(_is_wrapped, asked)) or (not is_json_meant and all(map(_is_wrapped, answers))):
        yield WRAPPED
    if any(map(_NAMED.fullmatch, asked)) or all(map(_NAMED.fullmatch, answers)):
        yield NAMED
    nearly = any(map(is_nearly_transcript, asked)) or all(map(is_nearly_transcript, answers))
    if any(map(_TURNS.fullmatch, asked)) or (nearly and not isinstance(prompt, str)):
        yield TURNS
    last = "".join(asked[-1:]).strip()
    if len(last) >= SHORTEST_PROMPT and any(answer.lstrip().startswith(last) for answer in answers):
        yield REPEATED
    if any(map(_RUNS_ON.search, answers)):
        yield RUNS_ON
    if any(map(_PLACEHOLDER.search, asked)):
        yield PLACEHOLDER
    if any(map(_ESCAPED.search, (*asked, *answers))):
        yield ESCAPED


def _contents(text: Text, role: str) -> list[str]:
    """The text, or the messages of the role."""
    return [text] if isinstance(text, str) else [each["content"] for each in text if each["role"] == role]


def _is_wrapped(text: str) -> bool:
    """True for a literal of one text, of texts in a list, or of objects around it, and for an object as Python prints
    it."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}", '""', "''"):
        return _OBJECT.match(text) is not None
    try:
        value = parsed(text, "")
    except RowError:
        return False
    while isinstance(value, list | dict) and len(value) == 1:
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str) for each in value)
    return isinstance(value, str) or (isinstance(value, dict) and not _KEYS.isdisjoint(value))
