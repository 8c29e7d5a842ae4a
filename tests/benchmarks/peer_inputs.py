"""Model, prompts and pairs that the compared loops share; made once, handed to every loop as token ids in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from private_rlhf.data.render import Renderer
from private_rlhf.embedded.task import load_pairs, load_prompts
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import ModelConfig

T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""As recipes write them."""


def checkpoint(model: str, cache: Path) -> str:
    """Folder of the language model named on the command line."""
    return base_checkpoint(ModelConfig(source=model, cache_dir=cache.resolve()))


def renderer(path: str, max_prompt: int, max_response: int) -> Renderer:
    """The one renderer of all loops, without a system message."""
    return Renderer(load_tokenizer(path), max_prompt, max_response, "")


def hh_rows() -> list[dict[str, str]] | None:
    """The evaluation half of the HH-RLHF pairs in the folder PRIVATE_RLHF_TEST_DATA; None without it."""
    root = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    path = Path(root) / "hh_helpful" / "eval.jsonl" if root else None
    if path is None or not path.is_file():
        return None
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evenly(rows: Sequence[T], count: int) -> list[T]:
    """`count` of `rows` at even distances."""
    return [rows[index * len(rows) // count] for index in range(count)]


def prompts(render: Renderer, count: int) -> tuple[str, list[str]]:
    """Where they come from, and `count` distinct prompts, cut to the renderer's limit."""
    rows = hh_rows()
    texts = list(dict.fromkeys(row["prompt"] for row in rows)) if rows else load_prompts("eval")
    return "HH-RLHF" if rows else "embedded", [cut(render, text) for text in evenly(texts, count)]


def cut(render: Renderer, prompt: str) -> str:
    """The longest beginning of `prompt`, in tokens, that the renderer accepts."""
    ids = render.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    while not render.fits(prompt):
        ids = ids[: -max(1, len(ids) // 16)]
        prompt = render.tokenizer.decode(ids)
    return prompt


def pairs(render: Renderer, count: int) -> tuple[str, list[tuple[list[int], list[int]]]]:
    """Where they come from, and the token ids of the first `count` pairs' two texts, in file order."""
    rows = hh_rows()
    if rows:
        texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows[:count]]
    else:
        texts = [(row.prompt, row.response_a, row.response_b) for row in evenly(load_pairs("eval"), count)]
    found = []
    for prompt, first, second in texts:
        start = render.prompt_ids(cut(render, prompt))
        found.append((start + render.response_ids(first), start + render.response_ids(second)))
    return "HH-RLHF" if rows else "embedded", found


def random_head(width: int) -> torch.Tensor:
    """The weight (d,) of a reward head: the same in every loop."""
    return 0.02 * torch.randn(width, generator=torch.Generator().manual_seed(0))


def trainable(model: Any) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
