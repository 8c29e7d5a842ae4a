"""The ceiling of what labels can be worth, and κ without labels: both on a pool whose truth is known to be linear."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.embedded import task
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf_lab.benches import kappa_without_labels
from private_rlhf_lab.benches.kappa_without_labels import needed, randomised
from private_rlhf_lab.benches.privacy_cost import (
    CEILING,
    LOSSES,
    UNLABELLED,
    Pool,
    drawn_directions,
    earlier_rows,
    known_sizes,
    opened,
    scored,
)
from safetensors.torch import save_file
from support.pipeline_runs import ROOT

DIM = 48


@pytest.fixture(scope="module")
def world() -> tuple[Pool, Recipe]:
    """As many pairs as the embedded task has, features of falling sizes, a truth along 4 of 48, margins of about 2."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(DIM)
    weight[:4] = 0.5
    size = torch.linspace(1.5, 0.5, DIM)  # so that directions are told apart
    sides = torch.randn(2, len(task.load_pairs("train")), DIM, generator=generator) * size
    drawn = torch.randn(60, 16, DIM, generator=generator) * size
    sides[..., -1] += 20.0  # the mean, which a basis leaves out, is where the truth is not
    recipe = load_recipe(Recipe, ROOT / "configs" / "demo.yaml")
    reward = replace(recipe.reward, ridge="evidence", num_components=None, reward_bound=None)
    pool = Pool(drawn, drawn @ weight, sides[0], sides[1], torch.stack([side @ weight for side in sides], dim=1))
    return pool, replace(recipe, reward=reward)


def test_known_sizes_are_worth_something_and_cover_a_linear_truth(world: tuple[Pool, Recipe]) -> None:
    """At ε = .5 the error falls by a good part; without flips Γ needs no κ where features miss nothing."""
    pool, recipe = world
    weight = known_sizes(pool, recipe).matrix.norm(dim=0)
    assert int((weight > 0.3 * weight.max()).sum()) <= 10
    margin = (pool.pair_truth[:, 0] - pool.pair_truth[:, 1]).double()
    labels, truth, errors = randomised(margin, 0.5, 1), pool.truth.numpy(), []
    for arm in (LOSSES[0], CEILING):
        reward, _ = scored(pool, recipe, 0, 0.5, arm, labels)
        errors.append(float(np.std((reward - truth) - (reward - truth).mean(axis=1, keepdims=True))))
    assert errors[1] < 0.8 * errors[0]
    plain = scored(pool, recipe, 0, math.inf, LOSSES[0], randomised(margin, math.inf, 1))
    assert 0.7 < needed(*plain, truth) < 1.4


def test_directions_of_draws_know_no_label_and_no_truth(world: tuple[Pool, Recipe]) -> None:
    """They span what the draws do; without flips a fit in them finds a linear truth."""
    pool, recipe = world
    blind = replace(pool, truth=torch.zeros_like(pool.truth), pair_truth=torch.zeros_like(pool.pair_truth))
    assert torch.equal(drawn_directions(pool, recipe).matrix, drawn_directions(blind, recipe).matrix)
    margin = (pool.pair_truth[:, 0] - pool.pair_truth[:, 1]).double()
    reward, _ = scored(pool, recipe, 0, math.inf, UNLABELLED, randomised(margin, math.inf, 1))
    assert np.corrcoef(reward.ravel(), pool.truth.numpy().ravel())[0, 1] > 0.95


def test_a_difference_is_of_the_same_draws_and_seeds(tmp_path: Path) -> None:
    """Other prompts, as many of them, or other seeds are refused; features may differ."""
    drawn = {"sft": "a", "prompts": '["p"]', "candidates": "4"}
    cells = {"own": {**drawn, "features": "last 10"}, "same": {**drawn, "features": "last 14"}}
    cells["other"] = {**cells["own"], "prompts": '["q"]'}
    for name, facts in cells.items():
        (tmp_path / name).mkdir()
        save_file({"truth": torch.zeros(1)}, tmp_path / name / "pool.safetensors", facts)
        rows = [{"seed": seed, "epsilon": None} for seed in (3, 4)]
        (tmp_path / name / "results.json").write_text(json.dumps({"rows": rows}))
    found = earlier_rows(tmp_path / "own", tmp_path / "same", range(3, 5))
    assert found == [{"seed": seed, "epsilon": math.inf} for seed in (3, 4)]
    for name, seeds in (("other", range(3, 5)), ("same", range(2))):
        with pytest.raises(UserError, match=f"got {name}: measure it again"):
            earlier_rows(tmp_path / "own", tmp_path / name, seeds)


def test_a_pool_is_read_with_its_own_settings_and_its_own_draws(
    world: tuple[Pool, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """draws.json is of the last call, whatever its --name."""
    shutil.copy(ROOT / "configs" / "demo.yaml", tmp_path / "recipe.yaml")
    path, run = tmp_path / "privacy_cost" / "pool.safetensors", RunDir(tmp_path)
    path.parent.mkdir()
    facts = {"prompts": '["p"]', "candidates": "4", "features": "None 14"}
    save_file({name: tensor.contiguous() for name, tensor in vars(world[0]).items()}, path, facts)
    with pytest.raises(UserError, match="None 14, got None 10: repeat --set"):
        opened(run, "", [])
    recipe, home, pool = opened(run, "", ["reward.num_layers=14"])
    assert torch.equal(pool.truth, world[0].truth)
    (path.parent / "draws.json").write_text(json.dumps({"identity": ["a", ["q"], 4], "texts": [["of another call"]]}))
    monkeypatch.setattr(kappa_without_labels, "draws", lambda run, recipe, prompts, count: [prompts * count])
    assert kappa_without_labels.texts_of(run, recipe, home) == [["p"] * 4]


def test_labels_are_kept_as_often_as_epsilon_says() -> None:
    """20,000 sure labels; 5 standard errors, a false alarm in 10⁶."""
    kept = float((randomised(torch.full((20_000,), 50.0), 1.0, 3) > 0).double().mean())
    alpha = LabelNoise.of(1.0).keep_prob
    assert abs(kept - alpha) < 5 * math.sqrt(alpha * (1 - alpha) / 20_000)
