"""The shape of a recipe's model, from its `config.json` alone: parameters are counted on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from private_rlhf.core.errors import UserError
from private_rlhf.lm.models import add_lora, base_checkpoint
from private_rlhf.lm.rows import sharing_of
from private_rlhf.lm.trunk import frozen_layers
from private_rlhf.recipe import LoraSettings, ModelConfig
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Adapter:
    """Attributes:
    trained: numbers that learn.
    adapted: numbers of the weights under the adapter, which saving merges in float32.
    layers: layers that keep activations: the first adapted one and those above.
    """

    trained: int
    adapted: int
    layers: int


@dataclass(frozen=True)
class ModelShape:
    """Attributes:
    parameters: of the causal LM, tied weights once; `linear` of them in linear layers within decoder layers.
    layers, hidden, inner, heads, groups, head_size, vocabulary: as in its config; groups are key-value heads.
    shares_rows: whether texts share what they begin with (`private_rlhf.lm.rows`).
    """

    parameters: int
    linear: int
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    shares_rows: bool

    def cut(self, layers: int | None) -> float:
        """Parameters of the embeddings and the first `layers` layers (None: all), as a reward model has them."""
        kept = self.layers if layers is None else min(layers, self.layers)
        return self.vocabulary * self.hidden + self.linear * kept / self.layers


def config_of(settings: ModelConfig, given: Path | None = None) -> Path:
    """The folder or file with the model's config: `given`, its checkpoint here, or the hub's cache.

    Raises:
        UserError: it is nowhere on this machine, or `given` does not exist.
    """
    if given is not None:
        if not given.exists():
            raise UserError(f"--model-config {given}: no such file: give the model's config.json")
        return given
    found = base_checkpoint(settings)
    if Path(found).is_dir():
        return Path(found)
    cached = try_to_load_from_cache(found, "config.json", revision=settings.revision)
    if isinstance(cached, str):
        return Path(cached)
    raise UserError(f"model.source {found} is not on this machine: give its shape with --model-config PATH/config.json")


def skeleton(config: Path) -> Any:
    """A causal LM without weights (meta device). UserError for a config that transformers does not know."""
    try:
        settings = AutoConfig.from_pretrained(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:160]
        raise UserError(f"{config} is no config of a causal language model ({cause}): give another") from None


def shape_of(model: Any) -> ModelShape:
    """The shape of a causal LM, weights there or not."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    layers = model.get_decoder().layers
    return ModelShape(
        parameters=sum(each.numel() for each in model.parameters()),
        linear=sum(each.numel() for each in layers.parameters()),
        layers=len(layers),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        groups=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        shares_rows=sharing_of(model) is not None,
    )


def adapter_of(config: Path, settings: LoraSettings | None) -> Adapter | None:
    """What an adapter of these settings trains on the model; None for training all weights.

    Raises:
        UserError: the model has no modules of the names in `settings`.
    """
    if settings is None:
        return None
    model = add_lora(skeleton(config), settings, seed=0)
    adapted = sum(each.numel() for name, each in model.named_parameters() if name.endswith(".base_layer.weight"))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    layers = len(model.get_base_model().get_decoder().layers)
    return Adapter(trained, adapted, layers - frozen_layers(model))
