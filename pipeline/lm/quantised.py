"""4-bit bases for LoRA (QLoRA): how they are loaded, and how they become ordinary checkpoints again.

bitsandbytes stores a linear layer as NF4 codes with float32 scales and computes with the dequantised weight in the
dtype of its input. A trained adapter has learned to correct that weight, not the original one, so the released
checkpoint holds dequantised weight + adapter: the same function, readable without bitsandbytes.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any, cast

import torch
from private_rlhf.core.world import on_cpu
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel


def four_bit_config(compute_dtype: torch.dtype, skip: list[str] | None) -> BitsAndBytesConfig:
    """NF4 for every linear layer but those named in `skip` (None: the output layer of a language model).

    ValueError when bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("4-bit loading needs bitsandbytes: install it with pip install 'private-rlhf[quant]'")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=skip,  # 4-bit loading reads this list too
    )


def four_bit_place() -> dict[str, Any]:
    """Options of `from_pretrained`: bitsandbytes would load to a GPU even where the CPU is asked for."""
    return {"device_map": {"": "cpu"}} if on_cpu() else {}


def is_four_bit(model: nn.Module) -> bool:
    """Whether transformers loaded the model in 4 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def keep_differentiable(model: nn.Module) -> None:
    """Switch bitsandbytes' repacking for CPUs off.

    With AVX512-bf16 the first forward pass in evaluation mode repacks a weight, and from then on, in training mode too,
    the layer is computed by a kernel without a gradient: training after an evaluation would go on in silence with the
    gradient cut below every layer.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


@torch.no_grad()
def dense_copy(inner: nn.Module) -> PreTrainedModel:
    """`inner`, the 4-bit model in a PEFT wrapper or by itself, as an ordinary float32 model in eval mode on the CPU.
    Adapters that are switched on are merged; the score layer is left to the caller.
    """
    from bitsandbytes.nn import Linear4bit
    from peft.tuners.lora import LoraLayer

    state: dict[str, Tensor] = {}
    merged: set[str] = set()
    for name, module in inner.named_modules():
        adapted = isinstance(module, LoraLayer)
        layer: Any = cast(Any, module).base_layer if adapted else module
        if (adapted or isinstance(layer, Linear4bit)) and not any(name.startswith(f"{done}.") for done in merged):
            weight = _dequantized(layer) if isinstance(layer, Linear4bit) else layer.weight.float().cpu()
            state[f"{name}.weight"] = weight + _adapter(module)
            if getattr(layer, "bias", None) is not None:
                state[f"{name}.bias"] = layer.bias.float().cpu()
            merged.add(name)
    tensors = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers()]  # tied ones by both names
    for name, parameter in tensors:
        if not any(name.startswith(f"{done}.") for done in merged):
            state[name] = parameter.detach().float().cpu() if parameter.is_floating_point() else parameter.cpu()
    config = copy.deepcopy(cast(Any, inner).config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dense = type(inner)(config)
    wanted = [name for name in dense.state_dict() if name != "score.weight"]
    if lost := [name for name in wanted if name not in state]:
        raise RuntimeError(f"no weights for {', '.join(lost)} in the 4-bit model")
    dense.load_state_dict({name: state[name] for name in wanted}, strict=False)
    if hasattr(inner, "generation_config"):
        dense.generation_config = copy.deepcopy(inner.generation_config)
    return cast(PreTrainedModel, dense.float().eval())


def _dequantized(layer: Any) -> Tensor:
    """The weight a 4-bit layer computes with, (out, in) float32."""
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    return dequantize_4bit(weight.data, weight.quant_state).float().cpu().reshape(layer.out_features, layer.in_features)


def _adapter(module: nn.Module) -> Tensor | float:
    """The active adapters' update of a LoRA layer (out, in) float32; 0 for a plain layer or one switched off."""
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, LoraLayer) or module.disable_adapters:
        return 0.0
    updates = [cast(Any, module).get_delta_weight(name).float().cpu() for name in module.active_adapters]
    return cast(Tensor, sum(updates))
