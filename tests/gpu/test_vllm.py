"""vLLM on an exported policy: its chat rendering gives the token ids of training. Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from private_rlhf.data.render import Renderer
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from transformers import AutoModelForCausalLM

vllm: Any = pytest.importorskip("vllm", reason="vLLM is not installed: it asks for a torch of its own")
QUESTION = {"role": "user", "content": "Name a river."}


def test_a_chat_has_the_prompt_ids_of_training(checkpoint_path: Path, tmp_path: Path) -> None:
    renderer = Renderer(load_tokenizer(checkpoint_path), 400, 32, system_prompt="")
    AutoModelForCausalLM.from_pretrained(checkpoint_path).save_pretrained(tmp_path)
    tokenizer_as_trained(renderer).save_pretrained(tmp_path)
    model = vllm.LLM(str(tmp_path), enforce_eager=True, max_model_len=512)
    (answer,) = model.chat([QUESTION], vllm.SamplingParams(max_tokens=4))
    assert answer.prompt_token_ids == renderer.prompt_ids("Name a river.")
