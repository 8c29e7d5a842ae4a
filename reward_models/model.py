"""Reward models as ordinary `AutoModelForSequenceClassification` checkpoints with a bias-free head.

The raw score is u = w·φ, with φ the hidden state of the last attended token. Others load the checkpoint with plain
transformers and get u; the bound r(u) lives here and in the losses. The last token is found from the attention mask:
transformers finds it as "the rightmost id that is not pad", which agrees as long as no sequence ends in the pad id, and
is wrong for a tokenizer whose pad is its eos. Features and scores are float32 whatever the backbone's dtype.

A head with two outputs reads φ = (the last token's state, the sum of the states of all tokens): u is its first output
at the last token plus its second output summed over the text. What the prompt adds to that sum is the same for all its
answers, so no caller says where an answer begins. Plain transformers gives both outputs at the last token only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.kernels.linear_layers import speed_up_products
from private_rlhf.lm.models import dense_copy, four_bit_options, is_four_bit, keep_differentiable, unwrap
from private_rlhf.lm.rows import Rows, Sharing, sharing_of
from private_rlhf.reward_models.bound import bounded_reward, check_reward_bound
from private_rlhf.reward_models.classifiers import load_backbone_of
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


@contextmanager
def _expected_key_warnings_hidden() -> Iterator[None]:
    """Hide the load report: a causal LM has a head too many, a score layer too few, and maybe layers too many."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def check_pad_token(config: PretrainedConfig) -> int:
    """The pad id of a text config; ValueError when it is missing or also an end-of-sequence id."""
    text = config.get_text_config()
    pad, eos = text.pad_token_id, text.eos_token_id
    if pad is None:
        raise ValueError("the model has no pad token; pass pad_token_id (a token that no text ends with)")
    if pad in (eos if isinstance(eos, list) else [eos]):
        raise ValueError(
            f"pad_token_id {pad} is also an end-of-sequence id, so plain transformers would pool the wrong token; "
            "pass another pad_token_id"
        )
    return int(pad)


def build_reward_backbone(
    causal_lm_path: str | Path,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    pad_token_id: int | None = None,
    four_bit: bool = False,
    token_sum: bool = False,
) -> PreTrainedModel:
    """A sequence-classification model with the (first `num_layers`) layers of a causal LM and a score layer of zeros,
    of two outputs with `token_sum`.

    A truncated model keeps the final norm. `dtype` is that of the backbone; the score layer is float32. `four_bit`
    quantises the backbone's linear layers to NF4 (`quantised`). Returned in eval mode. ValueError when `num_layers` is
    out of range, a weight is missing, the pad token is missing or equal to eos, or bitsandbytes is missing.
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
    more = four_bit_options(dtype, ["score"]) if four_bit else {}
    with _expected_key_warnings_hidden():
        model = load_backbone_of(causal_lm_path, config, dtype=dtype, **more)
    set_score_weight(model, torch.zeros(score_layer(model).weight.numel()))
    if four_bit:
        keep_differentiable(model)
    return cast(PreTrainedModel, use_grouped_attention(speed_up_products(model.eval())))


def score_layer(model: nn.Module) -> nn.Linear:
    """The bias-free head, d -> 1 or d -> 2, also inside PEFT's `modules_to_save`; ValueError for a model without."""
    head = getattr(unwrap(model), "score", None)
    copies = getattr(head, "modules_to_save", None)
    if copies is not None:
        head = copies[head.active_adapters[0]]  # type: ignore[union-attr]
    if not isinstance(head, nn.Linear) or head.out_features > 2 or head.bias is not None:
        name = type(unwrap(model)).__name__
        raise ValueError(f"{name} has no bias-free `score` layer with one output; load it with num_labels=1")
    return head


class ScoreHead(nn.Linear):
    """The score layer, computed in float32 whatever the dtype of the hidden states and of autocast.

    In bfloat16 a score of 5 has a resolution of 0.03, which is what margins would be made of. The state dict is that of
    nn.Linear, so plain transformers reads it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., d) -> (..., 1 or 2) float32."""
        with torch.autocast(device_type=input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight.float())


def set_score_weight(model: nn.Module, weight: Tensor) -> None:
    """Write w, (d,) or of two outputs (2d,), into the score layer and make that a float32 `ScoreHead`."""
    head = score_layer(model)
    inner: Any = unwrap(model)
    if inner.score is head and not isinstance(head, ScoreHead):
        trainable = head.weight.requires_grad
        head = ScoreHead(head.in_features, head.out_features, bias=False, device=head.weight.device)
        head.weight.requires_grad_(trainable)
        inner.score = head
    if tuple(weight.shape) != (head.weight.numel(),):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, the score layer needs ({head.weight.numel()},)")
    head.weight = nn.Parameter(
        weight.detach().to(device=head.weight.device, dtype=torch.float32).reshape(head.weight.shape).clone(),
        requires_grad=head.weight.requires_grad,
    )


def last_token_index(attention_mask: Tensor) -> Tensor:
    """Index (B,) of the last attended token of a 0/1 mask (B, T), padded left or right. ValueError for an empty row."""
    if not bool(attention_mask.any(-1).all()):
        raise ValueError("a sequence has no attended token; drop empty texts before scoring")
    positions = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    return (positions * attention_mask.bool()).argmax(-1)


class RewardModel:
    """A sequence-classification model with its reward bound. Call `eval()` on the inner model for scoring.

    `backbone` is all of it but the score layer.
    """

    def __init__(self, model: nn.Module, *, reward_bound: float | None = None) -> None:
        self.token_sum = score_layer(model).out_features == 2
        self.model = model
        self.reward_bound = check_reward_bound(reward_bound)
        inner: Any = unwrap(model)
        self.backbone: nn.Module = getattr(inner, inner.base_model_prefix)
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters

    @property
    def config(self) -> PretrainedConfig:
        """The transformers config of the inner model."""
        return cast(PretrainedConfig, unwrap(self.model).config)

    @property
    def sharing(self) -> Sharing | None:
        """Rule by which texts may share rows (`private_rlhf.lm.rows`); None: they may not."""
        return sharing_of(self.model)

    @property
    def weight(self) -> Tensor:
        """w (f,) in the dtype it is stored in; f = d, or 2d with a token sum."""
        return score_layer(self.model).weight.flatten()

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """φ (B, f) float32 of token ids (B, T) int64 with a 0/1 mask (B, T); differentiable."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if self._takes_positions:
            # Left padding must not shift the positions.
            arguments["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        hidden = self.backbone(**arguments).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        last = hidden[rows, last_token_index(attention_mask)].float()
        if not self.token_sum:
            return last
        return torch.cat([last, torch.einsum("bt,btd->bd", attention_mask.float(), hidden.float())], dim=-1)

    def row_features(self, rows: Rows) -> Tensor:
        """φ (N, f) float32 of the sequences in `rows`, in their order; differentiable."""
        dtype: torch.dtype = cast(Any, unwrap(self.model)).dtype
        arguments: dict[str, Any] = {"attention_mask": rows.attention(dtype), "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = rows.position_ids
        hidden = self.backbone(input_ids=rows.input_ids, **arguments).last_hidden_state
        flat = hidden.flatten(0, 1)
        last = flat[rows.last].float()
        if not self.token_sum:
            return last
        columns = torch.tensor([column for path in rows.paths for column in path], device=flat.device)
        starts = torch.tensor([0, *accumulate(map(len, rows.paths[:-1]))], device=flat.device)
        return torch.cat([last, nn.functional.embedding_bag(columns, flat.float(), starts, mode="sum")], dim=-1)

    def raw_score_of(self, features: Tensor) -> Tensor:
        """u = w·φ, (B, f) -> (B,) float32."""
        return features.float() @ self.weight.float()

    def raw_score(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """u (B,) float32, what plain transformers calls the logit where the head has one output."""
        return self.raw_score_of(self.features(input_ids, attention_mask))

    def score(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The bounded reward r(u) (B,) float32."""
        return bounded_reward(self.raw_score(input_ids, attention_mask), self.reward_bound)


@torch.no_grad()
def probe_scores(model: nn.Module) -> Tensor:
    """u (4,) float32 on the CPU of four texts of fixed random tokens: tells whether two models are the same."""
    words = unwrap(model).config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.randint(words, (4, 16), generator=torch.Generator().manual_seed(0)).to(score_layer(model).weight.device)
    training = model.training
    model.eval()
    try:
        return RewardModel(model).raw_score(ids, torch.ones_like(ids)).cpu()
    finally:
        model.train(training)


def merge_adapters(model: nn.Module, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Fold LoRA adapters into the weights, as an ordinary model; a model without adapters is returned as it is.

    The sum is formed in float32 (a bfloat16 sum would round most of a small adapter away) and then cast to `dtype`
    (None: stay in float32). The score layer stays in float32. 4-bit layers become what they compute with: their
    dequantised weights, and the adapter added to those.
    """
    merge_and_unload = getattr(model, "merge_and_unload", None)
    if is_four_bit(unwrap(model)):
        merged = dense_copy(unwrap(model))
        set_score_weight(merged, score_layer(model).weight.flatten())
    elif callable(merge_and_unload):
        model.float()
        merged = cast(PreTrainedModel, merge_and_unload())
    else:
        return cast(PreTrainedModel, model)
    if dtype is not None:
        weight = score_layer(merged).weight.flatten().detach().clone()
        merged.to(dtype)  # type: ignore[arg-type]
        set_score_weight(merged, weight)
    return merged
