"""What a run takes over from an earlier one (`online.after`): its policy, its answers, and what it was checked by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.data.render import Renderer
from private_rlhf.lm.features import extract_features
from private_rlhf.privacy.records import Text
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.model import RewardModel


@dataclass(frozen=True)
class Earlier:
    """An earlier run, and how many there were with it."""

    run: RunDir
    count: int

    @property
    def policy(self) -> Path:
        """Checkpoint of its PPO policy."""
        return self.run.stage("ppo") / "model"

    def pairs(self, part: str) -> list[ReleasedPair]:
        """Its answers: `release` or `evaluation`."""
        return list(read_release(self.run.stage("online") / part))


@dataclass(frozen=True)
class Known:
    """Answered pairs: rows (prompt, one, other, z), coordinates one and other (n, k), z (n,) +1 for `one`, 0 a skip."""

    rows: list[tuple[Text, Text, Text, int]]
    one: torch.Tensor
    other: torch.Tensor
    z: torch.Tensor


def earlier_run(recipe: Recipe) -> Earlier | None:
    """The run that the recipe goes on from, if any. UserError where it is not finished, or asked on other terms."""
    if recipe.online is None or recipe.online.after is None:
        return None
    run = RunDir(recipe.online.after.expanduser())
    run.require("ppo")
    facts = run.require("online")["report"]
    for name, wanted in {"epsilon": recipe.privatize.epsilon, "labeller": recipe.online.labeller}.items():
        if facts.get(name) != wanted:
            raise UserError(f"online.after={run.root}: asked with {name} {facts.get(name)}, not {wanted}; keep that")
    return Earlier(run, int(facts.get("runs", 1)))


def known_pairs(
    pairs: Sequence[ReleasedPair], renderer: Renderer, backbone: RewardModel, basis: FeatureBasis, batch_size: int
) -> Known:
    """Released pairs in the coordinates of a basis; `one` is what z prefers."""
    flat = [
        renderer.prompt_ids(pair.prompt) + renderer.response_ids(text)
        for pair in pairs
        for text in (pair.chosen, pair.rejected)
    ]
    features = extract_features(
        backbone,
        flat,
        pad_token_id=renderer.tokenizer.pad_token_id,
        batch_size=batch_size,
        device=backbone.weight.device,
        progress="earlier answers",
    )
    one, other = basis.coordinates(features).reshape(len(pairs), 2, -1).unbind(dim=1)
    rows = [(pair.prompt, pair.chosen, pair.rejected, 1) for pair in pairs]
    return Known(rows, one, other, torch.ones(len(pairs), dtype=torch.float64))
