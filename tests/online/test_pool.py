"""Candidates are kept as they were drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.world import World
from private_rlhf.data.render import Renderer
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.online.pool import CandidateSampler, block_path, draw_blocks, load_blocks
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import RewardModel
from safetensors.torch import load_file, save_file

PROMPTS: list[Any] = ["the quick fox", "rivers"]
CAP = 6


@torch.no_grad()
def log_prob(model: Any, prompt: list[int], response: list[int], temperature: float) -> float:
    """log π of a whole response, one forward pass."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return float(logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None]).sum())


@pytest.fixture
def sampler(checkpoint: Path) -> CandidateSampler:
    """A policy that ends its answers more often than π_ref."""
    tokenizer, policy = load_tokenizer(checkpoint), load_causal_lm(checkpoint, "float32")
    bias = torch.zeros(policy.config.vocab_size)
    bias[tokenizer.eos_token_id] = 3.0
    policy.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits + bias)
    backbone = RewardModel(build_reward_backbone(checkpoint))
    return CandidateSampler(
        policy, backbone, Renderer(tokenizer, 64, CAP), 8, reference=load_causal_lm(checkpoint, "float32")
    )


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_ratios_are_of_the_tokens_that_were_drawn(
    sampler: CandidateSampler, tmp_path: Path, temperature: float
) -> None:
    """An answer that was cut at the cap has no end of turn: nobody drew one."""
    keep, renderer, end = tmp_path / "train", sampler.renderer, sampler.renderer.tokenizer.eos_token_id
    draw_blocks(replace(sampler, temperature=temperature), PROMPTS, 8, keep, 0, World(0, 1))
    drawn = load_blocks(PROMPTS, keep, renderer)
    cut = 0
    for prompt, texts, answers, ratios in zip(PROMPTS, drawn.texts, drawn.tokens, drawn.log_ratio, strict=True):
        for text, tokens, ratio in zip(texts, answers, ratios.tolist(), strict=True):
            assert text == renderer.text(tokens)
            assert tokens[-1] == end or len(tokens) == CAP
            cut += tokens[-1] != end
            ours, theirs = (log_prob(model, renderer.prompt_ids(prompt), tokens, temperature)
                            for model in (sampler.policy, sampler.reference))  # fmt: skip
            assert ratio == pytest.approx(theirs - ours, abs=1e-3)
    assert 0 < cut < 16
    path = block_path(keep, 0)
    save_file(load_file(path), path, {"texts": json.dumps(drawn.texts)})  # as an earlier program wrote it
    old = load_blocks(PROMPTS, keep, renderer)
    assert old.tokens == [[renderer.response_ids(text) for text in texts] for texts in drawn.texts]
    assert torch.equal(old.log_ratio, drawn.log_ratio)
