"""The generator of the embedded data, on a tiny random model: sampling, selection rules, pairing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.embedded import make
from pipeline.embedded.make import Completion

PROMPT = "Write one short sentence about a river."
GOOD = "The river flows slowly past the old town."


def test_draw_follows_the_softmax() -> None:
    """Chi-square on 20,000 draws, false alarms 0.1 %; the same draws are refused as draws at another temperature."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    tokens = make.draw(logits.repeat(20_000, 1), 2.0, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=5)
    assert counts[4] == 0
    for temperature, holds in ((2.0, True), (1.8, False)):
        expected = 20_000 * torch.softmax(logits[:4] / temperature, 0)
        pvalue = chisquare(counts[:4].numpy(), expected.double().numpy(), sum_check=False).pvalue
        assert bool(pvalue > 0.001) is holds


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def test_generation_without_noise_is_greedy_decoding(tiny: LlamaForCausalLM) -> None:
    """Left-padded prompts of several lengths, read once for 3 draws, ended rows dropped: as `generate`, row by row."""
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 9, 5, 7, 2, 8, 4, 6]
    ids = torch.randint(3, 23, (len(lengths), 9), generator=generator)
    mask = torch.stack([torch.arange(9) >= 9 - n for n in lengths]).long()
    ids = ids * mask
    new = make._generate(tiny, tokenizer, {"input_ids": ids, "attention_mask": mask}, 3, 1e-5, generator)
    ended = 0
    for i, n in enumerate(lengths):
        alone = tiny.generate(ids[i : i + 1, 9 - n :], max_new_tokens=make.MAX_NEW_TOKENS, do_sample=False)[0, n:]
        ended += bool((alone == 2).any())
        expected = torch.zeros(make.MAX_NEW_TOKENS, dtype=torch.long)
        expected[: len(alone)] = alone
        for row in new[3 * i : 3 * i + 3]:
            assert torch.equal(row, expected)
    assert 0 < ended < len(lengths)  # both kinds of row were seen


@pytest.mark.parametrize(
    ("response", "finished", "kept"),
    [
        (GOOD, True, True),
        (GOOD, False, False),
        (GOOD.rstrip("."), True, False),
        ("The river flows.", True, False),
        ("The road goes slowly past the old town.", True, False),  # off the topic
        ("I'm sorry, but the river is not known to me.", True, False),
        ("The river the river the river the river flows.", True, False),
        ("The river flows slowly\npast the old town.", True, False),
        (GOOD.rstrip(".") + " and on" * 8 + ".", True, False),
        ("", True, False),
    ],
)
def test_demonstrations_are_selected_by_form(response: str, finished: bool, kept: bool) -> None:
    assert make.is_demonstration(Completion(PROMPT, response, finished)) is kept


def test_selection_keeps_the_first_different_answers() -> None:
    drafts = [Completion(PROMPT, GOOD.replace("old", w), True) for w in ("old", "old", "new", "big", "red", "tiny")]
    kept = [c.response.split()[-2] for c in make._select(drafts)]
    assert kept == ["old", "new", "big"]


def test_pairs_use_each_answer_once_and_never_twice_the_same() -> None:
    answers = [Completion("p", r, True) for r in "abccde"] + [Completion("q", r, True) for r in "xyz"]
    pairs = [(p["prompt"], p["response_a"], p["response_b"]) for p in make.pair_up(answers)]
    assert pairs == [("p", "a", "b"), ("p", "d", "e"), ("q", "x", "y")]
