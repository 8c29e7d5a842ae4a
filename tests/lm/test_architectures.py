"""Architectures other than Llama: sampled as a plain loop samples, windows and value widths of their own included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import WINDOW, family_checkpoint

from pipeline.lm.generate import Sampling, draw, noise_of, sample_responses
from pipeline.lm.models import load_causal_lm

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers"]
PROMPTS = [[5, 9, 20, 31, 7] * 6, [8, 9, 7] * 3, [8, 9, 7, 8, 9, 7, 8, 9, 7, 4]]  # one is longer than a window
KEYS = [1, 2, 3]
SAMPLING = Sampling(12)
SAMPLED = ["DeepSeek-V3", "Gemma-2", "Gemma-3 text", "GPT-2", "gpt-oss", "Mistral (sliding window)"]


@torch.no_grad()
def plain_loop(model: Any, prompt: list[int], key: int, end: int) -> list[int]:
    """A response without padding, cache or company."""
    noise, response = noise_of([key], SAMPLING.max_new_tokens), []
    while len(response) < SAMPLING.max_new_tokens and response[-1:] != [end]:
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[:, -1]
        response.append(int(draw(logits, noise[:, len(response)], SAMPLING)))
    return response


@pytest.mark.parametrize("family", SAMPLED)
def test_sampling_is_that_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    model = load_causal_lm(family_checkpoint(family, tmp_path, TEXTS), "float32")
    assert len(PROMPTS[0]) > WINDOW
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    found = sample_responses(model, PROMPTS, KEYS, SAMPLING, pad_token_id=pad, eos_token_id=end, batch_size=4)
    assert found == [plain_loop(model, prompt, key, end) for prompt, key in zip(PROMPTS, KEYS, strict=True)]
