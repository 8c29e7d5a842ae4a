"""The embedded preference task: its data files, and labels drawn from the ground truth at run time.

`draw_labels` makes the raw labels. Only the stage that privatises them and the final evaluation (whose labels are
synthetic, hence public) may call it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow.parquet as pq
from private_rlhf.embedded.truth import true_reward

Split = Literal["train", "eval"]
"""Both splits have the same forms of request, and no topic in common."""

_FOLDER = Path(__file__).parent
_PAIR_FILES: dict[Split, str] = {"train": "pairs.parquet", "eval": "eval_pairs.parquet"}


class PairRecord(NamedTuple):
    """Two different responses to one prompt; which of them is a and which b says nothing about a preference."""

    prompt: str
    response_a: str
    response_b: str


class Answer(NamedTuple):
    """One response to a prompt."""

    prompt: str
    response: str


def load_pairs(split: Split) -> list[PairRecord]:
    """The unlabelled pairs: on the training prompts, or (disjoint topics) on the evaluation prompts."""
    return [PairRecord(**row) for row in _rows(_PAIR_FILES[split])]


def load_demonstrations() -> list[Answer]:
    """Answers to training prompts, of the desired form and selected without looking at the ground truth."""
    return [Answer(**row) for row in _rows("demonstrations.parquet")]


def load_prompts(split: Split) -> list[str]:
    """The distinct prompts of a split."""
    return [row["prompt"] for row in _rows(f"{split}_prompts.parquet")]


def draw_labels(pairs: Iterable[tuple[str, str, str]], seed: int) -> list[int]:
    """Bradley-Terry labels y in {-1, +1} of (prompt, response_a, response_b): P(y = +1) = sigmoid(r*(a) - r*(b)).

    The label of a pair is a function of the seed and the pair alone: it depends neither on the other pairs nor on their
    order, and swapping the two responses flips it. Equal pairs therefore get equal labels.
    """
    return [_label(prompt, a, b, seed) for prompt, a, b in pairs]


def _label(prompt: str, a: str, b: str, seed: int) -> int:
    first, second = sorted((a, b))
    margin = true_reward(prompt, first) - true_reward(prompt, second)
    prefers_first = _uniform(seed, prompt, first, second) < 1.0 / (
        1.0 + math.exp(-margin)
    )  # |margin| <= 8: no overflow
    return 1 if prefers_first == (a == first) else -1


def _uniform(seed: int, *texts: str) -> float:
    """A number in [0, 1) from a hash of the seed and the texts, each preceded by its length."""
    digest = hashlib.blake2b(digest_size=8, person=b"bradley-terry")
    for text in (str(seed), *texts):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return (int.from_bytes(digest.digest(), "big") >> 11) * 2.0**-53


def _rows(name: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(_FOLDER / name).to_pylist()
    return rows
