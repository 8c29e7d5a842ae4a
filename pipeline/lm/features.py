"""Last-token features of many texts by a reward backbone: short texts batched together, finished parts kept on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from pipeline.lm.generate import pad_right

PART = 2048


@torch.no_grad()
def extract_features(
    model: Any,
    rows: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
    progress: str | None = None,
    keep: Path | None = None,
) -> torch.Tensor:
    """φ (N, d) float32 of N token sequences, in their order.

    Args:
        model: has `features(input_ids, attention_mask) -> (B, d)`.
        rows: token ids of each text, end-of-turn token included.
        pad_token_id: masked by length.
        batch_size: texts per forward pass.
        device: of the model.
        progress: label of a progress bar, or None.
        keep: folder for finished parts of 2,048 texts, so that an interrupted run goes on from there.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    bar = tqdm(total=len(rows), desc=progress, unit="text", disable=progress is None, leave=False)
    parts = []
    for number, start in enumerate(range(0, len(order), PART)):
        picked = order[start : start + PART]
        path = keep / f"features-{number:05d}.safetensors" if keep else None
        if path is not None and path.is_file():
            parts.append(load_file(path)["features"])
            bar.update(len(picked))
            continue
        batches = []
        for first in range(0, len(picked), batch_size):
            ids, mask = pad_right([rows[i] for i in picked[first : first + batch_size]], pad_token_id, device)
            batches.append(model.features(ids, mask).float().cpu())
            bar.update(len(ids))
        parts.append(torch.cat(batches))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"features": parts[-1]}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    bar.close()
    result = torch.empty_like(torch.cat(parts))
    result[torch.tensor(order)] = torch.cat(parts)
    return result
