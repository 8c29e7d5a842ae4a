"""Reward models as ordinary `AutoModelForSequenceClassification` checkpoints with a bias-free head.

The raw score is u = w·φ, φ the hidden state of the last token that the attention mask attends; plain transformers gives
u, without the bound r(u). Features and scores are float32 whatever the backbone's dtype.

A head with two outputs reads φ = (the last token's state, the sum of the states of all tokens): u is its first output
at the last token plus its second output summed over the text. A prompt adds the same to that sum for all its answers.
"""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from private_rlhf.lm.models import load_whole, unwrap
from private_rlhf.lm.rows import Rows, Sharing, make_rows, sharing_of
from private_rlhf.reward_models.losses import check_reward_bound
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PretrainedConfig,
)
from transformers.modeling_layers import GenericForSequenceClassification


def check_pad_token(config: PretrainedConfig) -> int:
    """The pad id of a text config; ValueError when it is missing or also an end-of-sequence id."""
    text = config.get_text_config()
    pad, eos = text.pad_token_id, text.eos_token_id
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        # Plain transformers would pool the wrong token.
        raise ValueError(f"pad_token_id must be a token that no text ends with, got {pad}: pass another")
    return int(pad)


@functools.cache  # one class for a configuration, however often it is asked for
def classifier_class(kind: type[PreTrainedConfig]) -> Any:
    """transformers' class for a configuration; where it has none (Granite, Cohere, OLMoE), its generic one. Only this
    package reads the latter's checkpoints. ValueError: not a causal LM."""
    classifiers: Any = AutoModelForSequenceClassification._model_mapping
    causal: Any = AutoModelForCausalLM._model_mapping
    if kind in classifiers:
        return classifiers[kind]
    if kind not in causal:
        raise ValueError(f"config must be of a causal LM, got {kind.__name__}: take another checkpoint")
    parent = next(each for each in causal[kind].__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = parent.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, parent), {})


def load_classifier(folder: str | Path, **how: Any) -> Any:
    """The sequence classifier in `folder`. ValueError: a weight is missing, superfluous or of another shape."""
    config = AutoConfig.from_pretrained(folder)
    return load_whole(classifier_class(cast(Any, type(config))), folder, config=config, **how)


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
    """The score layer in float32 whatever the dtype of the hidden states and of autocast: in bfloat16 a score of 5 has
    a resolution of 0.03. Its state dict is that of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., d) -> (..., 1 or 2) float32."""
        with torch.autocast(device_type=input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight.float())


def set_score_weight(model: nn.Module, weight: Tensor) -> None:
    """Write w, (d,) or of two outputs (2d,), into the score layer and make that a float32 `ScoreHead`."""
    head, inner = score_layer(model), cast(Any, unwrap(model))
    old = head.weight
    if tuple(weight.shape) != (old.numel(),):
        raise ValueError(f"weight must have shape ({old.numel()},), that of the score layer, got {tuple(weight.shape)}")
    if inner.score is head and not isinstance(head, ScoreHead):
        inner.score = head = ScoreHead(head.in_features, head.out_features, bias=False, device=old.device)
    new = weight.detach().to(device=old.device, dtype=torch.float32).reshape(old.shape).clone()
    head.weight = nn.Parameter(new, requires_grad=old.requires_grad)


class RewardModel:
    """A sequence-classification model in eval mode, with its reward bound; `backbone` is the model without its head.

    share_rows: texts may share rows where the model can read such.
    """

    def __init__(self, model: nn.Module, *, reward_bound: float | None = None, share_rows: bool = True) -> None:
        self.token_sum = score_layer(model).out_features == 2
        self.model = model
        self.reward_bound = check_reward_bound(reward_bound)
        self.share_rows = share_rows
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
        return sharing_of(self.model) if self.share_rows else None

    @property
    def weight(self) -> Tensor:
        """w (f,) in the dtype it is stored in; f = d, or 2d with a token sum."""
        return score_layer(self.model).weight.flatten()

    def row_features(self, rows: Rows) -> Tensor:
        """φ (N, f) float32 of the sequences in `rows`, in their order; differentiable."""
        more = {"position_ids": rows.position_ids} if self._takes_positions else {}
        mask = rows.attention(cast(Any, unwrap(self.model)).dtype)
        output = self.backbone(input_ids=rows.input_ids, attention_mask=mask, use_cache=False, **more)
        flat: Tensor = output.last_hidden_state.flatten(0, 1)
        last = flat[rows.last].float()
        if not self.token_sum:
            return last
        columns = torch.tensor([column for path in rows.paths for column in path], device=flat.device)
        starts = torch.tensor([0, *accumulate(map(len, rows.paths[:-1]))], device=flat.device)
        return torch.cat([last, nn.functional.embedding_bag(columns, flat.float(), starts, mode="sum")], dim=-1)

    def raw_score_of(self, features: Tensor) -> Tensor:
        """u = w·φ, (B, f) -> (B,) float32: what plain transformers calls the logit where the head has one output."""
        return features.float() @ self.weight.float()


@torch.no_grad()
def probe_scores(model: nn.Module) -> Tensor:
    """u (4,) float32 on the CPU of four texts of fixed random tokens: tells whether two models are the same."""
    words = unwrap(model).config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.randint(words, (4, 16), generator=torch.Generator().manual_seed(0)).to(score_layer(model).weight.device)
    training = model.training
    model.eval()
    try:
        reward = RewardModel(model)
        return reward.raw_score_of(reward.row_features(make_rows(ids.tolist(), 0, ids.device))).cpu()
    finally:
        model.train(training)
