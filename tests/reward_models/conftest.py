"""A tiny Llama causal LM on disk, shared by the tests of models, checkpoints and the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reward_trainers import save_llama


@pytest.fixture(scope="session")
def tiny_causal_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, 32 features, 64 tokens; pad 0, bos 1, eos 2."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2}
    return save_llama(tmp_path_factory.mktemp("lm") / "tiny", **sizes)
