"""Tiny random models of many architectures: width 64, two layers, four heads, the tiny tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from private_rlhf.lm.base_models import tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = 16

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SIZES),
    "Qwen2": ("qwen2", SIZES),
    "Qwen3": ("qwen3", SIZES),
    "Mistral": ("mistral", {**SIZES, "sliding_window": None}),
    "Mistral (sliding window)": ("mistral", {**SIZES, "sliding_window": WINDOW}),
    "SmolLM3": ("smollm3", SIZES),
    "Gemma-1": ("gemma", SIZES),
    "Gemma-2": ("gemma2", {**SIZES, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "Gemma-3 text": (
        "gemma3_text",
        {**SIZES, "num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    ),
    "Phi": ("phi", SIZES),
    "Phi-3": ("phi3", {**SIZES, "sliding_window": None}),
    "OPT": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 512,
            "init_std": 0.08,
        },
    ),
    "BLOOM": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.08}),
    "GPT-2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.08}),
    "GPT-NeoX": ("gpt_neox", SIZES),
    "StableLM": ("stablelm", SIZES),
    "StarCoder2": ("starcoder2", {**SIZES, "sliding_window": None}),
    "OLMo2": ("olmo2", SIZES),
    "OLMoE": ("olmoe", {**SIZES, **EXPERTS}),
    "Mixtral": ("mixtral", {**SIZES, **EXPERTS, "sliding_window": None}),
    "Qwen3-MoE": ("qwen3_moe", {**SIZES, **EXPERTS}),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **SIZES,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gpt-oss": ("gpt_oss", {**SIZES, **EXPERTS, "sliding_window": WINDOW}),
    "Granite": ("granite", SIZES),
    "Cohere": ("cohere", SIZES),
    "Gemma-3 multimodal": (
        "gemma3",
        {
            "text_config": {**SIZES, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "Falcon-H1": (
        "falcon_h1",
        {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    ),
    "Mamba": ("mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
}


def family_checkpoint(name: str, folder: Path, texts: Iterable[str], seed: int = 0) -> Path:
    """A tiny random model of the family `name` (a key of `FAMILIES`) with its tokenizer, saved in `folder`."""
    model_type, settings = FAMILIES[name]
    tokenizer: Any = tiny_tokenizer(texts)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    words = {"vocab_size": len(tokenizer), **special}
    inner = {"text_config": {**settings["text_config"], **words}} if "text_config" in settings else {}
    config = CONFIG_MAPPING[model_type](**{**settings, **words, **inner})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
