"""What a chat template says about a tokenizer: which token ends a turn."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

ANSWER = "an answer"


def end_of_turn(tokenizer: Any) -> str | None:
    """The special token that the chat template puts behind an answer; None where it puts none there.

    It is not always the tokenizer's end-of-sequence: Gemma's is `<eos>` and its turns end with `<end_of_turn>`.
    """
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:
        return None
    ids = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    return first if first in added and first.strip() else None
