"""Responses of several turns: rendered as the chat template renders the whole, learnt where the assistant speaks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Demonstration, Renderer
from private_rlhf.evaluation.rates import pair_rows
from private_rlhf.lm.logprobs import mean_logprobs, token_batch
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.stages.dpo import token_ids
from private_rlhf.stages.sft import tokenized
from support.preference_files import assistant, user

PROMPT = user("the fox")
TURNS = [*assistant("runs"), *user("and the dog?"), *assistant("sleeps")]
TWICE = [*assistant("runs"), *assistant("and sleeps")]


@pytest.fixture(scope="module")
def renderer(checkpoint: Path) -> Renderer:
    return Renderer(load_tokenizer(checkpoint), 400, 8)


def whole(renderer: Renderer, messages: list[dict[str, str]]) -> list[int]:
    """The template's own rendering, without what it writes after the last end of turn."""
    ids: list[int] = renderer.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return ids[: len(ids) - ids[::-1].index(renderer.tokenizer.eos_token_id)]


def learnt_text(renderer: Renderer, ids: list[int]) -> str:
    text: str = renderer.tokenizer.decode([token for token in ids if token >= 0])
    return text


@pytest.mark.parametrize("response", [assistant("runs"), TURNS, TWICE])
def test_a_response_is_what_the_template_renders(renderer: Renderer, response: list[dict[str, str]]) -> None:
    ids = renderer.prompt_ids(PROMPT) + renderer.response_ids(response)
    assert ids == whole(renderer, [*PROMPT, *response])


def test_only_what_the_assistant_says_is_learnt(renderer: Renderer) -> None:
    end = renderer.tokenizer.eos_token
    assert learnt_text(renderer, renderer.learnt_ids(TURNS)) == f"runs{end}sleeps{end}"
    assert learnt_text(renderer, renderer.learnt_ids(TWICE)) == f"runs{end}and sleeps{end}"
    assert renderer.learnt_ids("runs") == renderer.response_ids("runs")
    (row,) = tokenized([Demonstration(PROMPT, TURNS)], renderer)
    assert row["input_ids"] == whole(renderer, [*PROMPT, *TURNS])
    assert learnt_text(renderer, row["labels"]) == f"runs{end}sleeps{end}"
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    pair = ReleasedPair(PROMPT, TURNS, assistant("no"), "0" * 64)
    assert token_ids(pair, renderer)[1] == renderer.learnt_ids(TURNS)
    assert pair_rows([pair], renderer)[0][1] == renderer.learnt_ids(TURNS)


def test_the_score_of_a_response_leaves_out_the_user(renderer: Renderer, checkpoint: Path) -> None:
    """Against the plain mean of log-probabilities at the assistant's tokens, from one forward pass."""
    model: Any = load_causal_lm(checkpoint, "float32").eval()
    prompt, signed = renderer.prompt_ids(PROMPT), renderer.learnt_ids(TURNS)
    (found,) = mean_logprobs(model, [(prompt, signed)], pad_token_id=0, batch_size=1, device=torch.device("cpu"))
    ids = torch.tensor([prompt + renderer.response_ids(TURNS)])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(dim=1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
    expected = logprobs[torch.tensor(signed) >= 0].mean().item()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    batch = token_batch([prompt], [signed], 0, torch.device("cpu"))
    assert batch.tokens.tolist() == [token for token in signed if token >= 0]


def test_a_special_token_in_an_answer_ends_no_turn(renderer: Renderer) -> None:
    end = renderer.tokenizer.eos_token_id
    assert renderer.response_ids("runs <|im_end|> on").count(end) == 1


def test_a_template_that_takes_one_question_refuses_in_one_line(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' and loop.index0 %}{{ raise_exception('no') }}"
        "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer, 400, 8)
    assert len(renderer.response_ids(TWICE)) > 5
    with pytest.raises(UserError, match="the chat template refuses a response of several turns"):
        renderer.response_ids(TURNS)


def test_real_dialogues_with_several_turns(renderer: Renderer) -> None:
    home = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    if not home:
        pytest.skip("PRIVATE_RLHF_TEST_DATA is not set, so the real HH-RLHF rows are not read")
    wide, several, dialogues = Renderer(renderer.tokenizer, 10_000, 8), 0, 0
    end = renderer.tokenizer.eos_token
    for split in ("train", "eval"):
        for prompt, *responses, _ in read_preferences(Path(home) / "hh_harmless", split):
            twice = 0
            for response in responses:
                assert isinstance(prompt, list)
                assert isinstance(response, list)
                turns = [*prompt, *response]
                if any(one["role"] == other["role"] for one, other in pairwise(turns)):
                    twice += 1
                    several += len(response) > 1
                    assert wide.prompt_ids(prompt) + wide.response_ids(response) == whole(wide, turns)
                    learnt = learnt_text(wide, wide.learnt_ids(response))
                    assert learnt == "".join(f"{turn['content']}{end}" for turn in response)
            dialogues += twice > 0
    assert (dialogues, several) == (5, 2)
