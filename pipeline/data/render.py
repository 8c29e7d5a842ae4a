"""One render function for SFT, reward, PPO and evaluation: text becomes token ids here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from pipeline.core.errors import UserError

TEMPLATE_DATE = "26 Jul 2024"
"""For templates that print a date (Llama 3 does): today's would change prompts, and so results, at midnight."""

Prompt = str | Sequence[dict[str, str]]
Response = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Renderer:
    """Renders prompts and responses with a tokenizer's chat template.

    Attributes:
        tokenizer: a transformers tokenizer with a chat template, an end-of-turn token and another padding token.
        max_prompt_tokens: prompts over it are refused (`fits` asks first).
        max_response_tokens: cap on a response, end-of-turn token included; longer ones are cut.
        system_prompt: system message for prompts without one; None leaves that to the chat template.
        chat_template_kwargs: variables of the chat template.
    """

    tokenizer: Any
    max_prompt_tokens: int
    max_response_tokens: int
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt` up to where the assistant's answer starts.

        A string is one user message; `system_prompt`, when given, comes before messages that bring no system message.

        Raises:
            UserError: the prompt is longer than `max_prompt_tokens`, or the chat template refuses it.
        """
        ids = self._prompt_ids(prompt)
        if len(ids) > self.max_prompt_tokens:
            raise UserError(
                f"a prompt has {len(ids)} tokens, over model.max_prompt_tokens = {self.max_prompt_tokens} "
                f"({preview(prompt)}): raise the limit or set model.long_prompts: drop"
            )
        return ids

    def fits(self, prompt: Prompt) -> bool:
        """Whether `prompt` is within the limit."""
        return len(self._prompt_ids(prompt)) <= self.max_prompt_tokens

    def response_ids(self, response: Response) -> list[int]:
        """Token ids of `response` and the end-of-turn token; cut to the cap, the end-of-turn token kept."""
        ids = self.tokenizer(plain_text(response), add_special_tokens=False)["input_ids"]
        return [*ids[: self.max_response_tokens - 1], self.tokenizer.eos_token_id]

    def text(self, response_ids: Sequence[int]) -> str:
        """The text of sampled token ids, without special tokens."""
        return self.tokenizer.decode(list(response_ids), skip_special_tokens=True).strip()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            return self._templated(messages)
        except TemplateError as error:
            if messages[0] == {"role": "system", "content": ""}:  # a template without system messages is short as it is
                return self._templated(messages[1:])
            remedy = "set model.system_prompt: null" if self.system_prompt else "give prompts that it takes"
            raise UserError(f"the chat template refuses a prompt ({error}; {preview(prompt)}): {remedy}") from None

    def _templated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **{"date_string": TEMPLATE_DATE, **self.chat_template_kwargs},
        )
        return list(rendered["input_ids"])


def keep_fitting(prompts: Sequence[Prompt], renderer: Renderer, long_prompts: str) -> list[int]:
    """Indices of the prompts within the limit.

    Args:
        prompts: in file order.
        renderer: knows the limit.
        long_prompts: `error` raises at the first one over the limit, `drop` leaves them out.

    Raises:
        UserError: a prompt is too long and `long_prompts` is `error`, or none is left.
    """
    if long_prompts == "error":
        for prompt in prompts:
            renderer.prompt_ids(prompt)
        return list(range(len(prompts)))
    kept = [index for index, prompt in enumerate(prompts) if renderer.fits(prompt)]
    if prompts and not kept:
        raise UserError(
            f"all {len(prompts)} prompts are over model.max_prompt_tokens = {renderer.max_prompt_tokens}: "
            "raise the limit"
        )
    return kept


def plain_text(response: Response) -> str:
    """The text of a response; a conversational one is a list with a single assistant message."""
    return response if isinstance(response, str) else "".join(message["content"] for message in response)


def plain_prompt(prompt: Prompt) -> str:
    """The last message of a prompt: what identifies it in a line, and what the embedded truth scores."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def dialogue(prompt: Prompt) -> str:
    """A prompt as text to read: all of a conversation, each message under its role."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return plain_prompt(prompt)
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def preview(prompt: Prompt, width: int = 40) -> str:
    """The first characters of a prompt or response, quoted, for messages; without what a terminal would obey."""
    text = " ".join(plain_prompt(prompt).split())
    text = "".join(character if character.isprintable() else "·" for character in text)
    return f"'{text[:width]}{'…' if len(text) > width else ''}'"
