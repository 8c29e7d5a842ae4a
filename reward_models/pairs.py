"""Released pairs as token ids, and their frozen features: of what the reward and the noisy sum are fitted to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from accelerate import Accelerator
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Renderer, keep_fitting_pairs
from private_rlhf.lm.features import extract_features
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.spread import OverProcesses
from private_rlhf.stages.context import StageContext


class RenderedPairs(NamedTuple):
    """places: of the pairs that fit, among those given. rows: these rows. pairs: (chosen, rejected) token
    ids of each. dropped: rows left out as too long."""

    places: list[int]
    rows: list[ReleasedPair]
    pairs: list[tuple[list[int], list[int]]]
    dropped: int


def rendered_pairs(everything: list[ReleasedPair], renderer: Renderer, recipe: Recipe) -> RenderedPairs:
    """The released pairs that the recipe's limits let through."""
    places = keep_fitting_pairs(everything, renderer, recipe.model.too_long)
    kept = [everything[place] for place in places]
    pairs = []
    for row in kept:
        prompt = renderer.prompt_ids(row.prompt)
        pairs.append((prompt + renderer.response_ids(row.chosen), prompt + renderer.response_ids(row.rejected)))
    return RenderedPairs(places, kept, pairs, len(everything) - len(kept))


def pair_features(
    context: StageContext,
    model: RewardModel,
    pairs: list[tuple[list[int], list[int]]],
    renderer: Renderer,
    tag: str,
    accelerator: Accelerator,
) -> PairFeatures:
    """Features of this process's share of the pairs: no process ever holds all of them."""
    world = context.world
    mine = torch.arange(world.rank, len(pairs), world.size)
    flat = [sequence for index in mine.tolist() for sequence in pairs[index]]
    features = extract_features(
        model,
        flat,
        pad_token_id=renderer.tokenizer.pad_token_id,
        batch_size=context.recipe.reward.feature_batch_size,
        device=model.weight.device,
        progress="reward features" if world.main else None,
        keep=context.checkpoints / f"{tag}-{world.rank}-of-{world.size}",
    ).reshape(len(mine), 2, -1)
    chosen, rejected = features.unbind(dim=1)
    return (
        PairFeatures(chosen, rejected, mine, OverProcesses(accelerator))
        if world.size > 1
        else PairFeatures(chosen, rejected)
    )
