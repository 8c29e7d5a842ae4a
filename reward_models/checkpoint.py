"""Saving and loading reward checkpoints: an ordinary transformers folder plus two files of ours.

    config.json, model.safetensors, (tokenizer files)   what `AutoModelForSequenceClassification` reads: the raw score u
                                                         (of two outputs see `model`)
    reward_metadata.json                                 what was private, the bound, the loss; required
    bonus.safetensors                                    the statistics of the bonus (`bonuses`); optional

A checkpoint without valid metadata is refused: falling back to "not private" would turn a broken download into a false
privacy claim. A model card's program scores with plain transformers, equal to this package.
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
from private_rlhf.core.noise_levels import LevelledNoise, known_noise, noise_from_json
from private_rlhf.core.world import device_type
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.model_card import FILES, FOLDER, CardText
from private_rlhf.lm.models import no_progress_bars
from private_rlhf.lm.numerics import affordable
from private_rlhf.reward_models.losses import check_reward_bound, get_loss
from private_rlhf.reward_models.model import (
    RewardModel,
    check_pad_token,
    load_classifier,
    probe_scores,
    score_layer,
    set_score_weight,
)
from private_rlhf.reward_models.uncertainty import (
    BONUS_KINDS,
    Bonus,
    DropoutBonus,
    DropoutRewardModel,
    bonus_from_tensors,
    bonus_kind,
    bonus_tensors,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

METADATA_FILE = "reward_metadata.json"
BONUS_FILE = "bonus.safetensors"
FORMAT_VERSION = 1
SCORE_TOLERANCE = 0.05
"""Of a score read again, absolute and relative: weights are equal, and products on another device in bfloat16 nearly.
Weights drawn at random differ by the size of the scores."""
MODES = ("head", "lora", "full", "external")
_NOISE, LEVELS = ("keep_prob", "epsilon"), "levels"
METADATA = "noise of the labels, loss, bound and size of the fit; private-rlhf reads no reward model without it"
BONUS = "statistics of the uncertainty, which private-rlhf subtracts from the reward; the scores above are without it"
ONE_OUTPUT = "raw = model(**texts).logits[:, 0]"
TOKEN_SUM = """outputs = model.score(model.base_model(**texts).last_hidden_state)  # of every token
    mask = texts["attention_mask"]
    last = outputs[range(len(mask)), mask.sum(dim=1) - 1, 0]
    raw = last + (outputs[..., 1] * mask).sum(dim=1)"""
NO_CLASSIFIER = (
    "transformers has no sequence classifier for `{}`, so only private-rlhf reads this reward model:"
    " `private-rlhf evaluate --judge rm:FOLDER`."
)


@dataclass(frozen=True)
class RewardMetadata:
    """The facts that a reward checkpoint must state about itself. ValueError names the field that is out of range.

    noise is that of the labels, `epsilon`, `keep_prob` and, where each has its own, `levels` in the file. loss: of
    `losses`. mode `external`: fitted elsewhere to public labels, loss and n_pairs None. base_model:
    a name, not a path. data: further JSON facts.
    """

    noise: LabelNoise | LevelledNoise
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

    def __post_init__(self) -> None:
        known_noise(self.noise, allow_zero=False)
        for name, choices in (("mode", MODES), ("uncertainty", BONUS_KINDS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.public, bool):
            raise ValueError(f"public must be true or false, got {self.public!r}")
        external = self.mode == "external"
        if external and (self.loss is not None or self.n_pairs is not None or not self.noise.public):
            raise ValueError("loss, n_pairs and epsilon of an external model are not known: they must be null")
        if not external:
            get_loss(str(self.loss))
        check_reward_bound(self.reward_bound)
        for name in ("ridge", "kappa"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0.0 <= value < math.inf):
                raise ValueError(f"{name} must be a finite number of at least 0 or null, got {value!r}")
        for name in ("num_layers",) if external else ("n_pairs", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.noise.public and not self.public:
            raise ValueError("epsilon is infinite but public is false: labels that were not randomised must be public")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON (no infinities), with the format version and α."""
        noise = self.noise.as_json()
        record = {name: value for name, value in asdict(self).items() if name != "noise"}
        stated = {name: noise[name] for name in (*_NOISE, LEVELS) if name in noise}
        return {"format_version": FORMAT_VERSION, **stated, **record}

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
        values = {name: value for name, value in record.items() if name not in ("format_version", *_NOISE, LEVELS)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"unknown {', '.join(unknown)}")
        return cls(noise=noise_from_json(record), **values)


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
    """Write a checkpoint folder atomically; call it on one process only. The head is stored in float32.

    ValueError: `path` exists without `overwrite`, a model with adapters, a weight that is not finite, or a bonus of
    another model. RuntimeError: the written model has other scores.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise ValueError(f"path must be new, got {target}: pass another or overwrite=True")
    if hasattr(model, "peft_config"):
        raise ValueError("model must have no adapters left: call merge_adapters first")
    check_pad_token(model.config)
    weight = score_layer(model).weight.flatten().detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the score layer must be finite, got a weight that is not: the fit failed")
    if bonus is not None:
        _check_bonus(bonus, weight, metadata)

    model.config.problem_type = "regression"  # vLLM and text-classification would return its sigmoid
    with atomic.new_folder(target) as folder, no_progress_bars():
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        if bonus is not None:
            save_file(bonus_tensors(bonus), folder / BONUS_FILE)
        (folder / METADATA_FILE).write_text(json.dumps(metadata.to_json(), indent=2, allow_nan=False) + "\n")
        again = load_reward_checkpoint(folder, dtype=model.dtype).model  # before it gets its name
        model.cpu()  # scores in bfloat16 differ by device, and a GPU may not hold both
        before, after = probe_scores(model), probe_scores(again.model)
        model.to(weight.device)  # type: ignore[arg-type]  # transformers hides self from mypy
        if not torch.allclose(before, after, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE):
            scores = f"{after.tolist()} where it scored {before.tolist()}: {type(model).__name__} cannot be saved"
            raise RuntimeError(f"read again after it was saved, the reward model scores {scores}")


def _check_bonus(bonus: Bonus, weight: Tensor, metadata: RewardMetadata) -> None:
    theirs, ours = bonus.weight.cpu().float(), weight.cpu()
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-6):
        raise ValueError("the bonus must belong to the score weight of the model: compute it again")
    bonus_facts = (bonus.reward_bound, bonus.kappa, bonus_kind(bonus))
    metadata_facts = (metadata.reward_bound, metadata.kappa, metadata.uncertainty)
    if bonus_facts != metadata_facts:
        raise ValueError(f"(reward_bound, kappa, uncertainty) must be the bonus's {bonus_facts}, got {metadata_facts}")


def read_metadata(path: str | Path) -> RewardMetadata:
    """The metadata of a checkpoint folder; ValueError when it is missing or invalid."""
    file = Path(path) / METADATA_FILE
    try:
        return RewardMetadata.from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        raise ValueError(
            f"{path} has no {METADATA_FILE}, so it is unknown which labels it learned from: "
            "use a checkpoint written by this package, or declare the model public"
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not valid ({error}): write the checkpoint again") from None


def load_reward_checkpoint(
    path: str | Path, *, dtype: torch.dtype | None = None, declared_public: bool = False, plain: bool = False
) -> RewardCheckpoint:
    """Load model, metadata and bonus, in eval mode; the head is float32.

    dtype: of the backbone; None: as saved, but float32 on a processor that would emulate bfloat16. declared_public:
    take a folder without metadata as an external, unbounded, public model. plain: compute as transformers does, without
    the kernels and shared rows. ValueError: outputs other than one (two, if this package wrote it), or invalid
    metadata.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"path must be a folder, got {folder}: pass a reward checkpoint")
    external = declared_public and not (folder / METADATA_FILE).exists()
    metadata = None if external else read_metadata(folder)
    model = load_classifier(folder, dtype=dtype if dtype is not None else "auto")
    if dtype is None:
        model.to(affordable(model.dtype, device_type()))
    if metadata is None:
        layers, name = int(model.config.get_text_config().num_hidden_layers), folder.resolve().name
        metadata = RewardMetadata(PUBLIC, None, None, None, None, None, "external", layers, name, True,
                                  data={"external": name})  # fmt: skip
    if model.config.num_labels != 1 and (external or model.config.num_labels != 2):
        raise ValueError(f"num_labels must be 1, got {model.config.num_labels}: {folder} is not a reward model")
    weight = _stored_score_weight(folder)
    set_score_weight(model, score_layer(model).weight.flatten() if weight is None else weight)
    if not plain:
        use_grouped_attention(model)
    bonus, bound = None if external else _load_bonus(folder, metadata), metadata.reward_bound
    if isinstance(bonus, DropoutBonus):
        stochastic = DropoutRewardModel(model.eval(), reward_bound=bound, samples=bonus.samples, seed=bonus.seed)
        return RewardCheckpoint(stochastic, metadata, bonus)
    return RewardCheckpoint(RewardModel(model.eval(), reward_bound=bound, share_rows=not plain), metadata, bonus)


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
        raise ValueError(f"{folder / METADATA_FILE} has no kappa for {BONUS_FILE}: write the checkpoint again")
    noise, bound = metadata.noise, metadata.reward_bound
    try:
        return bonus_from_tensors(metadata.uncertainty, load_file(file), bound, metadata.kappa, noise)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is not valid ({error}): write the checkpoint again") from None


def reward_text(trained_on: str, results: str, model: Any, reward_bound: float | None) -> CardText:
    """The text of a reward model's card. model: a sequence classifier with a head of one output or two."""
    readable = type(model.config) in AutoModelForSequenceClassification._model_mapping
    token_sum = score_layer(model).out_features == 2
    start = program(token_sum, reward_bound) if readable else NO_CLASSIFIER.format(model.config.model_type)
    files = FILES | {"reward_metadata.json": METADATA, "bonus.safetensors": BONUS}
    return CardText(trained_on, "text-classification", start, results, files)


def program(token_sum: bool, reward_bound: float | None) -> str:
    """A program that prints the rewards of two answers. token_sum: the head has two outputs."""
    bound, bounded = check_reward_bound(reward_bound), "reward = raw"
    if bound is not None:
        half = f"{bound / 2:g}"
        bounded = f"reward = {half} * torch.tanh(raw / {half})  # as in training: rewards lie within ±{half}"
    return f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

{FOLDER}
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
question = {{"role": "user", "content": "Name a river."}}
answers = ["The Rhine is a lovely river.", "No."]
conversations = [[question, {{"role": "assistant", "content": answer}}] for answer in answers]
texts = tokenizer.apply_chat_template(conversations, padding=True, return_dict=True, return_tensors="pt")
with torch.inference_mode():
    {TOKEN_SUM if token_sum else ONE_OUTPUT}
{bounded}
print(reward.tolist())"""
