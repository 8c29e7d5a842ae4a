"""One of two processes that fit the reward stage's head to features of many pairs: says what they took, and the fit.

Usage: reward_features_worker FOLDER RANK
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from private_rlhf.core.noise import LabelNoise
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.rows import Rows
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.bonus_fit import head_bonus
from private_rlhf.reward_models.head import PairFeatures, fit_head, refit_head
from private_rlhf.reward_models.pairs import pair_features
from private_rlhf.stages.reward import held_out, split

from support.pipeline_runs import ROOT
from support.two_processes import gloo_pair

SIZES = (2500, 5000)
DIM = 576
NOISE = LabelNoise.of(2.0)


class Backbone:
    """φ of the text [i] is row i of random numbers."""

    sharing = None
    reward_bound = 8.0

    def __init__(self, weight: torch.Tensor | None = None) -> None:
        self.weight = torch.zeros(DIM) if weight is None else weight

    def raw_score_of(self, features: torch.Tensor) -> torch.Tensor:
        return features.double() @ self.weight

    def row_features(self, rows: Rows) -> torch.Tensor:
        ids = rows.input_ids.flatten()
        return torch.stack([features_of(int(ids[path[0]])) for path in rows.paths])


def features_of(number: int) -> torch.Tensor:
    """(d,) float32; of the preferred response of a pair, which has an odd number, a little larger in front."""
    features = torch.randn(DIM, generator=torch.Generator().manual_seed(number))
    features[:8] *= 4.0
    features[:4] += 0.5 * (number % 2)
    return features


def compute(folder: Path, count: int, accelerator: Accelerator) -> PairFeatures:
    """This process's share of the features of `count` pairs."""
    model: Any = Backbone()
    pairs = [([2 * i + 1], [2 * i + 2]) for i in range(count)]
    return pair_features(model, pairs, 0, 64, folder / f"parts-{count}" / "frozen", accelerator)


def recipe_of(kind: str) -> Recipe:
    """A small head with one kind of Γ."""
    return load_recipe(
        Recipe,
        ROOT / "configs" / "demo.yaml",
        ["reward.num_components=12", f"reward.uncertainty={{kind: {kind}}}", "reward.kappa=1.0"],
    )


def fitted(features: PairFeatures, count: int) -> dict[str, torch.Tensor]:
    """All that the stage makes of the features of `count` pairs: fits, ridges, Γ of each kind, the held-out check."""
    recipe = recipe_of("fisher")
    training, validation = split([str(i) for i in range(count)], 0.1, 0)
    how: dict[str, Any] = {"prompts": [f"prompt {i // 3}" for i in training], "seed": recipe.seed}
    fit, selection = fit_head(features.rows(training), NOISE, recipe.reward, **how)
    plain, _ = fit_head(features.rows(training), NOISE, replace(recipe.reward, ridge="evidence"), **how)
    again, judged = refit_head(features.rows(training), features.rows(validation), NOISE, recipe.reward)
    query = torch.stack([features_of(2 * i) for i in range(4)])
    found = {"fit": fit.weight, "evidence": plain.weight, "again": again.weight, "pairs": torch.tensor(fit.num_pairs)}
    for name, path in (("selection", selection), ("judged", judged)):
        found[name] = torch.tensor([path.ridge, *path.held_out_loss, *path.paired_standard_error])
    for kind in ("fisher", "elliptical", "ensemble"):
        bonus = head_bonus(fit, features.rows(training), recipe_of(kind).reward, recipe.seed)
        found[kind] = bonus.score(query, query.flip(0)[:, None]).bonus
    model: Any = Backbone(fit.weight)
    check = held_out(model, features.rows(validation), NOISE, validation // 3)
    names = ("validation_pairs", "validation_log_likelihood", "validation_log_likelihood_se")
    found["check"] = torch.tensor([check[name] for name in names])
    return found


def peak() -> int:
    """The largest resident memory since the last `reset_peak`, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: Path, rank: int) -> None:
    with gloo_pair(folder, rank) as world:
        accelerator = make_accelerator(world)
        compute(folder, 64, accelerator)  # what the first call of a library costs is not counted
        taken = []
        for count in SIZES:
            reset_peak()
            before = peak()
            found = compute(folder, count, accelerator)
            taken.append(peak() - before)
        torch.save([found.chosen, found.rejected, found.numbers], folder / f"features-{rank}.pt")
        torch.save(fitted(found, SIZES[-1]), folder / f"fitted-{rank}.pt")
        (folder / f"taken-{rank}.json").write_text(json.dumps(taken))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
