"""A reward trainer on a tiny model: what the tests of training share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.reward_models.trainer import PrivateRewardTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import RewardConfig

OF_THE_TRAINER = ("loss", "peft_config", "eval_dataset", "model", "callbacks", "share_prompts")


def save_llama(folder: Path, **sizes: int) -> Path:
    """A causal LM of 64 tokens with random weights; pad 0, bos 1, eos 2."""
    ids = {"vocab_size": 64, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**ids, **sizes)).save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens <pad>, <s>, </s>, w3 ... w63, split at spaces."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_rows(n: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def sequence() -> list[int]:
        length = int(torch.randint(3, 9, (1,), generator=generator))
        return torch.randint(2, 64, (length,), generator=generator).tolist()

    return Dataset.from_dict({f"{side}_ids": [sequence() for _ in range(n)] for side in ("chosen", "rejected")})


def make_trainer(causal_lm: Path, output: Path, kind: Any = PrivateRewardTrainer, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    settings = {"noise": 1.0, "reward_bound": 4.0, "train_dataset": make_rows(), "processing_class": make_tokenizer()}
    for name, value in changes.items():
        (settings if name in {*settings, *OF_THE_TRAINER} else arguments)[name] = value
    if "model" not in settings:
        settings["model"] = build_reward_backbone(causal_lm)
        set_score_weight(settings["model"], 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(4)))
    if kind is not PrivateRewardTrainer:
        settings = {name: value for name, value in settings.items() if name not in ("noise", "reward_bound")}
    return kind(args=RewardConfig(**arguments), **settings)


def step_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
