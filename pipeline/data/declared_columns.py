"""Declarations of the labels' holder about columns, and the meaning of a label: one place for command and recipes.

A label is any two values (the first: response_a is preferred), values with what each means (`A=a,B=b,both=tie`), a
signed strength (`<0,>0`: which sign prefers response_a), or one column for each response and which value wins
(`higher`, `lower`; one-hot winners are `higher`). Anything else is refused, and never shown. All of it is symmetric in
the two responses.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from private_rlhf.core.errors import UserError
from private_rlhf.data.conversation import RowError
from private_rlhf.data.release import EPSILON, MESSAGE_KEYS
from private_rlhf.recipe import DataConfig

PAIR = ("chosen", "rejected")
RESPONSES = ("response_a", "response_b")
PROMPTS = ("prompt", "question", "instruction", "input", "query")
"""Columns that may hold the prompt of `chosen` and `rejected`."""
CONVERSATIONS = ("messages", "conversation", "dialogue", "dialog", "context")
"""Columns that may hold it where there is none of `PROMPTS`."""
PARTS = ("instructions", "contexts", "retrieved_contexts", "retrieved_documents", "source_text", "previous_messages",
         "previous_turns", "passages", "knowledge", "evidence", "article", "post", "choices", "options")
"""Columns that may hold a part of the prompt, as those above may that it is not in."""
SYSTEMS = ("system", "system_prompt", "system_message")
LOSSY = ("tools", "functions", "images", "image", "videos", "video", "audios", "audio", "history", "chat_history",
         "conversation_history", "dialogue_history", "context", "passage", "document", "documents", "image_path",
         "image_url", "image_base64", "img", "initial_reason_steps", "answer_prefix", "sys_prompt", "sys", "persona",
         "system_instruction")  # fmt: skip
FLAGS = ("swapped", "is_swapped", "swap", "order_swapped", "position_swapped", "flipped", "is_flipped", "flip",
         "label_flipped", "reversed", "is_reversed")  # fmt: skip
"""Columns that may say that a label is of the responses in the other order."""
VERDICT_COLUMNS = ("answer", "status", "assignmentstatus", "assignment_status")
VERDICTS = {
    **dict.fromkeys(("accept", "accepted", "approved", "submitted", "completed"), True),
    **dict.fromkeys(("reject", "rejected", "ignore", "ignored", "discarded", "skipped"), False),
}
"""Words of annotation tools for a row, in such columns: True where it counts."""
LOST = {
    "tools": "belongs to the prompt and is not read; name it in data.message_keys, if the chat template renders it, or"
    " remove it",
    **dict.fromkeys(VERDICT_COLUMNS, "says that the row was rejected or skipped; remove such rows, then the column"),
    **dict.fromkeys(FLAGS, "may turn the label and is not read; write each label for the order in which the responses"
                    " stand, then remove the column"),
}  # fmt: skip
"""Columns that are refused unless they are empty, with the reason, where it is not the usual one."""
BESIDE_PROMPT = (*SYSTEMS, *LOSSY)
"""Columns that belong to the prompt: those of `LOSSY` are refused unless they are empty, but for `tools` where
data.message_keys names it."""
MISSING = ("nan", "NaN", "null", "NULL", "None", "NA", "N/A", "n/a", "<NA>", "\\N", "#N/A", "#NAME?", "#REF!")
"""Words for a missing value in CSV, as pandas reads them or spreadsheets write them."""
_EMPTY = ("[]", "{}", *MISSING)
"""Empty ones as tables write them."""
MOST_COMPARED = 100
"""Columns among which the nearest to a missing one is looked for."""
_RESERVED = frozenset({"prompt", "record_id", *PAIR, *RESPONSES})
_TOKENS = ("error", "keep")
_MEANING = {"a": 1, "b": -1, "tie": 0}
SIGNED = {("<0", ">0"): -1, (">0", "<0"): 1}
_BOTH = {("higher",): 1, ("lower",): -1}
TIE = (
    "holds a tie; say --ties coin (data.ties: coin): a fair coin under the key in its place, then the mechanism; or"
    " --ties drop: the row is left out, which reveals that it was a tie"
)


NAMED_COLUMNS = ("labeler_column", "event_column", "corrects_column", "epsilon_column")
"""Declarations of one column each, beside the pair and its label."""
_OF_PRIVATIZE = (*NAMED_COLUMNS, "epsilon_levels")
"""Declarations that a recipe makes in section privatize; the others are in section data."""


@dataclass(frozen=True)
class Options:
    """Declarations about the columns; UserError if they do not fit together.

    labels: what the values of `label_column` mean, see above. fold_names: spellings of a labeller's name are one person
    (`records.fold_name`), as the key's ledger has it (`Ledger.folds_names`). format: a name in `shapes.SHAPES`; None
    takes what the columns show. ties: None refuses them. pairs: of one ranking, a pair that its texts draw, or all.
    special_tokens: in texts, `error` or `keep`. message_keys: keys of messages beside role and content that are read.
    epsilon_column: holds the ε of each label, one of epsilon_levels (rising). in_recipe: errors name a recipe's keys,
    and not a command's options.
    """

    labeler_column: str | None = None
    event_column: str | None = None
    columns: tuple[str, ...] = ()
    label_column: str | None = None
    labels: tuple[str, ...] | None = None
    corrects_column: str | None = None
    fold_names: bool = False
    format: str | None = None
    ties: Literal["drop", "coin"] | None = None
    pairs: Literal["one", "all"] = "one"
    special_tokens: Literal["error", "keep"] = "error"
    message_keys: tuple[str, ...] = ()
    epsilon_column: str | None = None
    epsilon_levels: tuple[float, ...] = ()
    in_recipe: bool = False

    @classmethod
    def of(cls, data: DataConfig, **columns: Any) -> Options:
        """Those of a recipe. columns: beside the pair."""
        names = ("format", "label_column", "ties", "pairs", "special_tokens", "message_keys")
        shared = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
        return cls(labels=parse_labels(data.labels, "data.labels"), in_recipe=True, **shared, **columns)

    def key(self, name: str) -> str:
        """The name of a declaration where it was made: --label-column, or data.label_column."""
        section = "privatize" if name in _OF_PRIVATIZE else "data"
        return f"{section}.{name}" if self.in_recipe else f"--{name.replace('_', '-')}"

    def setting(self, name: str, value: str) -> str:
        """A declaration with its value, as its holder writes it: --ties coin, or data.ties: coin."""
        return f"{self.key(name)}{':' * self.in_recipe} {value}"

    def __post_init__(self) -> None:
        for key, known in (("ties", (None, "drop", "coin")), ("pairs", ("one", "all")), ("special_tokens", _TOKENS)):
            if getattr(self, key) not in known:
                allowed = " or ".join(filter(None, known))
                raise UserError(f"{self.key(key)} must be {allowed}, got {getattr(self, key)!r}")
        if unknown := sorted({*self.message_keys} - {*MESSAGE_KEYS}):
            raise UserError(f"{self.key('message_keys')} must be of {', '.join(MESSAGE_KEYS)}, got {unknown[0]!r}")
        column, values = self.key("label_column"), self.key("labels")
        if (self.label_column is None) != (self.labels is None):
            raise UserError(
                f"{column} and {values} go together: name the column and its two values, first the one that says"
                f" that response_a is preferred (for example {self.setting('label_column', 'label')} and"
                f" {self.setting('labels', 'A,B')})"
            )
        if self.labels is not None:
            check_labels(self.labels, values)
        if len(self.label_columns) != (2 if self.labels in _BOTH else 1) and self.labels is not None:
            raise UserError(
                f"{values} higher (or lower) goes with two columns: {self.setting('label_column', 'score_a,score_b')}"
            )
        if self.format is not None and self.label_column is not None:
            raise UserError(f"{self.key('format')} goes without {column}: a format names its own label")
        if self.corrects_column is not None and self.event_column is None:
            needed = f"{self.key('corrects_column')} needs {self.key('event_column')}"
            raise UserError(f"{needed}: a correction is an event of its own, with a name")
        if (self.epsilon_column is None) != (not self.epsilon_levels):
            raise UserError(
                f"{self.key('epsilon_column')} and {self.key('epsilon_levels')} go together: name the column and every"
                " ε that may stand in it"
            )
        if self.epsilon_column is not None and EPSILON in self.columns:
            raise UserError(f"{self.key('columns')}: {EPSILON!r} names the ε of each label in the release; rename it")
        if len(set(self.columns)) < len(self.columns):
            raise UserError(f"{self.key('columns')}: names a column twice; name each once")
        if _RESERVED & set(self.label_columns):
            raise UserError(f"{column}: {self.label_column!r} is a part of the pair; name another column")
        for key in ("columns", *NAMED_COLUMNS):
            for name in self.columns if key == "columns" else (getattr(self, key),):
                if name in _RESERVED or name in self.label_columns:
                    raise UserError(f"{self.key(key)}: {name!r} holds the pair or its label; name another column")

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The label's column, or those of both responses."""
        named = (self.label_column or "",)
        return tuple(self.label_column.split(",")) if self.label_column and self.labels in _BOTH else named

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that are read beside the pair and its label."""
        named = (*(getattr(self, key) for key in NAMED_COLUMNS), *self.columns)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def level(self, value: Any) -> int:
        """The number of an ε among the declared levels. RowError for anything else."""
        level = number(value) if not isinstance(value, bool) else 0.0
        if level not in self.epsilon_levels:
            raise RowError(f"has an ε that is none of {self.key('epsilon_levels')}; declare every level")
        return self.epsilon_levels.index(level)

    def score(self, values: Sequence[Any]) -> int:
        """+1 where the values of `label_columns` prefer response_a, -1 where response_b, 0 for a tie.

        RowError for values that were not declared.
        """
        assert self.labels is not None
        if self.labels in _BOTH:
            one, other = map(number, values)
            return _BOTH[self.labels] * sign(one - other)
        if self.labels in SIGNED:
            return SIGNED[self.labels] * sign(strength(values[0]))
        meanings = meaning(self.labels)
        value = letter(values[0])
        if value not in meanings:
            declares = f"has a label that {self.key('labels')} does not declare"
            raise RowError(f"{declares}; declare every value, or repair the row")
        return meanings[value]


def nearest(missing: Iterable[str], present: Iterable[str], known: Iterable[str]) -> str:
    """The words "; the nearest is ..." for columns that resemble a missing one, the same whichever is missing."""
    others = sorted(set(present) - set(known))[:MOST_COMPARED]
    near = sorted({match for name in missing for match in difflib.get_close_matches(name, others, n=1)})
    return f"; the nearest is {', '.join(map(repr, near))}" if near else ""


def column_value(row: Mapping[str, Any], name: str, known: Sequence[str]) -> Any:
    """The value; RowError if the row has no such column, or null."""
    if name not in row:
        raise RowError(f"has no column {name!r}{nearest([name], row, known)}; add it, or remove the row")
    if row[name] is None:
        raise RowError(f"column {name!r} is null; fill it in, or remove the row")
    return row[name]


def is_filled(value: Any) -> bool:
    """False for null, an empty text or list, NaN, and words for them in tables."""
    return bool(value) and value == value and value not in _EMPTY


def verdict(value: Any) -> bool | None:
    """The meaning of a word of `VERDICTS`; None for any other value."""
    return VERDICTS.get(str(value).strip().lower())


def without_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with empty texts for `MISSING` ones."""
    return {name: "" if value in MISSING else value for name, value in row.items()}


def sign(value: float) -> int:
    """-1, 0 or +1."""
    return (value > 0) - (value < 0)


def number(value: Any) -> float:
    """A finite number, also one written as text. RowError for anything else."""
    with suppress(ValueError, OverflowError):
        if isinstance(value, str | int | float | Decimal) and math.isfinite(result := float(value)):
            return result
    raise RowError("has a label or score that is not a number; repair or remove the row")


def strength(value: Any) -> float:
    """A finite number. RowError for anything else, and for true and false, which Python takes for 1 and 0."""
    return number(None if isinstance(value, bool) else value)


def letter(value: Any) -> str:
    """A label as it stands in --labels: true and false for booleans and for True and False, 1 for 1.0 (also a text)."""
    text = str(value).strip() if isinstance(value, str | int | float | Decimal) else ""
    if text.lower() in ("true", "false"):
        return text.lower()
    whole, point, rest = text.partition(".")
    return whole if point and rest and not rest.strip("0") and whole.lstrip("+-").isdigit() else text


def meaning(labels: Sequence[str]) -> dict[str, int]:
    """+1, -1 or 0 (a tie) by value."""
    if any("=" in each for each in labels):
        pairs = [each.rpartition("=") for each in labels]
        return {letter(value): _MEANING.get(means, 2) for value, _, means in pairs}
    return {letter(value): sign for value, sign in zip(labels, (1, -1), strict=False)}


def check_labels(labels: tuple[str, ...], key: str) -> None:
    """UserError, which names the key or option, unless the labels are of a form above."""
    if labels in SIGNED or labels in _BOTH:
        return
    meanings, few = meaning(labels), "=" in labels[0] or len(labels) == 2
    different = len(labels) == len(meanings) and all(meanings)
    if not (few and different and {1, -1} <= set(meanings.values()) <= {1, -1, 0}):
        raise UserError(f"{key}: declare two different values, for example 1,0, or A=a,B=b,both=tie")


def parse_labels(text: str | None, key: str = "--labels") -> tuple[str, ...] | None:
    """`A,B` as ("A", "B"). UserError unless there are two values, several with what they mean, or `higher`."""
    if text is None:
        return None
    values = tuple(value.strip() for value in text.split(","))
    if len(values) != 2 and values not in _BOTH and not all("=" in value for value in values):
        raise UserError(f"{key}: declare two values with a comma between them, for example A,B")
    return values


def parse_levels(text: str | None, key: str = "--epsilon-levels") -> tuple[float, ...]:
    """`4,0.5` as (0.5, 4.0). UserError unless every part is a finite number above 0, and no part comes twice."""
    try:
        levels = sorted(float(part) for part in (text or "").split(",") if text is not None)
    except ValueError:
        levels = [0.0]
    if "_" in (text or "") or len(set(levels)) < len(levels) or not all(0.0 < level < math.inf for level in levels):
        raise UserError(f"{key}: must be different numbers above 0 with commas between them, for example 0.5,1,4")
    return tuple(levels)
