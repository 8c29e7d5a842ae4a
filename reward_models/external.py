"""A finished reward model in place of a fitted one: what is accepted, and what the run says about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC
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


def check_external(settings: ExternalRewardSettings) -> None:
    """What can be said of reward.external before any stage runs; see `check_folder`."""
    check_folder(settings.path, settings.public, *key_names("reward.external"))


def key_names(key: str) -> tuple[str, str]:
    """What messages call the folder and the declaration of a section `key` of the recipe that has `path` and `public`:
    the last two arguments of the functions below."""
    return f"{key}.path", f"{key}.public=true"


def check_folder(folder: Path, public: bool, name: str, declaration: str) -> None:
    """Whether a reward model that was not fitted in this run may be used, from the names of its files.

    Args:
        folder: of its checkpoint.
        public: whether the recipe declares its training labels public.
        name, declaration: what messages call the two, see `key_names`.

    Raises:
        UserError: no checkpoint folder, or one that does not say which labels it learned from while the recipe does not
            declare them public.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} {folder} is no checkpoint folder (no config.json): give one")
    if not (folder / METADATA_FILE).is_file() and not public:
        raise UserError(
            f"{name} {folder} has no {METADATA_FILE}, so nobody knows which labels it learned from: set "
            f"{declaration} if they are public, or give a checkpoint of this package"
        )


def load_external(folder: Path, public: bool, name: str, declaration: str) -> RewardCheckpoint:
    """A reward model that was not fitted in this run; arguments as in `check_folder`.

    Raises:
        UserError: see `check_folder`; a folder that is no reward model with one output, or metadata that contradict the
            recipe.
    """
    check_folder(folder, public, name, declaration)
    where = f"{name} {folder}"
    try:
        checkpoint = load_reward_checkpoint(folder, declared_public=public)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{where} is no reward checkpoint ({cause}): give another") from None
    if public and checkpoint.metadata is not None and not checkpoint.metadata.public:
        raise UserError(f"{where} learned from private labels by its own metadata: remove {declaration}")
    return checkpoint


def card_facts(checkpoint: RewardCheckpoint, folder: Path, metadata: RewardMetadata) -> dict[str, Any]:
    """What the card says about a reward model that was not fitted in this run (`private_rlhf.privacy.status`)."""
    return {
        "mode": "external",
        "source": folder.resolve().name,
        "fitted_by": "this package" if checkpoint.metadata else "others",
        "labels": "declared public" if metadata.public else "private",
        "epsilon": metadata.to_json()["epsilon"],
    }


def use_external(
    settings: ExternalRewardSettings, kappa: float, limits: ModelConfig, target: Path, main_process: bool
) -> dict[str, Any]:
    """Puts an external reward model into `target`/model with its metadata; the stage's report.

    kappa: of Γ. limits: of the texts of this run, for the tokenizer that is saved beside the model.

    Raises:
        UserError: see `load_external`, or Γ asked of a model without its statistics.
    """
    checkpoint = load_external(settings.path, settings.public, *key_names("reward.external"))
    if kappa > 0 and checkpoint.bonus is None:
        raise UserError(
            f"reward.external.path {settings.path} holds no bonus statistics, so it has no Γ: set reward.kappa=0"
        )
    tokenizer = load_tokenizer(settings.path, plain_template=False)
    metadata = described(checkpoint, settings.path.resolve().name, kappa)
    facts = {
        **card_facts(checkpoint, settings.path, metadata),
        **{name: metadata.to_json()[name] for name in ("loss", "reward_bound", "kappa", "num_layers")},
    }
    if main_process:
        model: Any = checkpoint.model.model
        # Pooling goes by the mask; plain transformers goes by this id, which must not end a text.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        trained = tokenizer_as_trained(make_renderer(limits, tokenizer), "right")  # how this run reads its scores
        bonus = None if checkpoint.bonus is None or kappa == 0 else replace(checkpoint.bonus, kappa=kappa)
        save_reward_checkpoint(target / "model", model, metadata, bonus=bonus, tokenizer=trained, overwrite=True)
        atomic.write_json(target / "fit.json", facts)
    return {**facts, "losses": [], "summary": f"external reward model {facts['source']}, labels {facts['labels']}"}


def described(checkpoint: RewardCheckpoint, name: str, kappa: float) -> RewardMetadata:
    """The checkpoint's metadata with the run's κ; for a model without any, all that is known of it."""
    if checkpoint.metadata is not None:
        data = {**(checkpoint.metadata.data or {}), "external": name}
        return replace(checkpoint.metadata, kappa=kappa if checkpoint.bonus is not None else None, data=data)
    return RewardMetadata(
        noise=PUBLIC,
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
