"""Architectures other than Llama: sampled as a plain loop samples, windows and value widths of their own included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from private_rlhf.lm.generate import Sampling, draw, noise_of, sample_responses
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.lm.saving import save_merged
from private_rlhf.recipe import LoraSettings
from support.families import FAMILIES, WINDOW, family_checkpoint

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers"]
PROMPTS = [[5, 9, 20, 31, 7] * 6, [8, 9, 7] * 3, [8, 9, 7, 8, 9, 7, 8, 9, 7, 4]]  # one is longer than a window
KEYS = [1, 2, 3]
SAMPLING = Sampling(12)
SAMPLED = {"DeepSeek-V3", "Gemma-2", "Gemma-3 text", "GPT-2", "gpt-oss", "Mistral (sliding window)"}
SAVED = {"DeepSeek-V3", "GPT-2", "Mixtral", "OLMoE", "Qwen3-MoE", "Qwen3-Next"}
REFUSED = {"Falcon-H1", "Gemma-3 multimodal", "Mamba"}


def families(default: set[str]) -> list[Any]:
    """All that are not refused; those besides `default` are slow tests."""
    kept = [family for family in FAMILIES if family not in REFUSED]
    return [family if family in default else pytest.param(family, marks=pytest.mark.slow) for family in kept]


@torch.no_grad()
def plain_loop(model: Any, prompt: list[int], key: int, end: int) -> list[int]:
    """A response without padding, cache or company."""
    noise, response = noise_of([key], SAMPLING.max_new_tokens), []
    while len(response) < SAMPLING.max_new_tokens and response[-1:] != [end]:
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[:, -1]
        response.append(int(draw(logits, noise[:, len(response)], SAMPLING)))
    return response


@pytest.mark.parametrize("family", families(SAMPLED))
def test_sampling_is_that_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    model = load_causal_lm(family_checkpoint(family, tmp_path, TEXTS), "float32")
    assert len(PROMPTS[0]) > WINDOW
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    found = sample_responses(model, PROMPTS, KEYS, SAMPLING, pad_token_id=pad, eos_token_id=end, batch_size=4)
    assert found == [plain_loop(model, prompt, key, end) for prompt, key in zip(PROMPTS, KEYS, strict=True)]


@torch.no_grad()
def adapted(checkpoint: Path) -> Any:
    """A LoRA model whose adapter does something."""
    model = add_lora(load_causal_lm(checkpoint, "float32"), LoraSettings(rank=4), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.1, generator=generator)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", families(SAVED))
def test_what_is_saved_under_lora_is_what_was_trained(family: str, tmp_path: Path) -> None:
    """Experts are fused tensors, and GPT-2's layers transposed: a merge of Linear layers alone leaves them out."""
    source = family_checkpoint(family, tmp_path / "source", TEXTS)
    model, tokenizer = adapted(source), load_tokenizer(source)
    model.base_model.model.config.output_router_logits = True  # as TRL's SFT leaves it
    ids = torch.tensor(PROMPTS[:1])
    expected = model(input_ids=ids, use_cache=False).logits
    save_merged(Accelerator(cpu=True), model, tokenizer, tmp_path / "model", "float32")
    saved = load_causal_lm(tmp_path / "model", "float32")
    torch.testing.assert_close(saved(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not getattr(saved.config, "output_router_logits", False)
    with model.disable_adapter():
        difference = (model(input_ids=ids, use_cache=False).logits - expected).abs().max()
    assert difference > 1e-3  # Cohere scales its logits down
