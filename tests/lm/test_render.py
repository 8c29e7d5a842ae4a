"""One renderer for every stage: limits, system prompts, and what becomes of long texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import (
    Prompt,
    Renderer,
    keep_fitting,
    keep_fitting_pairs,
    plain_prompt,
    plain_text,
    preview,
)
from private_rlhf.lm.models import load_tokenizer

NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
"""As Gemma-2's."""


@pytest.fixture(scope="module")
def renderer(checkpoint: Path) -> Renderer:
    return Renderer(load_tokenizer(checkpoint), 60, 8)


def shown(renderer: Renderer, prompt: Prompt) -> str:
    text: str = renderer.tokenizer.decode(renderer.prompt_ids(prompt))
    return text


def test_a_prompt_ends_where_the_answer_starts(renderer: Renderer) -> None:
    assert shown(renderer, "the fox") == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "the fox"}]
    assert renderer.prompt_ids(messages) == renderer.prompt_ids("the fox")


def test_the_system_prompt_comes_first_unless_the_prompt_brings_one(renderer: Renderer) -> None:
    kind = Renderer(renderer.tokenizer, 60, 8, system_prompt="be kind")
    assert shown(kind, "the fox").startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nthe fox")
    own = [{"role": "system", "content": "be dull"}, {"role": "user", "content": "the fox"}]
    assert "be kind" not in shown(kind, own)
    assert len(own) == 2
    empty = Renderer(renderer.tokenizer, 60, 8, system_prompt="")
    assert shown(empty, "the fox").startswith("<|im_start|>system\n<|im_end|>")


def test_variables_reach_the_template(checkpoint: Path) -> None:
    """Qwen3 thinks unless it is told not to."""
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking is false %} at once{% endif %}"
    assert shown(Renderer(tokenizer, 60, 8), "the fox") == "the fox"
    assert shown(Renderer(tokenizer, 60, 8, None, {"enable_thinking": False}), "the fox") == "the fox at once"


def test_a_template_that_refuses_system_messages_goes_without_an_empty_one(checkpoint: Path) -> None:
    """Of any other one the user is told, in one line."""
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = NO_SYSTEM
    expected = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>model\n"
    assert shown(Renderer(tokenizer, 60, 8, ""), "the fox") == shown(Renderer(tokenizer, 60, 8), "the fox") == expected
    refusal = r"the chat template refuses a prompt \(System role not supported; 'the fox'\): "
    with pytest.raises(UserError, match=refusal + r"set model\.system_prompt: null"):
        Renderer(tokenizer, 60, 8, "be kind").prompt_ids("the fox")
    own = [{"role": "system", "content": "be dull"}, {"role": "user", "content": "the fox"}]
    with pytest.raises(UserError, match=refusal + "give prompts that it takes"):
        Renderer(tokenizer, 60, 8).prompt_ids(own)


def test_a_long_prompt_is_refused_and_quoted_never_cut(renderer: Renderer) -> None:
    long = "the lazy dog " * 40
    with pytest.raises(UserError, match=r"tokens, over model.max_prompt_tokens = 60 \('the lazy dog .*…'\)"):
        renderer.prompt_ids(long)
    count = len(renderer.prompt_ids("the fox"))
    assert Renderer(renderer.tokenizer, count, 8).fits("the fox")
    assert not Renderer(renderer.tokenizer, count - 1, 8).fits("the fox")


def test_long_prompts_stop_or_are_dropped(renderer: Renderer) -> None:
    prompts = ["the fox", "the lazy dog " * 40, "rivers"]
    assert keep_fitting(prompts, renderer, "drop") == [0, 2]
    with pytest.raises(UserError, match=r"over model\.max_prompt_tokens"):
        keep_fitting(prompts, renderer, "error")
    with pytest.raises(UserError, match="all 1 prompts are over"):
        keep_fitting(prompts[1:2], renderer, "drop")
    assert keep_fitting([], renderer, "drop") == []


def test_a_response_ends_its_turn_and_is_never_cut(renderer: Renderer) -> None:
    eos = renderer.tokenizer.eos_token_id
    short = renderer.response_ids("the fox")
    assert short[-1] == eos
    assert renderer.text(short) == "the fox"
    long = renderer.response_ids("the quick brown fox jumps over the lazy dog " * 5)
    assert renderer.text(long) == ("the quick brown fox jumps over the lazy dog " * 5).strip()
    assert long[-1] == eos
    assert long.count(eos) == 1
    assert renderer.response_ids("") == [eos]
    assert renderer.response_ids([{"role": "assistant", "content": "the fox"}]) == short


def test_a_pair_is_too_long_if_either_response_is(renderer: Renderer) -> None:
    """Whichever is preferred: what is left out must not tell a label."""
    size = len(renderer.prompt_ids("the fox") + renderer.response_ids("rivers rivers"))
    limited = Renderer(renderer.tokenizer, 60, 8, max_text_tokens=size)
    short, long = "rivers", "rivers rivers rivers"
    for pair, fits in (((short, short), True), ((short, long), False), ((long, short), False), ((long, long), False)):
        assert limited.fits("the fox", *pair) is fits
    pairs = [SimpleNamespace(prompt="the fox", chosen=a, rejected=b) for a, b in ((short, short), (short, long))]
    flipped = [SimpleNamespace(prompt=each.prompt, chosen=each.rejected, rejected=each.chosen) for each in pairs]
    assert keep_fitting_pairs(pairs, limited, "drop") == keep_fitting_pairs(flipped, limited, "drop") == [0]
    said = []
    for each in (pairs, flipped):
        with pytest.raises(UserError, match=r"a prompt and its response have \d+ tokens, over the") as error:
            keep_fitting_pairs(each, limited, "error")
        said.append(str(error.value))
    assert said[0] == said[1]


def test_text_is_what_a_person_would_read(renderer: Renderer) -> None:
    ids = renderer.tokenizer(" the fox \n", add_special_tokens=False)["input_ids"]
    assert renderer.text([*ids, renderer.tokenizer.eos_token_id, renderer.tokenizer.pad_token_id]) == "the fox"


def test_plain_forms() -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "two"},
    ]
    assert plain_prompt(talk) == "two"
    assert plain_prompt("one") == "one"
    assert plain_text([{"role": "assistant", "content": "x"}]) == "x"
    assert preview("a\nb  c") == "'a b c'"
    assert preview("word " * 20, width=9) == "'word word…'"
