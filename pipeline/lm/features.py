"""Last-token features of many texts by a reward backbone: like texts in shared rows, finished parts kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.lm.distributed import turns
from private_rlhf.lm.rows import batches, make_rows
from safetensors.torch import load_file, save_file
from tqdm import tqdm

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
    together: bool = False,
) -> torch.Tensor:
    """φ (N, d) float32 of N token sequences, in their order.

    model: a `private_rlhf.reward_models.model.RewardModel` on `device`. batch_size: texts per forward pass. progress:
    label of a bar, or None. keep: folder for finished parts of some 2,048 texts, from which an interrupted run goes on.
    together: weights are split, so every process takes part, also without texts. Not with `keep`.
    """
    sharing = model.sharing
    parts = _parts(list(turns(batches(rows, sharing, batch_size), device, together)))
    if not parts:
        return torch.empty(0, len(model.weight))
    bar = tqdm(total=len(rows), desc=progress, unit="text", disable=progress is None, leave=False)
    finished, order = [], []
    for number, part in enumerate(parts):
        path = keep / f"features-{number:05d}.safetensors" if keep else None
        order.append(torch.tensor([index for indices in part for index in indices], dtype=torch.long))
        stored = load_file(path) if path is not None and path.is_file() else {}
        if "indices" in stored and torch.equal(stored["indices"], order[-1]):  # batches differ by device and kernels
            finished.append(stored["features"])
            bar.update(len(finished[-1]))
            continue
        features = []
        for indices in part:
            texts = [rows[index] for index in indices] or [[pad_token_id]]
            batch_rows = make_rows(texts, pad_token_id, device, sharing)
            features.append(model.row_features(batch_rows).float().cpu()[: len(indices)])
            bar.update(len(indices))
        finished.append(torch.cat(features))
        if path is not None:
            with atomic.new_file(path) as temporary:
                save_file({"features": finished[-1], "indices": order[-1]}, temporary)
    bar.close()
    return torch.cat(finished)[torch.cat(order).argsort()]


def _parts(groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Batches in parts of some `PART` texts."""
    parts: list[list[Sequence[int]]] = []
    count = PART
    for batch in groups:
        if count >= PART:
            parts.append([])
            count = 0
        parts[-1].append(batch)
        count += len(batch)
    return parts
