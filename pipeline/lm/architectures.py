"""Checks of a base model that need its config and none of its weights, made before any stage."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from private_rlhf.core.errors import UserError
from private_rlhf.lm.models import add_lora
from private_rlhf.lm.smollm2 import smollm2_config
from private_rlhf.lm.tiny import tiny_config
from private_rlhf.recipe import LoraSettings, ModelConfig
from transformers import AutoConfig, AutoModelForCausalLM


def base_config(model: ModelConfig, local: bool = True) -> Any | None:
    """The config of a recipe's base model. None for a hub id that this machine's cache lacks, unless not `local`.

    Raises:
        UserError: transformers knows no such config, or it contradicts itself.
    """
    if model.source == "tiny":
        return tiny_config(512, 2, 0)
    if model.source == "smollm2":
        return smollm2_config()
    folder = Path(model.source).expanduser()
    source = folder if folder.is_dir() else model.source
    try:
        return AutoConfig.from_pretrained(source, revision=model.revision, local_files_only=local)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        if local and not folder.is_dir():
            return None
        raise UserError(f"model.source {source}: {one_line(error)}: give another checkpoint") from None


def check_architecture(
    source: str,
    config: Any,
    adapters: Mapping[str, LoraSettings | None],
    num_layers: int | None = None,
    four_bit: bool = False,
) -> None:
    """Builds a base model on the meta device, puts each adapter on a copy of it and merges it.

    Args:
        source: `model.source`, for messages.
        config: of the base model (`base_config`).
        adapters: settings by their key in the recipe, such as `sft.lora`; None: not an adapter.
        num_layers: that the reward model keeps; None: all.
        four_bit: the base is quantised by some stage.

    Raises:
        UserError: several modalities, no cache of keys and values, heads or token ids that do not fit, fewer layers
            than the reward keeps, or adapters that peft cannot put on or merge.
    """
    name = f"model.source {source} ({config.model_type})"
    if config.get_text_config() is not config:
        raise UserError(f"{name} has several modalities: give a text-only checkpoint of the family")
    model = skeleton(config, name)
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} keeps a state instead of keys and values, which sampling needs: give a transformer")
    check_layers(num_layers, config, f"model.source {source}")
    for key, settings in adapters.items():
        if settings is not None:
            check_adapter(copy.deepcopy(model), settings, name, key)
    if four_bit and fused_experts(model):
        raise UserError(f"{name} has experts, which 4 bits are not for: set ppo.quantize and reward.quantize to null")


def skeleton(config: Any, name: str) -> Any:
    """The causal LM without weights. UserError for a config that makes none."""
    heads, groups = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and groups and heads % groups:
        raise UserError(f"{name}: {groups} key-value heads do not divide {heads} heads: give another checkpoint")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise UserError(f"{name} is no causal language model: give one") from None
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"{name}: {one_line(error)}: correct its config.json, or give another checkpoint") from None


def check_layers(num_layers: int | None, config: Any, name: str) -> None:
    """UserError where reward.num_layers asks for more layers than the model `name` has."""
    layers = config.get_text_config().num_hidden_layers
    if num_layers is not None and num_layers > layers:
        raise UserError(f"reward.num_layers must be at most {layers}, the layers of {name}, got {num_layers}: lower it")


_OTHER_MODALITY = re.compile("image|audio|video|vision")


def check_tokens(tokenizer: Any, config: Any, source: str) -> None:
    """UserError where the tokenizer has an id that the model's vocabulary lacks.

    Of a text-only checkpoint, marks of other modalities may be over it (Gemma 3): texts do not hold them.
    """
    size = config.get_text_config().vocab_size
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: -item[1]):
        if number < size:
            return
        if not _OTHER_MODALITY.search(token):
            raise UserError(
                f"model.source {source}: its tokenizer has {token} at id {number}, and its model has {size} ids: give "
                "a checkpoint whose embeddings were resized to its tokenizer"
            )


def check_adapter(model: Any, settings: LoraSettings, name: str, key: str) -> None:
    """An adapter that peft can put on `model` (no weights needed; it is spoilt) and merge. UserError: it cannot."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of peft, which the stage will give again
            add_lora(model, settings, 0).merge_and_unload()
    except UserError as error:  # it begins with lora.target_modules
        raise UserError(f"{key.removesuffix('lora')}{error}") from None
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise UserError(
            f"{name} under {key}: {one_line(error)}: name other target_modules, or set it null"
        ) from None


def fused_experts(model: Any) -> bool:
    """Whether a model keeps its experts in tensors of three dimensions instead of linear layers."""
    return any(parameter.dim() == 3 and "experts" in name for name, parameter in model.named_parameters())


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
