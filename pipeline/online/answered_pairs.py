"""Answered pairs in the coordinates of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from private_rlhf.data.release import ReleasedPair
from private_rlhf.online.candidates import CandidateSampler
from private_rlhf.privacy.records import Text
from private_rlhf.reward_models.basis import FeatureBasis


@dataclass(frozen=True)
class AnsweredPairs:
    """Answered pairs: rows (prompt, one, other, z), coordinates one and other (n, k), z (n,) +1 for `one`."""

    rows: list[tuple[Text, Text, Text, int]]
    one: torch.Tensor
    other: torch.Tensor
    z: torch.Tensor


def answered_pairs(pairs: Sequence[ReleasedPair], sampler: CandidateSampler, basis: FeatureBasis) -> AnsweredPairs:
    """Released pairs in the coordinates of a basis; `one` is the answer that z prefers."""
    texts = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    renderer = sampler.renderer
    features = sampler.features(
        [renderer.prompt_ids(prompt) + renderer.response_ids(text) for prompt, text in texts], "earlier answers"
    )
    one, other = basis.coordinates(features).reshape(len(pairs), 2, -1).unbind(dim=1)
    rows = [(pair.prompt, pair.chosen, pair.rejected, 1) for pair in pairs]
    return AnsweredPairs(rows, one, other, torch.ones(len(pairs), dtype=torch.float64))
