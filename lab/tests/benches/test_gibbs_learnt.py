"""The Gibbs policy from stored answers: every loss moves a policy towards what r̂ prefers; shares tell causes apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.data.render import make_renderer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.gibbs import gibbs_weights
from private_rlhf.rl.replay import Answers
from private_rlhf_lab.benches.gibbs_learnt import SETTINGS, WHOLE, Bench, Setting, candidates, gains, shares
from private_rlhf_lab.benches.gibbs_losses import prefix_variance
from support.pipeline_runs import ROOT

GOOD, BAD = [20, 21, 22], [30, 31, 32]
PROMPTS = 32


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Of two answers of the tiny model to each of 32 prompts the first has a reward 3 kl_coef higher."""
    recipe = load_recipe(Recipe, ROOT / "configs" / "demo.yaml")
    lora = LoraSettings(rank=4, last_layers=1, target_modules=["q_proj", "up_proj"])
    recipe = replace(recipe, gvpo=replace(recipe.gvpo, lora=lora), model=replace(recipe.model, dtype="float32"))
    home = Path(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    ids = [renderer.prompt_ids(f"prompt {number}") for number in range(PROMPTS) for _ in range(2)]
    score = [3.0 * recipe.ppo.kl_coef, 0.0] * PROMPTS
    return Bench(recipe, home, Answers.unscored(ids, [GOOD, BAD] * PROMPTS, 0, score))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("loss", [*WHOLE, "prefixes"])
def test_what_the_reward_prefers_becomes_likelier(bench: Bench, loss: str, averaged: bool) -> None:
    """On prompts that are not learnt from. An untrained policy gains nothing there."""
    setting = Setting(loss, answers=2, passes=4, rate=1e-2, averaged=averaged)
    untrained = bench.measure(setting, "held-out")
    assert np.abs(untrained["score"]).max() < 1e-3
    row = bench.row(setting)
    assert (row["steps"], len(row["losses"]), len(row["held-out"]["kl"])) == (12, 4, 8)
    assert np.mean(row["held-out"]["score"]) > 0.1
    if loss == "variance":
        again = bench.row(setting)  # nothing of the policy before it is left
        assert again["held-out"] == row["held-out"]


def test_the_store_s_log_probabilities_serve_as_well(bench: Bench) -> None:
    setting = Setting(answers=2, rate=1e-2)
    reference = torch.stack([each.sum() for each in bench.reader(None, None)[1]])
    stored = Bench(bench.recipe, bench.home, replace(bench.answers, reference_logprob=reference), once=True)
    expected, found = bench.row(setting)["held-out"], stored.row(setting)["held-out"]
    assert all(np.allclose(found[name], values, atol=2e-3) for name, values in expected.items())
    assert np.mean(expected["score"]) > 0.01


def test_rows_stand_beside_each_other_where_answers_measured_and_adapter_are_the_same(bench: Bench) -> None:
    """Another number of answers, other rewards of as many, or another adapter make other rows."""
    answers, gvpo = bench.answers, bench.recipe.gvpo
    wide = replace(bench.recipe, gvpo=replace(gvpo, lora=LoraSettings(rank=8)))
    longer = replace(bench.recipe, gvpo=replace(gvpo, passes=gvpo.passes + 1))
    others = (
        (bench.recipe, answers.take(range(0, len(answers), 2))),
        (bench.recipe, replace(answers, score=answers.score + 1.0)),
        (wide, answers),
    )
    found = {bench.identity, *(Bench(recipe, bench.home, own).identity for recipe, own in others)}
    assert len(found) == 4
    assert Bench(longer, bench.home, answers, once=True).identity == bench.identity


def test_held_out_prompts_are_not_learnt_from(bench: Bench) -> None:
    setting = Setting(answers=2, passes=2, prompts=16)
    steps = list(bench.groups(setting, torch.Generator()))
    assert [len(step) for step in steps] == [8] * 4
    learnt, held_out = ({*bench.prompts(setting, split)} for split in ("training", "held-out"))
    assert {prompt for step in steps for prompt, _ in step} == learnt
    assert len(learnt) == 16
    assert not learnt & held_out
    assert len(held_out) == 8


def test_the_truth_can_be_learnt_from_in_the_place_of_the_reward(bench: Bench) -> None:
    """Were r* the opposite of r̂, a policy that learns from it would move away from what r̂ prefers."""
    bench.truth = -bench.score
    towards, away = (
        np.mean(bench.row(Setting(answers=2, passes=4, rate=1e-2, target=target))["held-out"]["truth"])
        for target in ("truth", "score")
    )
    assert towards > 0.1
    assert away < -0.1


def test_many_answers_are_shared_out_over_the_steps(bench: Bench) -> None:
    """Of 27 answers to each of 16 prompts three groups of eight are learnt from, two groups in a step."""
    setting = Setting(answers=27, prompts=16)
    groups = [group for step in bench.groups(setting, torch.Generator()) for group in step]
    learnt = bench.prompts(setting, "training")
    assert sorted(groups, key=str) == sorted(
        ((prompt, range(start, start + 8)) for prompt in learnt for start in (0, 8, 16)), key=str
    )
    stopped = Setting(answers=2, passes=4, steps=5)
    assert bench.learn(stopped)["steps"] == 5


def test_prefixes_have_no_variance_at_the_gibbs_policy_and_some_elsewhere() -> None:
    """The log-ratio of each token is what it adds to the expected utility, up to a constant at the first."""
    values = [torch.tensor([0.5, 1.0, -0.5]), torch.tensor([0.25])]
    exact = torch.tensor([[0.5, 0.5, -1.5], [0.25, 0.0, 0.0]])
    shifted = exact + torch.tensor([[0.7, 0.0, 0.0], [0.7, 0.0, 0.0]])
    assert float(prefix_variance(exact, values, 2)) == pytest.approx(0.0, abs=1e-12)
    assert float(prefix_variance(shifted, values, 2)) == pytest.approx(0.0, abs=1e-12)
    # By hand: residuals ½, 1, −½ of weights ½, ½, 1 and ¼ of weight 1 have mean 1/6, and Σ w·(u − 1/6)² = 0.854.
    assert float(prefix_variance(torch.zeros(2, 3), values, 2)) == pytest.approx(0.2135417, abs=1e-6)


def test_shares_are_of_the_same_prompts() -> None:
    part = {
        "kl": [0.2, 0.4],
        "score": [1.1, 1.2],
        "gibbs score": [2.0, 2.0],
        "truth": [0.6, 0.7],
        "gibbs truth": [1.0, 1.0],
        **{f"variance {name}": [2.0, 2.0] for name in ("π_ref", "Gibbs")},
        **{f"residual {name}": [0.5, 1.5] for name in ("π_ref", "Gibbs")},
    }
    found = shares({"training": part, "held-out": part}, kl_coef=0.5)
    names = ("training r̂", "held-out r*", "training KL", "held-out explained, Gibbs")
    assert tuple(found[name] for name in names) == (0.5, 0.5, 0.3, 0.5)


def test_weights_of_the_gibbs_policy_have_its_gain() -> None:
    score = torch.randn(20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = gains(np.log(gibbs_weights(score.numpy(), 0.5)), score, score, 0.5)
    gain = np.array(found["score"]) - 0.5 * np.array(found["kl"])
    assert gain == pytest.approx(np.array(found["gibbs score"]), abs=1e-3)
    assert (gain > 0).all()
    assert np.abs(found["residual π_ref"]).max() < 1e-3 < np.min(found["variance π_ref"])


def test_more_candidates_gain_more_up_to_what_a_normal_reward_allows() -> None:
    """Of normal r̂ with a small variance, which eight answers show nearly whole."""
    score = 0.1 * torch.randn(2000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = candidates(score, -score, 0.5)
    assert [row["candidates"] for row in rows] == [2, 4, 8, np.inf]
    gain = [row["r̂"] for row in rows]
    assert gain[0] < gain[1] < gain[2] <= gain[3] == pytest.approx(0.01, abs=1e-3)
    assert all(row["r*"] < 0 for row in rows[:3])


def test_many_candidates_are_drawn_instead_of_counted() -> None:
    """Of 70 normal answers there are 10¹⁸ choices of 16; the gain among 64 is that among all answers there are."""
    score = 0.1 * torch.randn(300, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = candidates(score, score, 0.5)
    assert [row["candidates"] for row in rows] == [2, 4, 8, 16, 32, 64, np.inf]
    gain = [row["r̂"] for row in rows]
    assert gain == sorted(gain)
    assert gain[-2] == pytest.approx(gain[-1], abs=1e-3)


def test_every_setting_is_asked_once() -> None:
    settings = [setting for each in SETTINGS.values() for setting in each]
    assert len(set(settings)) == len(settings)
