"""The SFT model's first layers as what the reward reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.lm.base_models import check_layers
from private_rlhf.lm.models import DTYPES
from private_rlhf.recipe import RewardConfig
from private_rlhf.reward_models.model import build_reward_backbone
from safetensors import SafetensorError
from transformers import AutoConfig


def load_backbone(path: Path, settings: RewardConfig, dtype: str, pad_token_id: int | None) -> Any:
    """The SFT model's first layers as a reward backbone with a zero head.

    path: of the causal LM. dtype: a key of `DTYPES`. pad_token_id: of the tokenizer that pads its texts.

    Raises:
        UserError: the checkpoint is not whole, has fewer layers than reward.num_layers, or cannot be quantised.
    """
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
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{path} does not serve as reward backbone ({cause}): run again with --from sft") from None
