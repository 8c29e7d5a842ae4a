"""Chat templates: the token that ends a turn, a template for models without one, and the template of what is saved.

The tokenizer of a saved model renders conversations as training did: with the recipe's system message and variables,
and with an answer behind the generation prompt up to the token that ends the turn. Most templates write a newline after
that token, which training never saw.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from private_rlhf.core.errors import UserError, say
from private_rlhf.data.render import Renderer

ANSWER = "an answer"
PLAIN = (
    "{% for message in messages %}{% if message['content'] or message['role'] != 'system' %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""Each turn under its role ("User:"), answers ended by the end-of-sequence token; without empty system messages."""
ANSWER_AWAY = (
    "{%- if not add_generation_prompt and messages | length > 1 and messages[-1]['role'] == 'assistant'"
    " and messages[-1]['content'] is defined and not messages[-1]['tool_calls'] %}{% set final_turn = messages[-1:] %}"
    "{% set messages = messages[:-1] %}{% set add_generation_prompt = true %}{% endif %}"
)
SYSTEM_FIRST = (
    "{{%- if messages[0]['role'] != 'system' %}}"
    "{{% set messages = [{{'role': 'system', 'content': {}}}] + messages %}}{{% endif %}}"
)
VARIABLE = "{{%- if {0} is not defined or {0} is none %}}{{% set {0} = {1} %}}{{% endif %}}"
ANSWER_BACK = (
    "{{{{ '' }}}}{{% if final_turn %}}{{% set answer = final_turn[0]['content'] %}}"
    "{{% if answer is not string %}}{{% set answer = answer | map(attribute='text') | join %}}{{% endif %}}"
    "{gap}{begin}{{{{ answer }}}}{{{{ {end_of_turn} }}}}{end}{{% set final_turn = [] %}}{{% endif %}}"
)
"""`final_turn` is emptied so that a template saved twice, with other settings, writes the answer once."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark of assistant tokens in templates. Not every Jinja knows it, so only templates that have it keep it."""
GAPS = ("", "{{ ' ' if answer and answer[0] != ' ' else '' }}")
"""Written before an answer: tokenizers of the sentencepiece kind put a space before each text, so also before answers,
which training renders by themselves."""
PROBES = ("An answer.", "two words", '"3" is odd.')


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


def tokenizer_as_trained(renderer: Renderer, padding_side: str | None = None) -> Any:
    """A copy of the renderer's tokenizer, to be saved, whose chat template renders what the renderer renders, unless an
    answer begins with characters that the tokenizer joins to the prompt's last ones. padding_side: of the copy; None
    leaves it."""
    tokenizer = copy.deepcopy(renderer.tokenizer)
    tokenizer.padding_side = padding_side or tokenizer.padding_side
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else None
    for gap in GAPS:
        template = template_as_trained(renderer, gap)
        tokenizer.chat_template = template if templates is None else {**templates, "default": template}
        if all(renders_alike(tokenizer, renderer, answer) for answer in PROBES):
            return tokenizer
    say("the saved chat template renders answers with other tokens than training: score token ids, not texts")
    return tokenizer


def template_as_trained(renderer: Renderer, gap: str = "") -> str:
    """The renderer's template between what puts its system message and variables in, and what ends an answer.

    gap: written before an answer (`GAPS`). A template that is so already is returned as it is.
    """
    base: str = renderer.tokenizer.get_chat_template()
    before = ANSWER_AWAY
    if renderer.system_prompt is not None and takes_system_message(renderer):
        before += SYSTEM_FIRST.format(literal(renderer.system_prompt))
    for name, value in renderer.template_variables.items():
        if name.isidentifier() and name in base:
            before += VARIABLE.format(name, literal(value))
    begin, end = ("{% generation %}", "{% endgeneration %}") if GENERATION.search(base) else ("", "")
    end_of_turn_token = literal(renderer.tokenizer.eos_token)
    after = ANSWER_BACK.format(gap=gap, begin=begin, end=end, end_of_turn=end_of_turn_token)
    if base.startswith(before + "\n") and base.endswith(after):
        return base
    # Jinja drops the newline after the block that `before` ends with, and the last one of a template.
    return f"{before}\n{base.removesuffix(chr(10))}{after}"


def takes_system_message(renderer: Renderer) -> bool:
    """True if the template takes system messages; `Renderer` goes without an empty one where it does not."""
    turns = [{"role": "system", "content": renderer.system_prompt or ""}, {"role": "user", "content": "a question"}]
    try:
        renderer.tokenizer.apply_chat_template(turns, tokenize=False, **renderer.template_variables)
    except TemplateError:
        return False
    return True


def renders_alike(tokenizer: Any, renderer: Renderer, answer: str) -> bool:
    """True if a tokenizer's template gives the token ids that the renderer gives to a question and `answer`."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        prompt = replace(renderer, max_prompt_tokens=sys.maxsize).prompt_ids("a question")
        ids: list[int] = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    except (TemplateError, UserError):  # prompts of the data may be of another kind
        return False
    return ids == prompt + renderer.response_ids(answer)


def literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    return repr(json.loads(json.dumps(value)))
