"""Saving and loading reward checkpoints: an ordinary transformers folder plus two files of ours.

    config.json, model.safetensors, (tokenizer files)   what `AutoModelForSequenceClassification` reads: the raw score u
                                                         (of two outputs see `model`)
    reward_metadata.json                                 what was private, the bound, the loss; required
    bonus.safetensors                                    the statistics of the bonus (`bonuses`); optional

A checkpoint without valid metadata is refused: falling back to "not private" would turn a broken download into a false
privacy claim. Writing goes to a temporary folder beside the target, is synced to disk and renamed, so a folder of the
final name is always complete.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.world import device_type
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.kernels.linear_layers import speed_up_products
from private_rlhf.lm.numerics import affordable
from private_rlhf.reward_models.bonuses import BONUS_KINDS, Bonus, bonus_from_tensors, bonus_kind, bonus_tensors
from private_rlhf.reward_models.bound import check_reward_bound
from private_rlhf.reward_models.classifiers import load_classifier
from private_rlhf.reward_models.dropout import DropoutBonus, DropoutRewardModel
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.model import (
    RewardModel,
    check_pad_token,
    probe_scores,
    score_layer,
    set_score_weight,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

METADATA_FILE = "reward_metadata.json"
BONUS_FILE = "bonus.safetensors"
FORMAT_VERSION = 1
SCORE_TOLERANCE = 0.05
"""Of a score read again, absolute and relative: weights are equal, and products on another device in bfloat16 nearly.
Weights drawn at random differ by the size of the scores."""
NOISY_SUM_LOSS = "noisy_sum"
"""The loss of a fit to one noisy sum of labels (`private_rlhf.reward_models.central`), none of which was released."""
MODES = ("head", "lora", "full", "external")
_NOISE = ("keep_prob", "epsilon")


@dataclass(frozen=True)
class RewardMetadata:
    """The facts that a reward checkpoint must state about itself.

    `noise` of the labels it was fitted to (written as `epsilon` and `keep_prob`); `loss` a name of `losses` or
    NOISY_SUM_LOSS; `reward_bound` B or None; `ridge` λ of the fit or None; `n_pairs` in the fit; `kappa` of the bonus
    or None; `mode` head, lora, full or external (fitted elsewhere, labels declared public: `loss` and `n_pairs` are
    then None, for they are not known); `num_layers` of the backbone; `base_model` its name (not a local path); `public`
    if the labels were declared public; `uncertainty` the kind of bonus; `data` any further JSON facts (release id,
    recipe, …). ValueError names the field that is out of range.
    """

    noise: LabelNoise
    loss: str | None
    reward_bound: float | None
    ridge: float | None
    n_pairs: int | None
    kappa: float | None
    mode: str
    num_layers: int
    base_model: str
    public: bool
    uncertainty: str = "fisher"
    data: dict[str, Any] | None = None

    @classmethod
    def of_external(cls, name: str, num_layers: int) -> RewardMetadata:
        """All that is known of a model that was fitted elsewhere to labels that are declared public."""
        return cls(PUBLIC, None, None, None, None, None, "external", num_layers, name, True, data={"external": name})

    def __post_init__(self) -> None:
        LabelNoise.of(self.noise, allow_zero=self.loss == NOISY_SUM_LOSS)
        for name, choices in (("mode", MODES), ("uncertainty", BONUS_KINDS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.public, bool):
            raise ValueError(f"public must be true or false, got {self.public!r}")
        fitted = self.mode != "external"
        if not fitted and (self.loss is not None or self.n_pairs is not None or not self.noise.public):
            raise ValueError("loss, n_pairs and epsilon of an external model are not known: they must be null")
        if fitted and self.loss != NOISY_SUM_LOSS:
            get_loss(str(self.loss))
        check_reward_bound(self.reward_bound)
        for name in ("ridge", "kappa"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0.0 <= value < math.inf):
                raise ValueError(f"{name} must be a finite number of at least 0 or null, got {value!r}")
        for name in ("n_pairs", "num_layers") if fitted else ("num_layers",):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.noise.public and not self.public:
            raise ValueError("epsilon is infinite but public is false: labels that were not randomised must be public")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON (no infinities), with the format version and α."""
        noise = self.noise.as_json()
        record = {name: value for name, value in asdict(self).items() if name != "noise"}
        return {"format_version": FORMAT_VERSION, **{name: noise[name] for name in _NOISE}, **record}

    @classmethod
    def from_json(cls, record: object) -> RewardMetadata:
        """The inverse; ValueError for anything missing, unknown, of the wrong type, or inconsistent."""
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        if record.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format_version is {record.get('format_version')!r}, this package reads {FORMAT_VERSION}")
        names = {field.name for field in fields(cls)} - {"noise"}
        if missing := sorted((names - {"data", "uncertainty"} | set(_NOISE)) - set(record)):
            raise ValueError(f"missing {', '.join(missing)}")
        values = {name: value for name, value in record.items() if name not in ("format_version", *_NOISE)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"unknown {', '.join(unknown)}")
        return cls(noise=LabelNoise.from_json(record), **values)


@dataclass(frozen=True)
class RewardCheckpoint:
    """A loaded checkpoint. `metadata` is None for a model that was made in the program, `bonus` when none was saved."""

    model: RewardModel
    metadata: RewardMetadata | None
    bonus: Bonus | None


def save_reward_checkpoint(
    path: str | Path,
    model: PreTrainedModel,
    metadata: RewardMetadata,
    *,
    bonus: Bonus | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint folder atomically; call it on one process only.

    `model` is a plain sequence-classification model: merge adapters first (`merge_adapters`). The head is stored in
    float32 whatever the backbone's dtype. `tokenizer` is anything with `save_pretrained`. ValueError for an existing
    `path` without `overwrite`, an adapter model, a non-finite weight, or a bonus of another model; RuntimeError where
    the written model scores otherwise.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; pass another path or overwrite=True")
    if hasattr(model, "peft_config"):
        raise ValueError("the model still has adapters; call merge_adapters first")
    check_pad_token(model.config)
    weight = score_layer(model).weight.flatten().detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the score layer holds a non-finite weight; the fit failed")
    if bonus is not None:
        _check_bonus(bonus, weight, metadata)

    model.config.problem_type = "regression"  # vLLM and text-classification would return its sigmoid
    with atomic.new_folder(target) as folder:
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        if bonus is not None:
            save_file(bonus_tensors(bonus), folder / BONUS_FILE)
        (folder / METADATA_FILE).write_text(json.dumps(metadata.to_json(), indent=2, allow_nan=False) + "\n")
        check_written(folder, model)


@torch.no_grad()
def check_written(folder: Path, model: PreTrainedModel) -> None:
    """Read a checkpoint again, before it gets its name. RuntimeError: its scores are not those of `model`."""
    again = load_reward_checkpoint(folder, dtype=model.dtype).model
    before, after = probe_scores(model), probe_scores(again.model)
    if not torch.allclose(before, after, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE):
        raise RuntimeError(
            f"read again after it was saved, the reward model scores {after.tolist()} where it scored "
            f"{before.tolist()}: {type(model).__name__} cannot be saved"
        )


def _check_bonus(bonus: Bonus, weight: Tensor, metadata: RewardMetadata) -> None:
    if len(bonus.weight) != len(weight) or not torch.allclose(
        bonus.weight.cpu().float(), weight.cpu(), rtol=1e-4, atol=1e-6
    ):
        raise ValueError("the bonus was computed for another score weight; recompute it for this model")
    if bonus.reward_bound != metadata.reward_bound or bonus.kappa != metadata.kappa:
        raise ValueError("the bonus and the metadata disagree on reward_bound or kappa")
    if bonus_kind(bonus) != metadata.uncertainty:
        raise ValueError(f"the bonus is {bonus_kind(bonus)}, but the metadata say {metadata.uncertainty}")


def read_metadata(path: str | Path) -> RewardMetadata:
    """The metadata of a checkpoint folder; ValueError when it is missing or invalid."""
    file = Path(path) / METADATA_FILE
    try:
        return RewardMetadata.from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        raise ValueError(
            f"{path} has no {METADATA_FILE}, so it is unknown which labels it learned from; "
            "use a checkpoint written by this package, or declare the model public"
        ) from None
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid ({error}); write the checkpoint again") from None


def load_reward_checkpoint(
    path: str | Path, *, dtype: torch.dtype | None = None, declared_public: bool = False
) -> RewardCheckpoint:
    """Load model, metadata and bonus, in eval mode.

    `dtype` of the backbone (None: as saved, but float32 on a processor that would emulate bfloat16); the head is
    float32, as saved. With `declared_public` a folder without metadata is taken as an external, unbounded, public
    reward model; a folder with invalid metadata is refused all the same.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass a reward checkpoint")
    external = declared_public and not (folder / METADATA_FILE).exists()
    metadata = None if external else read_metadata(folder)
    model = load_classifier(folder, dtype=dtype if dtype is not None else "auto")
    if dtype is None:
        model.to(affordable(model.dtype, device_type()))
    if metadata is None:
        layers = int(model.config.get_text_config().num_hidden_layers)
        metadata = RewardMetadata.of_external(folder.resolve().name, layers)
    if model.config.num_labels != 1 and (external or model.config.num_labels != 2):
        raise ValueError(f"{folder} has {model.config.num_labels} outputs; a reward model has one")
    stored = _stored_score_weight(folder)
    set_score_weight(model, score_layer(model).weight.flatten() if stored is None else stored)
    use_grouped_attention(speed_up_products(model))
    bonus, bound = None if external else _load_bonus(folder, metadata), metadata.reward_bound
    if isinstance(bonus, DropoutBonus):
        stochastic = DropoutRewardModel(model.eval(), reward_bound=bound, samples=bonus.samples, seed=bonus.seed)
        return RewardCheckpoint(stochastic, metadata, bonus)
    return RewardCheckpoint(RewardModel(model.eval(), reward_bound=bound), metadata, bonus)


def _stored_score_weight(folder: Path) -> Tensor | None:
    """w (f,) as the file holds it, in float32: transformers casts every tensor to the backbone's dtype."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118 - not a mapping
                return tensors.get_tensor("score.weight").flatten().float()
    return None


def _load_bonus(folder: Path, metadata: RewardMetadata) -> Bonus | None:
    file = folder / BONUS_FILE
    if not file.exists():
        return None
    if metadata.kappa is None:
        raise ValueError(
            f"{folder / METADATA_FILE} has no kappa although {BONUS_FILE} exists; write the checkpoint again"
        )
    try:
        return bonus_from_tensors(
            metadata.uncertainty, load_file(file), metadata.reward_bound, metadata.kappa, metadata.noise
        )
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is not valid ({error}); write the checkpoint again") from None
