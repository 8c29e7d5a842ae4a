"""Whether an architecture can be trained, sampled and saved here: tried without weights, before any stage."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.recipe_parts import LoraSettings
from pipeline.lm.models import add_lora


def check_architecture(recipe: Recipe, folder: str) -> None:
    """Builds the base model of a recipe on the meta device, puts its adapters on and merges them.

    Args:
        recipe: its adapters and quantisation.
        folder: the base model's checkpoint, or its hub id.

    Raises:
        UserError: several modalities, no cache of keys and values, or adapters that peft cannot put on or merge.
    """
    try:
        config = AutoConfig.from_pretrained(folder, revision=recipe.model.revision)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.source {folder}: {one_line(error)}: give another checkpoint") from None
    name = f"model.source {folder} ({config.model_type})"
    if config.get_text_config() is not config:
        raise UserError(f"{name} has several modalities: give a text-only checkpoint of the family")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise UserError(f"{name} is no causal language model: give one") from None
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} keeps a state instead of keys and values, which sampling needs: give a transformer")
    adapters = {"sft.lora": recipe.sft.lora, f"{recipe.aligner}.lora": getattr(recipe, recipe.aligner).lora}
    for key, settings in adapters.items():
        if settings is not None:
            check_adapter(copy.deepcopy(model), settings, f"{name} under {key}")
    if fused_experts(model) and (recipe.ppo.quantize or recipe.reward.quantize):
        raise UserError(f"{name} has experts, which 4 bits are not for: set ppo.quantize and reward.quantize to null")


def check_adapter(model: Any, settings: LoraSettings, name: str) -> None:
    """An adapter that peft can put on `model` (no weights needed; it is spoilt) and merge. UserError: it cannot."""
    try:
        add_lora(model, settings, 0).merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise UserError(f"{name}: {one_line(error)}: name other target_modules, or set it null") from None


def fused_experts(model: Any) -> bool:
    """Whether a model keeps its experts in tensors of three dimensions instead of linear layers."""
    return any(parameter.dim() == 3 and "experts" in name for name, parameter in model.named_parameters())


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
