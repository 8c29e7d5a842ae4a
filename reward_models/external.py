"""A finished reward model in place of a fitted one: its checks, and the facts that the run states about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.data.inputs import make_renderer
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.recipe import ExternalRewardSettings, ModelConfig
from private_rlhf.reward_models.checkpoint import (
    METADATA_FILE,
    RewardCheckpoint,
    RewardMetadata,
    load_reward_checkpoint,
    save_reward_checkpoint,
)
from safetensors import SafetensorError


def key_names(key: str) -> tuple[str, str]:
    """Names in messages of the folder and the declaration of a recipe's section `key` that has `path` and `public`:
    the last two arguments of the functions below.
    """
    return f"{key}.path", f"{key}.public=true"


def check_folder(folder: Path, public: bool, name: str, declaration: str) -> None:
    """Check by the names of its files that a reward model from outside this run may be used.

    Args:
        folder: of its checkpoint.
        public: True where the recipe declares its training labels public.
        name, declaration: of the two in messages, see `key_names`.

    Raises:
        UserError: not a checkpoint folder, or one that does not say which labels it learned from while the recipe does
            not declare them public.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} {folder} is not a checkpoint folder (it has no config.json): give one")
    if not (folder / METADATA_FILE).is_file() and not public:
        raise UserError(
            f"{name} {folder} has no {METADATA_FILE}, so it is unknown which labels it learned from: set "
            f"{declaration} if they are public, or give a checkpoint of this package"
        )


def load_external(
    folder: Path, public: bool, name: str, declaration: str
) -> tuple[RewardCheckpoint, RewardMetadata, dict[str, Any]]:
    """A reward model from outside this run, its metadata, and its facts for the privacy card; arguments as in
    `check_folder`. The metadata name the folder.

    Raises:
        UserError: see `check_folder`; not a reward model with one output, or metadata that contradict the recipe.
    """
    check_folder(folder, public, name, declaration)
    try:
        checkpoint = load_reward_checkpoint(folder, declared_public=public)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{name} {folder} is not a reward checkpoint ({cause}): give another") from None
    metadata = checkpoint.metadata
    assert metadata is not None
    if public and not metadata.public:
        raise UserError(f"{name} {folder} learned from private labels by its own metadata: remove {declaration}")
    source = folder.resolve().name
    facts = {
        "mode": "external",
        "source": source,
        "fitted_by": "this package" if (folder / METADATA_FILE).is_file() else "others",
        "labels": "declared public" if metadata.public else "private",
        "epsilon": metadata.to_json()["epsilon"],
    }
    return checkpoint, replace(metadata, data={**(metadata.data or {}), "external": source}), facts


def use_external(
    settings: ExternalRewardSettings, kappa: float, limits: ModelConfig, target: Path, main_process: bool
) -> dict[str, Any]:
    """Put an external reward model into `target`/model with its metadata; the report of the stage.

    kappa: of Γ. limits: of the texts of this run, for the tokenizer that is saved beside the model. It gets no model
    card: base model, training data and privacy are those of whoever fitted it, and this run knows none of them.

    Raises:
        UserError: see `load_external`, or Γ asked of a model without its statistics.
    """
    checkpoint, metadata, facts = load_external(settings.path, settings.public, *key_names("reward.external"))
    if kappa > 0 and checkpoint.bonus is None:
        raise UserError(
            f"reward.external.path {settings.path} holds no bonus statistics, so it has no Γ: set reward.kappa=0"
        )
    metadata = replace(metadata, kappa=None if checkpoint.bonus is None else kappa)
    record = metadata.to_json()
    facts |= {name: record[name] for name in ("loss", "reward_bound", "kappa", "num_layers")}
    if main_process:
        model: Any = checkpoint.model.model
        tokenizer = load_tokenizer(settings.path, plain_template=False)
        # Pooling goes by the mask; plain transformers goes by this id, which must not end a text.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        trained = tokenizer_as_trained(make_renderer(limits, tokenizer), "right")  # how this run reads its scores
        bonus = None if checkpoint.bonus is None or kappa == 0 else replace(checkpoint.bonus, kappa=kappa)
        save_reward_checkpoint(target / "model", model, metadata, bonus=bonus, tokenizer=trained, overwrite=True)
        atomic.write_json(target / "fit.json", facts)
    return {**facts, "losses": [], "summary": f"external reward model {facts['source']}, labels {facts['labels']}"}
