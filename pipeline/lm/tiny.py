"""A tiny random Llama with a real tokenizer, built in memory: what `configs/tiny.yaml` and the tests run on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from private_rlhf.lm.made_once import make_once
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_checkpoint(folder: Path, texts: Iterable[str], seed: int = 0) -> Path:
    """Builds the model and tokenizer under `folder` once, and returns it.

    Args:
        folder: where the checkpoint is kept.
        texts: what the byte-level BPE vocabulary (512 entries) is trained on.
        seed: of the random weights.
    """

    def make(new: Path) -> None:
        tokenizer = tiny_tokenizer(texts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(tiny_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id))
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)

    return make_once(folder, make)


def tiny_config(vocab_size: int, eos_token_id: int, pad_token_id: int) -> LlamaConfig:
    """Two layers of width 64: the Llama architecture at a hundred-thousandth of its size."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=pad_token_id,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML markers; pad and end-of-turn are different tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
