"""A tiny Llama with its tokenizer on disk, and one with eight tokens to enumerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.lm.tiny import tiny_checkpoint, tiny_config

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers", "12345 ünïcode"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", TEXTS)


@pytest.fixture
def small() -> LlamaForCausalLM:
    """Eight tokens; pad 0, end-of-turn 1. Far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(8, 1, 0)).eval()
    model.lm_head.weight.data.mul_(3)  # peaked, so that tests of the sampler can tell near misses
    return model
