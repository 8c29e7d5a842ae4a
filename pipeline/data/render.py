"""One render function for SFT, reward, PPO and evaluation: text becomes token ids here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from private_rlhf.core.errors import UserError
from private_rlhf.privacy.records import Message, Text, further_keys, message_text
from private_rlhf.recipe import ModelConfig

TEMPLATE_DATE = "26 Jul 2024"
"""For templates that print a date (Llama 3 does): today's would change prompts, and so results, at midnight."""

_MARK = "\ue0f0{}\ue0f1"
"""In a rendering, in place of the name of a special token that a text holds: those are plain text."""

T = TypeVar("T")
Prompt = str | Sequence[Message]
Response = str | Sequence[Message]


class Demonstration(NamedTuple):
    """One example for supervised fine-tuning: strings, or message lists (prompt, then what the assistant says)."""

    prompt: Text
    response: Text


@dataclass(frozen=True)
class Renderer:
    """Renders prompts and responses with a tokenizer's chat template.

    Attributes:
        tokenizer: a transformers tokenizer with a chat template, an end-of-turn token and another padding token.
        max_prompt_tokens: prompts over it are refused (`fits` asks first).
        max_response_tokens: cap on a sampled response, end-of-turn token included.
        system_prompt: system message for prompts without one; None leaves that to the chat template.
        chat_template_kwargs: variables of the chat template.
        max_text_tokens: of a prompt with its response; longer ones are refused (`fits` asks first). None: no limit.
    """

    tokenizer: Any
    max_prompt_tokens: int
    max_response_tokens: int
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_text_tokens: int | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """All variables of the chat template, by name."""
        return {"date_string": TEMPLATE_DATE, **self.chat_template_kwargs}

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt` up to where the assistant's answer starts.

        A string is one user message; `system_prompt`, when given, comes before messages that bring no system message.
        UserError: the prompt is longer than `max_prompt_tokens`, or the chat template refuses it.
        """
        ids = self._prompt_ids(prompt)
        if len(ids) > self.max_prompt_tokens:
            raise UserError(
                f"a prompt has {len(ids)} tokens, over model.max_prompt_tokens = {self.max_prompt_tokens} "
                f"({preview(prompt)}): raise the limit or set model.too_long: drop"
            )
        return ids

    def prompt_size(self, prompt: Prompt) -> int:
        """Tokens of `prompt`, within its limit or not."""
        return len(self._prompt_ids(prompt))

    def fits(self, prompt: Prompt, *responses: Response) -> bool:
        """True if `prompt` is within its limit and, with any of `responses`, within that of a text.

        Symmetric in the responses: which pairs are kept tells nothing of a label.
        """
        size = self.prompt_size(prompt)
        return size <= self.max_prompt_tokens and self._fit_together(size, responses)

    def check(self, prompt: Prompt, *responses: Response) -> None:
        """UserError, with what to do, where `fits` says no; it does not tell which response is too long."""
        size = len(self.prompt_ids(prompt))
        if not self._fit_together(size, responses):
            longest = size + max(len(self.response_ids(response)) for response in responses)
            raise UserError(
                f"a prompt and its response have {longest} tokens, over the {self.max_text_tokens} that "
                f"model.max_text_tokens and the model itself allow ({preview(prompt)}): raise the limit or set "
                "model.too_long: drop"
            )

    def _fit_together(self, prompt_size: int, responses: Sequence[Response]) -> bool:
        limit = self.max_text_tokens
        return limit is None or all(prompt_size + len(self.response_ids(each)) <= limit for each in responses)

    def response_ids(self, response: Response) -> list[int]:
        """Token ids of the whole `response` and the end-of-turn token. UserError: the chat template does not take the
        turns of a response that has several."""
        return [token if token >= 0 else ~token for token in self.learnt_ids(response)]

    def learnt_ids(self, response: Response) -> list[int]:
        """As `response_ids`, with ~id for tokens between the assistant's turns, which are neither learnt nor scored
        (`logprobs.token_batch` takes them so)."""
        turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else list(response)
        ids: list[int] = []
        for place, turn in enumerate(turns):
            if turn["role"] == "assistant":
                between = self._between(turns[:place]) if ids else []
                ids += [*(~token for token in between), *self._answer_ids(turn)]
        return ids

    def _answer_ids(self, turn: Message) -> list[int]:
        """One turn and its end; the name of a special token inside it is plain text, so that it never ends twice. A
        turn with tool calls and the like is what the chat template makes of it."""
        if further_keys(turn):
            return self._after([], [turn])
        plain = {"split_special_tokens": True} if self._special.search(turn["content"]) else {}
        ids = self.tokenizer(turn["content"], add_special_tokens=False, **plain)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]

    def _between(self, turns: Sequence[Message]) -> list[int]:
        """Token ids that the chat template puts between the last assistant turn of `turns` and an answer to them."""
        end = max(place for place, turn in enumerate(turns) if turn["role"] == "assistant") + 1
        return self._after(turns[:end], turns)

    def _after(self, answered: Sequence[Message], turns: Sequence[Message]) -> list[int]:
        """Token ids of the chat template's rendering of a response, behind the end of its first turns `answered`; up to
        the end of the assistant's turn where there are none, otherwise to where an answer starts."""
        from jinja2 import TemplateError

        question, end = {"role": "user", "content": "?"}, self.tokenizer.eos_token
        try:
            head = self._rendered([question, *answered], generate=not answered)
            whole = self._rendered([question, *turns], generate=bool(answered))
        except TemplateError as error:
            raise UserError(f"the chat template refuses a response of several turns ({error}): leave it out") from None
        if answered:
            head = head[: head.rfind(end) + len(end)]
        else:
            whole = whole[: whole.rfind(end) + len(end)]
        if not (head if answered else whole).endswith(end) or not whole.startswith(head):
            raise UserError("the chat template changes earlier turns of a response of several turns: leave it out")
        return self._tokens(whole[len(head) :])

    def text(self, response_ids: Sequence[int]) -> str:
        """The text of sampled token ids, without special tokens."""
        return self.tokenizer.decode(list(response_ids), skip_special_tokens=True).strip()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        from jinja2 import TemplateError  # comes with what learns

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            return self._tokens(self._rendered(messages))
        except TemplateError as error:
            if messages[0] == {"role": "system", "content": ""}:  # a template without system messages is short as it is
                return self._tokens(self._rendered(messages[1:]))
            remedy = "set model.system_prompt: null" if self.system_prompt else "give prompts that it takes"
            raise UserError(f"the chat template refuses a prompt ({error}; {preview(prompt)}): {remedy}") from None

    def _rendered(self, messages: Sequence[Message], generate: bool = True) -> str:
        """The chat template's text. UserError where it is the same without a further key of a message."""
        from jinja2 import TemplateError

        text = self._templated(messages, generate)
        for place, message in enumerate(messages):
            for key in further_keys(message):
                without = {name: value for name, value in message.items() if name != key}
                try:
                    other = self._templated([*messages[:place], without, *messages[place + 1 :]], generate)
                except TemplateError:
                    continue
                if other == text and key != "tool_call_id":
                    raise UserError(
                        f"the chat template of this model drops {key!r} of a message ({preview([message])}): remove it"
                        " from the data, or take a model whose template renders it"
                    )
        return text

    def _templated(self, messages: Sequence[Message], generate: bool) -> str:
        tools = [message["tools"] for message in messages if "tools" in message]
        turns = [{name: value for name, value in turn.items() if name != "tools"} for turn in messages]
        how = {"tools": self._plain(tools[0])} if tools else {}
        text: str = self.tokenizer.apply_chat_template(
            self._plain(turns), add_generation_prompt=generate, tokenize=False, **how, **self.template_variables
        )
        return text

    @cached_property
    def _names(self) -> list[str]:
        """Names of special tokens, and what begins a `_MARK`."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        names = {token.content for token in added if token.special} | {_MARK[0]}
        return sorted(names | set(getattr(self.tokenizer, "all_special_tokens", ())), key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._names)))

    def _plain(self, value: Any) -> Any:
        """The JSON value with a `_MARK` for each name of a special token in its texts."""
        if isinstance(value, str):
            return self._special.sub(lambda match: _MARK.format(self._names.index(match[0])), value)
        if isinstance(value, dict):
            return {name: self._plain(each) for name, each in value.items()}
        return [self._plain(each) for each in value] if isinstance(value, list) else value

    def _tokens(self, text: str) -> list[int]:
        """Token ids of a rendering."""
        ids: list[int] = []
        for place, piece in enumerate(re.split(_MARK.format(r"(\d+)"), text)):
            if place % 2:
                ids += self.tokenizer(self._names[int(piece)], add_special_tokens=False, split_special_tokens=True)[
                    "input_ids"
                ]
            elif piece:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        return ids


def keep_fitting(
    prompts: Sequence[Prompt], renderer: Renderer, too_long: str, *responses: Sequence[Response]
) -> list[int]:
    """Indices of the prompts, or of the prompts with their responses, within the limits of the renderer.

    too_long: `error` raises at the first one over a limit, `drop` leaves them out. responses: any number of responses
    to each prompt, each as long as `prompts`. UserError: one is too long and `too_long` is `error`, or none is left.
    """
    texts = list(zip(prompts, *responses, strict=True))
    if too_long == "error":
        for text in texts:
            renderer.check(*text)
        return list(range(len(texts)))
    kept = [index for index, text in enumerate(texts) if renderer.fits(*text)]
    if texts and not kept:
        over = f"model.max_prompt_tokens = {renderer.max_prompt_tokens}"
        over += f" or, with a response, {renderer.max_text_tokens} (model.max_text_tokens)" if responses else ""
        raise UserError(f"all {len(texts)} prompts are over {over}: raise the limit")
    return kept


def keep_fitting_pairs(pairs: Sequence[Any], renderer: Renderer, too_long: str) -> list[int]:
    """Indices of the preference pairs (prompt, chosen, rejected) within the limits; see `keep_fitting`."""
    prompts, chosen, rejected = ([getattr(pair, name) for pair in pairs] for name in ("prompt", "chosen", "rejected"))
    return keep_fitting(prompts, renderer, too_long, chosen, rejected)


def evenly_spaced(rows: Sequence[T], count: int | None) -> list[T]:
    """`count` of the rows at even distances; all of them for None."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // count] for index in range(count)]


def text_count(what: str, read: int, kept: int, renderer: Renderer) -> dict[str, Any]:
    """An entry of `texts` in a stage's manifest: how many `prompts`, `demonstrations` or `pairs` were read, and how
    many were too long for which limits, in tokens. The limit of a text does not bind prompts."""
    together = None if what == "prompts" else renderer.max_text_tokens
    limits = {"max_prompt_tokens": renderer.max_prompt_tokens, "max_text_tokens": together}
    return {"what": what, "read": read, "too_long": read - kept, **limits}


def part_of(count: int, total: int) -> str:
    """Part of a stage's one line: how many rows were learnt from, and of how many where these were more."""
    return f"{count} of {total}" if count < total else str(count)


def left_out(count: int) -> str:
    """Part of a stage's one line about texts over the limits; nothing when there were none."""
    return f" ({count} more left out as too long)" if count else ""


def prompt_key(prompt: Prompt) -> str:
    """A key that tells prompts apart and names a prompt's draws; never stored where it must outlive the code."""
    return repr(prompt)


def plain_text(response: Response) -> str:
    """The text of a response: of its one assistant message, or of several turns, each under its role."""
    if isinstance(response, str):
        return response
    return dialogue(response) if len(response) > 1 else "".join(map(message_text, response))


def plain_prompt(prompt: Prompt) -> str:
    """The last message of a prompt: what identifies it in a line, and what the embedded truth scores."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def dialogue(prompt: Prompt) -> str:
    """A prompt as text to read: all of a conversation, each message under its role."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return plain_prompt(prompt)
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in prompt)


def preview(prompt: Prompt, width: int = 40) -> str:
    """The first characters of a prompt or response, quoted, for messages; without what a terminal would obey."""
    text = " ".join(plain_prompt(prompt).split())
    text = "".join(character if character.isprintable() else "·" for character in text)
    return f"'{text[:width]}{'…' if len(text) > width else ''}'"


def make_renderer(model: ModelConfig, tokenizer: Any) -> Renderer:
    """The recipe's one renderer for `tokenizer`, whose model may take less than model.max_text_tokens."""
    limits = (model.max_prompt_tokens, model.max_response_tokens)
    longest = min(model.max_text_tokens, tokenizer.model_max_length)
    return Renderer(tokenizer, *limits, model.system_prompt, model.chat_template_kwargs, longest)
