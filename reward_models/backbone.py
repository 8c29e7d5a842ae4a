"""The reward backbone before and after training: the first layers of a causal LM with a zero head, and its merge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from private_rlhf.core.errors import UserError, one_line
from private_rlhf.lm.base_models import check_layers
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.models import DTYPES, four_bit_options, is_four_bit, keep_differentiable, load_whole, unwrap
from private_rlhf.lm.saving import whole_copy
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.model import check_pad_token, classifier_class, score_layer, set_score_weight
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def build_reward_backbone(
    causal_lm_path: str | Path,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    pad_token_id: int | None = None,
    four_bit: bool = False,
    token_sum: bool = False,
) -> PreTrainedModel:
    """A sequence classifier on the (first `num_layers`) layers of a causal LM, its final norm kept, with a float32
    score layer of zeros, of two outputs with `token_sum`; in eval mode.

    `dtype` is that of the backbone, `four_bit` quantises its linear layers to NF4. ValueError when `num_layers` is out
    of range, a weight or bitsandbytes is missing, or the pad token is missing or equal to eos.
    """
    config = AutoConfig.from_pretrained(causal_lm_path)
    text = config.get_text_config()
    config.num_labels = 2 if token_sum else 1
    if pad_token_id is not None:
        text.pad_token_id = pad_token_id
    check_pad_token(config)
    if num_layers is not None:
        if not 1 <= num_layers <= text.num_hidden_layers:
            raise ValueError(f"num_layers must lie between 1 and {text.num_hidden_layers}, got {num_layers}")
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[:num_layers]
    loader = classifier_class(cast(Any, type(config)))

    def allowed(name: str) -> bool:
        layer = LAYER.search(name)
        cut = layer is not None and int(layer.group(1)) >= text.num_hidden_layers
        outside = not name.startswith(f"{loader.base_model_prefix}.")  # as the output layer is
        return name == "score.weight" or outside or cut

    more = four_bit_options(dtype, ["score"]) if four_bit else {}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # no report of the head and the layers that are left out
    try:
        model = load_whole(loader, causal_lm_path, allowed, config=config, dtype=dtype, **more)
    finally:
        transformers_logging.set_verbosity(verbosity)
    set_score_weight(model, torch.zeros(score_layer(model).weight.numel()))
    if four_bit:
        keep_differentiable(model)
    return cast(PreTrainedModel, use_grouped_attention(model.eval()))


def load_backbone(path: Path, settings: RewardConfig, dtype: str, pad_token_id: int | None) -> Any:
    """The first layers of the causal LM at `path` as a reward backbone with a zero head. dtype: a key of `DTYPES`.
    pad_token_id: of the tokenizer that pads its texts. UserError: it is not whole, has fewer layers than
    reward.num_layers, or cannot be quantised."""
    try:
        check_layers(settings.num_layers, AutoConfig.from_pretrained(path), str(path))
        return build_reward_backbone(
            path,
            settings.num_layers,
            DTYPES[dtype],
            pad_token_id=pad_token_id,
            four_bit=settings.quantize is not None,
            token_sum=settings.feature_blocks == 2,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = one_line(str(error), 400)
        raise UserError(f"{path} must serve as reward backbone, got {cause}: run again with --from sft") from None


def merge_adapters(model: nn.Module, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Fold LoRA adapters into the weights; a model without adapters is returned as it is. The sum is formed in float32,
    where a bfloat16 one would round most of a small adapter away, and cast to `dtype` (None: float32); the score layer
    stays in float32, and 4-bit layers become their dequantised weights."""
    if not isinstance(model, PeftModel):
        return cast(PreTrainedModel, model)
    weight = score_layer(model).weight.flatten().detach().clone()
    whole = whole_copy(model, {}, "cpu") if is_four_bit(unwrap(model)) else model
    plain = whole.float().merge_and_unload()
    plain.to(dtype or torch.float32)
    set_score_weight(plain, weight)
    return cast(PreTrainedModel, plain)
