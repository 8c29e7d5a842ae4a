"""One render function for SFT, reward, PPO and evaluation: text becomes token ids here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from private_rlhf.core.errors import UserError

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

        Raises:
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
        """Token ids of the whole `response` and the end-of-turn token.

        Raises:
            UserError: the chat template does not take the turns of a response that has several.
        """
        return [token if token >= 0 else ~token for token in self.learnt_ids(response)]

    def learnt_ids(self, response: Response) -> list[int]:
        """As `response_ids`, with ~id for tokens between the assistant's turns, which are neither learnt nor scored
        (`logprobs.token_batch` takes them so)."""
        turns = [] if isinstance(response, str) else list(response)
        if len(turns) < 2:
            return self._answer_ids(plain_text(response))
        ids: list[int] = []
        for place, turn in enumerate(turns):
            if turn["role"] == "assistant":
                between = self._between(turns[:place]) if ids else []
                ids += [*(~token for token in between), *self._answer_ids(turn["content"])]
        return ids

    def _answer_ids(self, text: str) -> list[int]:
        """One turn and its end; the name of a special token inside it is plain text, so that it never ends twice."""
        names = any(name in text for name in getattr(self.tokenizer, "all_special_tokens", ()))
        plain = {"split_special_tokens": True} if names else {}
        return [*self.tokenizer(text, add_special_tokens=False, **plain)["input_ids"], self.tokenizer.eos_token_id]

    def _between(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """Token ids that the chat template puts between the last assistant turn of `turns` and an answer to them."""
        from jinja2 import TemplateError

        end = max(place for place, turn in enumerate(turns) if turn["role"] == "assistant") + 1
        asked = [{"role": "user", "content": "?"}, *turns]
        try:
            answered = self._templated(asked[: end + 1], tokenize=False, add_generation_prompt=False)
            whole = self._templated(asked, tokenize=False)
        except TemplateError as error:
            raise UserError(f"the chat template refuses a response of several turns ({error}): leave it out") from None
        head = answered[: answered.rfind(self.tokenizer.eos_token) + len(self.tokenizer.eos_token)]
        if not head.endswith(self.tokenizer.eos_token) or not whole.startswith(head):
            raise UserError("the chat template changes earlier turns of a response of several turns: leave it out")
        return list(self.tokenizer(whole[len(head) :], add_special_tokens=False)["input_ids"])

    def text(self, response_ids: Sequence[int]) -> str:
        """The text of sampled token ids, without special tokens."""
        return self.tokenizer.decode(list(response_ids), skip_special_tokens=True).strip()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        from jinja2 import TemplateError  # comes with what learns

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            return list(self._templated(messages)["input_ids"])
        except TemplateError as error:
            if messages[0] == {"role": "system", "content": ""}:  # a template without system messages is short as it is
                return list(self._templated(messages[1:])["input_ids"])
            remedy = "set model.system_prompt: null" if self.system_prompt else "give prompts that it takes"
            raise UserError(f"the chat template refuses a prompt ({error}; {preview(prompt)}): {remedy}") from None

    def _templated(self, messages: Sequence[dict[str, str]], **how: Any) -> Any:
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True} | how
        return self.tokenizer.apply_chat_template(messages, **how, **self.template_variables)


def keep_fitting(
    prompts: Sequence[Prompt], renderer: Renderer, too_long: str, *responses: Sequence[Response]
) -> list[int]:
    """Indices of the prompts, or of the prompts with their responses, within the limits.

    Args:
        prompts: in file order.
        renderer: knows the limits.
        too_long: `error` raises at the first one over a limit, `drop` leaves them out.
        responses: any number of responses to each prompt, each as long as `prompts`.

    Raises:
        UserError: one is too long and `too_long` is `error`, or none is left.
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


def text_count(what: str, read: int, kept: int, renderer: Renderer) -> dict[str, Any]:
    """An entry of `texts` in a stage's manifest: how many of its `prompts`, `demonstrations` or `pairs` were read, how
    many were left out as too long, and by which limits (tokens; those of a text bind no prompt alone)."""
    together = None if what == "prompts" else renderer.max_text_tokens
    limits = {"max_prompt_tokens": renderer.max_prompt_tokens, "max_text_tokens": together}
    return {"what": what, "read": read, "too_long": read - kept, **limits}


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
    return dialogue(response) if len(response) > 1 else "".join(message["content"] for message in response)


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
