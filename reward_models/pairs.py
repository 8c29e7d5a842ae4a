"""Released pairs as token ids, and their frozen features, to which the reward is fitted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Renderer, evenly_spaced, keep_fitting_pairs
from private_rlhf.lm.features import extract_features
from private_rlhf.reward_models.basis import OverProcesses
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.model import RewardModel


class RenderedPairs(NamedTuple):
    """Pairs within the limits: `rows`, and (chosen, rejected) token ids; `dropped` counts those beyond them."""

    rows: list[ReleasedPair]
    pairs: list[tuple[list[int], list[int]]]
    dropped: int


def rendered_pairs(
    everything: list[ReleasedPair], renderer: Renderer, too_long: str, max_pairs: int | None = None
) -> RenderedPairs:
    """At most `max_pairs` of the released pairs within the renderer's limits; too_long and errors: `keep_fitting`."""
    fitting, pairs = keep_fitting_pairs(everything, renderer, too_long), []
    rows = [everything[place] for place in evenly_spaced(fitting, max_pairs)]
    for row in rows:
        prompt = renderer.prompt_ids(row.prompt)
        pairs.append((prompt + renderer.response_ids(row.chosen), prompt + renderer.response_ids(row.rejected)))
    return RenderedPairs(rows, pairs, len(everything) - len(fitting))


def pair_features(
    model: RewardModel,
    pairs: list[tuple[list[int], list[int]]],
    pad_token_id: int,
    batch_size: int,
    keep: Path,
    accelerator: Accelerator,
) -> PairFeatures:
    """Features of this process's share of the pairs: no process ever holds all of them.

    keep: resume state of each process is kept under this path with its rank added.
    """
    rank, size = accelerator.process_index, accelerator.num_processes
    numbers = torch.arange(rank, len(pairs), size)
    flat = [sequence for index in numbers.tolist() for sequence in pairs[index]]
    features = extract_features(
        model,
        flat,
        pad_token_id=pad_token_id,
        batch_size=batch_size,
        device=model.weight.device,
        progress="reward features" if accelerator.is_main_process else None,
        keep=keep.with_name(f"{keep.name}-{rank}-of-{size}"),
    ).reshape(len(numbers), 2, -1)
    chosen, rejected = features.unbind(dim=1)
    if size == 1:
        return PairFeatures(chosen, rejected)
    return PairFeatures(chosen, rejected, numbers, OverProcesses(accelerator))
