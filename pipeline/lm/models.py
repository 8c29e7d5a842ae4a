"""Loading the base model, π_ref and the policy (`lm.saving` writes them), with adapters and in 4 bits.

bitsandbytes computes with the dequantised NF4 weight: a trained adapter has learnt to correct that, not the original.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.core.errors import UserError, one_line, say
from private_rlhf.core.world import declared_world, on_cpu
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.kernels.linear_layers import speed_up
from private_rlhf.lm.model_folders import positions_of
from private_rlhf.lm.templates import end_of_turn, give_plain_template
from private_rlhf.recipe import LoraSettings
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CAUSAL_MASKS = ".masked_bias", ".attn.bias", ".attention.bias"
"""Ends of the names of masks in old checkpoints of the GPT family, which the models now make themselves."""


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences transformers' bars for loading and saving, which a small checkpoint turns into noise."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def load_tokenizer(
    path: str | Path, *, revision: str | None = None, plain_template: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder or hub id (at `revision`), left as saved but for three things: its
    end-of-sequence is the chat template's end of turn, its padding token is another one, and it knows how many tokens
    the model takes.

    plain_template: a tokenizer without a chat template gets that of `lm.templates`. UserError: the tokenizer, its chat
    template or a token for padding is missing.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision)
    except (OSError, ValueError):
        raise UserError(f"{path} must hold a tokenizer that transformers can load: give a whole checkpoint") from None
    if tokenizer.chat_template is None:
        if not plain_template:
            raise UserError(f"the tokenizer of {path} must have a chat template: save the one it was trained with")
        give_plain_template(tokenizer)
        if declared_world().main:
            line = f"the tokenizer of {path} has no chat template: a plain one is used and saved (turns under 'User:')"
            say(line)
    tokenizer.eos_token = end_of_turn(tokenizer) or tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} must have an end-of-sequence token: set one in its config")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer, str(path))
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions_of(Path(path)) or math.inf)
    return tokenizer


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: the tokenizer's end-of-turn, and those in the model's `generation_config`."""
    ids = getattr(getattr(unwrap(model), "generation_config", None), "eos_token_id", None)
    return frozenset([tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])]) - {None}


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
    """A causal LM in evaluation mode (dropout off), all weights in `dtype`; `revision` is of a hub id. four_bit: its
    linear layers but the output layer are NF4, computed in `dtype`. UserError: it is not whole, or bitsandbytes is
    missing."""
    more = four_bit_options(DTYPES[dtype]) if four_bit else {}
    try:
        model = load_whole(AutoModelForCausalLM, path, dtype=DTYPES[dtype], revision=revision, **more)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = one_line(str(error), 200)
        raise UserError(f"{path} must be a whole causal-LM checkpoint, got {cause}: check or make it again") from None
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_contiguous_input)
    if four_bit:
        keep_differentiable(model)
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # sampling would compute router losses, on a mask they cannot take
    return use_grouped_attention(model.eval())


def load_policy(path: str | Path, dtype: str, lora: LoraSettings | None, seed: int, **how: Any) -> Any:
    """The causal LM at `path` to be trained: frozen in `dtype` under a fresh adapter, or without `lora` all its weights
    in float32. how: as of `load_causal_lm`. UserError as of `load_causal_lm` and `add_lora`."""
    base = load_causal_lm(path, dtype if lora else "float32", **how)
    return add_lora(base, lora, seed) if lora else base


def load_whole(loader: Any, path: str | Path, allowed: Callable[[str], bool] = lambda _: False, **how: Any) -> Any:
    """`loader.from_pretrained(path, **how)` of a checkpoint with the model's weights and no others.

    ValueError where other weights than the `allowed` ones are missing (transformers would draw them) or superfluous.
    """
    with no_progress_bars():
        model, info = loader.from_pretrained(str(path), output_loading_info=True, **how)
    for problem in ("missing", "unexpected", "mismatched"):
        keys = map(str, info[f"{problem}_keys"])
        masks = CAUSAL_MASKS if problem == "unexpected" else ()
        names = sorted(name for name in keys if not (allowed(name) or name.endswith(masks)))
        if names:
            raise ValueError(f"{len(names)} {problem} weights, such as {names[0]}")
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside a PEFT wrapper (adapters stay active), or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def _contiguous_input(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies a slice of the hidden states before the output layer: on a non-contiguous (B, C, d) input PyTorch's CPU
    matmul expands the (V, d) weight B times, 7 GB at B = 128."""
    return (arguments[0].contiguous(), *arguments[1:])


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> Any:
    """`model` frozen under a fresh float32 LoRA adapter that starts as the identity (B = 0); random state untouched.

    UserError where the model lacks modules of these names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return speed_up(get_peft_model(model, lora_config(settings, "CAUSAL_LM", model)))
        except ValueError as error:
            if "arget modules" not in str(error):
                raise
            raise UserError(
                f"lora.target_modules must be modules of these layers, got {settings.target_modules}: name others,"
                " such as [q_proj, v_proj], or all-linear"
            ) from None


def lora_config(settings: LoraSettings, task_type: str, model: PreTrainedModel) -> LoraConfig:
    """The peft configuration of `settings` for a `model`; `last_layers` counts from the top. UserError where the model
    lacks one of the named modules: peft would adapt the others in silence."""
    modules = [f".{name}" for name, _ in model.named_modules()]
    targets = [] if isinstance(settings.target_modules, str) else settings.target_modules
    if missing := [target for target in targets if not any(name.endswith(f".{target}") for name in modules)]:
        raise UserError(f"lora.target_modules must be modules of the model, got {missing}: name others, or all-linear")
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


def four_bit_options(compute_dtype: torch.dtype, skip: list[str] | None = None) -> dict[str, Any]:
    """Options of `from_pretrained`: NF4 for linear layers but those in `skip` (None: the output layer of an LM).

    UserError where bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("4-bit loading needs bitsandbytes: install it with pip install 'private-rlhf[quant]'")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=skip,  # 4-bit loading reads this list too
    )
    place = {"device_map": {"": "cpu"}} if on_cpu() else {}  # bitsandbytes would load to a GPU all the same
    return {"quantization_config": config, **place}


def is_four_bit(model: nn.Module) -> bool:
    """True if transformers loaded the model in 4 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def keep_differentiable(model: nn.Module) -> None:
    """Switches off bitsandbytes' repacking for CPUs with AVX512-bf16, after which a layer's kernel has no gradient."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


@torch.no_grad()
def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a 4-bit model, in a PEFT wrapper or by itself, on the CPU: floating-point tensors in float32,
    and in the place of 4-bit weights those (out, in) that their layers compute with."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, Linear4bit)}
    packed = tuple(f"{name}.weight" for name in layers)  # and what goes with it: `weight.absmax` and the like
    others = {name: value.cpu() for name, value in model.state_dict().items() if not name.startswith(packed)}
    state = {name: value.float() if value.is_floating_point() else value for name, value in others.items()}
    for name, layer in layers.items():
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().cpu()
        state[f"{name}.weight"] = weight.reshape(layer.out_features, layer.in_features)
    return state


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing, in place, also in evaluation mode, where transformers' own switch does not act. UserError
    where the model has no layers that transformers would checkpoint."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"ppo.gradient_checkpointing must be false for {type(model).__name__}: set it")
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing is random here
