"""Chat templates: which token ends a turn, and what models without a template of their own are given."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

ANSWER = "an answer"
PLAIN = (
    "{% for message in messages %}{% if message['content'] or message['role'] != 'system' %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""Each turn under its role ("User:"), answers ended by the end-of-sequence token; without empty system messages."""


def give_plain_template(tokenizer: Any) -> None:
    """Makes `PLAIN` the tokenizer's template, behind the token that the tokenizer itself begins texts with, if any."""
    ids = tokenizer("a")["input_ids"]
    begins = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN


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
