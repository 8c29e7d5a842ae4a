"""Loading sequence classifiers: every weight accounted for, and a score layer for architectures that bring none."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from private_rlhf.lm.models import load_whole
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def load_classifier(folder: str | Path, **how: Any) -> Any:
    """The sequence classifier in `folder`. ValueError: a weight is missing, superfluous or of another shape."""
    config = AutoConfig.from_pretrained(folder)
    return load_whole(classifier_class(type(config)), folder, config=config, **how)


def load_backbone_of(causal_lm: str | Path, config: PreTrainedConfig, **how: Any) -> Any:
    """A classifier as `config` says with the weights of a causal LM, which may have more layers; its score is random.

    ValueError: a weight is missing, superfluous or of another shape.
    """
    loader = classifier_class(type(config))
    layers = config.get_text_config().num_hidden_layers

    def allowed(name: str) -> bool:
        layer = LAYER.search(name)
        cut = layer is not None and int(layer.group(1)) >= layers
        outside = not name.startswith(f"{loader.base_model_prefix}.")  # as the output layer is
        return name == "score.weight" or outside or cut

    return load_whole(loader, causal_lm, allowed, config=config, **how)


def classifier_class(kind: type[PreTrainedConfig]) -> Any:
    """transformers' class for a configuration; where it has none, its generic one (base model, bias-free `score`).

    Granite, Cohere and OLMoE are such. Only this package reads their checkpoints. ValueError: not a causal LM.
    """
    classifiers: Any = AutoModelForSequenceClassification._model_mapping
    causal: Any = AutoModelForCausalLM._model_mapping
    if kind in classifiers:
        return classifiers[kind]
    if kind not in causal:
        raise ValueError(f"transformers has no causal LM for {kind.__name__}")
    return _generic(next(each for each in causal[kind].__mro__ if each.__name__.endswith("PreTrainedModel")))


@functools.cache
def _generic(parent: type) -> type:
    name = parent.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, parent), {})
