"""The letters and digits of conversations: what the overlap guard compares of texts, whatever they are dressed in."""

from __future__ import annotations

import html
import re
import unicodedata

from private_rlhf.privacy.records import Text, message_text

_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_TEMPLATE = re.compile(  # special tokens and what chat templates put around a turn
    r"<\|(?:im_start|start_header_id)\|>\s*(?:system|user|assistant|tool)?|<\|[^<>|]{1,40}\|>"
    r"|<start_of_turn>\s*(?:user|model)?|</?(?:s|bos|eos|pad|unk|end_of_turn)>|\[/?INST\]|<</?SYS>>"
    r"|^#+ *(?:instruction|input|response|human|user|assistant|system|question|answer)\b:?",
    re.IGNORECASE | re.MULTILINE,
)
_NO_WORD = re.compile(r"[\W_]+")
_LOWER = bytes(range(256)).lower()
_NO_ASCII_WORD = bytes(byte for byte in range(128) if not chr(byte).isalnum())
_LATIN = str.maketrans(  # Cyrillic and Greek small letters that look like Latin ones, in either case
    "авекмнорстухіјѕһԁԛԝѵαβεζηικμνορτυχıɑɡ",
    "abekmhopctyxijshdqwvabezhikmnoptyxiag",
)

Turns = list[tuple[bool, str]]
"""(is it the assistant's, the letters and digits of its text) of every turn that has some."""


def turns(*texts: Text) -> Turns:
    """The turns of a prompt, or of a prompt and what answers it; text without turn marks is one turn."""
    spoken: Turns = []
    for place, text in enumerate(texts):
        if isinstance(text, str):
            pieces = _MARK.split(text) if "Human:" in text or "Assistant:" in text else [text]
            head = [(place > 0, pieces[0])]
            tail = [(mark == "Assistant", piece) for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True)]
            spoken += head + tail
        else:
            spoken += [(message["role"] == "assistant", message_text(message)) for message in text]
    squeezed = [(assistant, plain(content)) for assistant, content in spoken]
    return [(assistant, content) for assistant, content in squeezed if content]


def plain(text: str) -> str:
    """The letters and digits of a text, in one case; a text without any (a smiley, a formula) as it is but for space.

    Compatibility forms, HTML entities and look-alikes count as what they stand for; zero-width characters, special
    tokens and templates are gone.
    """
    dressed = "&" in text or "<" in text or "[" in text or "#" in text
    shown = _TEMPLATE.sub(" ", html.unescape(text)) if dressed else text
    words = shown.encode(errors="surrogatepass").translate(_LOWER, _NO_ASCII_WORD).decode(errors="surrogatepass")
    if not words.isascii():
        words = _NO_WORD.sub("", unicodedata.normalize("NFKC", words).casefold().translate(_LATIN))
    return words or "".join(text.split())


def plain_ascii(data: bytes) -> bytes:
    """`plain` of ASCII text for which `is_dressed` is false."""
    return data.translate(_LOWER, _NO_ASCII_WORD) or "".join(data.decode().split()).encode()


def is_dressed(data: bytes) -> bool:
    """True for UTF-8 text of which `turns` reads more than `plain_ascii`: turns, templates, entities, other scripts."""
    marked = b"<" in data or b"[" in data or b"#" in data or b"&" in data
    return marked or not data.isascii() or (b":" in data and (b"Human:" in data or b"Assistant:" in data))


def last_question(history: Turns) -> str:
    """The letters and digits of the last turn that is not the assistant's; empty if there is none."""
    return next((content for assistant, content in reversed(history) if not assistant), "")
