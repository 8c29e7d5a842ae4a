"""A finished reward model in place of a fitted one: what is accepted, and what the run says about it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pipeline.core import atomic
from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.recipe_parts import ExternalRewardSettings
from pipeline.lm.models import load_tokenizer
from reward_models.checkpoint import (
    METADATA_FILE,
    RewardCheckpoint,
    RewardMetadata,
    load_reward_checkpoint,
    save_reward_checkpoint,
)


def check_external(settings: ExternalRewardSettings) -> None:
    """What can be said before any stage runs.

    Raises:
        UserError: no checkpoint folder, or one that does not say which labels it learned from while the recipe does not
            declare them public.
    """
    folder = settings.path
    if not (folder / "config.json").is_file():
        raise UserError(f"reward.external.path {folder} is no checkpoint folder (no config.json): give one")
    if not (folder / METADATA_FILE).is_file() and not settings.public:
        raise UserError(
            f"reward.external.path {folder} has no {METADATA_FILE}, so nobody knows which labels it learned from: set "
            "reward.external.public=true if they are public, or give a checkpoint of this package"
        )


def use_external(recipe: Recipe, target: Path, main_process: bool) -> dict[str, Any]:
    """Puts the recipe's external reward model into `target`/model with its metadata; the stage's report.

    Raises:
        UserError: see `check_external`; a folder that is no reward model with one output, metadata that contradict the
            recipe, or Γ asked of a model without its statistics.
    """
    settings, kappa = recipe.reward.external, recipe.reward.kappa
    assert settings is not None
    check_external(settings)
    where = f"reward.external.path {settings.path}"
    try:
        checkpoint = load_reward_checkpoint(settings.path, declared_public=settings.public)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{where} is no reward checkpoint ({cause}): give another") from None
    if settings.public and checkpoint.metadata is not None and not checkpoint.metadata.public:
        raise UserError(f"{where} learned from private labels by its own metadata: remove reward.external.public")
    if kappa > 0 and checkpoint.bonus is None:
        raise UserError(f"{where} holds no bonus statistics, so it has no Γ: set reward.kappa=0")
    tokenizer = load_tokenizer(settings.path)
    metadata = described(checkpoint, settings.path.resolve().name, kappa)
    facts = {
        "mode": "external",
        "source": settings.path.resolve().name,
        "fitted_by": "this package" if checkpoint.metadata else "others",
        "labels": "declared public" if metadata.public else "private",
        **{name: metadata.to_json()[name] for name in ("loss", "epsilon", "reward_bound", "kappa", "num_layers")},
    }
    if main_process:
        model: Any = checkpoint.model.model
        # Pooling goes by the mask; plain transformers goes by this id, which must not end a text.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        bonus = None if checkpoint.bonus is None or kappa == 0 else replace(checkpoint.bonus, kappa=kappa)
        save_reward_checkpoint(target / "model", model, metadata, bonus=bonus, tokenizer=tokenizer, overwrite=True)
        atomic.write_json(target / "fit.json", facts)
    return {**facts, "losses": [], "summary": f"external reward model {facts['source']}, labels {facts['labels']}"}


def described(checkpoint: RewardCheckpoint, name: str, kappa: float) -> RewardMetadata:
    """The checkpoint's metadata with the run's κ; for a model without any, all that is known of it."""
    if checkpoint.metadata is not None:
        data = {**(checkpoint.metadata.data or {}), "external": name}
        return replace(checkpoint.metadata, kappa=kappa if checkpoint.bonus is not None else None, data=data)
    return RewardMetadata(
        epsilon=math.inf,
        loss=None,
        reward_bound=None,
        ridge=None,
        n_pairs=None,
        kappa=None,
        mode="external",
        num_layers=int(checkpoint.model.config.get_text_config().num_hidden_layers),
        base_model=name,
        public=True,
        data={"external": name},
    )
