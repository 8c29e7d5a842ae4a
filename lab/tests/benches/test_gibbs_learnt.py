"""The Gibbs policy from stored answers: every loss moves a policy towards what r̂ prefers; shares tell causes apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.core.world import declared_world
from private_rlhf.data.inputs import evaluation_prompts, make_renderer, training_prompts
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.gibbs import gibbs_weights
from private_rlhf_lab.benches.gibbs_learnt import SETTINGS, Bench, Draws, Setting, gains, shares
from private_rlhf_lab.benches.gibbs_losses import LOSSES
from support.pipeline_runs import ROOT

GOOD, BAD = [20, 21, 22], [30, 31, 32]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One on the tiny model, without a run."""
    recipe = load_recipe(Recipe, ROOT / "configs" / "demo.yaml")
    ppo = replace(recipe.ppo, lora=LoraSettings(rank=4))
    made = object.__new__(Bench)
    made.recipe = replace(recipe, ppo=ppo, model=replace(recipe.model, dtype="float32"))
    made.home = Path(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    made.renderer = make_renderer(made.recipe.model, load_tokenizer(made.home))
    made.accelerator = make_accelerator(declared_world())
    return made


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_the_reward_prefers_becomes_likelier(bench: Bench, loss: str, averaged: bool) -> None:
    """Of two answers to each of 32 prompts the first has a reward 3 kl_coef higher."""
    prompts = [f"prompt {number}" for number in range(32)]
    score = torch.tensor([[3.0 * bench.recipe.ppo.kl_coef, 0.0]], dtype=torch.float64).repeat(len(prompts), 1)
    draws = Draws(prompts, [row for _ in prompts for row in (GOOD, BAD)], score, score)
    setting = Setting(loss, prompts=32, answers=2, passes=4, rate=1e-2, rank=4, averaged=averaged)
    learnt, facts = bench.learn(setting, [draws])
    assert (facts["steps"], len(facts["losses"])) == (16, 4)
    margin = []
    for model in (load_causal_lm(bench.home, "float32"), learnt.policy):
        rows = [(bench.renderer.prompt_ids("another"), row) for row in (GOOD, BAD)]
        likely = mean_logprobs(model, rows, pad_token_id=0, batch_size=2, device=torch.device("cpu"))
        margin.append(likely[0] - likely[1])
    assert margin[1] > margin[0] + 0.1


def test_a_pass_reads_every_prompt_once(bench: Bench) -> None:
    steps = list(bench.groups(Setting(answers=8), 270, 270))
    first = [prompt for step in steps[:135] for prompt in step]
    assert sorted(first) == list(range(270))
    assert sorted(prompt for step in steps for prompt in step) == sorted(2 * list(range(270)))


def test_further_prompts_are_new(bench: Bench) -> None:
    known = {*training_prompts("embedded", Path()), *evaluation_prompts("embedded", Path())}
    further = bench.prompts("further")
    assert len(set(further)) == len(further) == 810
    assert not known & set(further)


def test_shares_are_of_the_same_prompts() -> None:
    part = {
        "kl": [0.2, 0.4],
        "score": [1.1, 1.2],
        "gibbs score": [2.0, 2.0],
        "truth": [0.6, 0.7],
        "gibbs truth": [1.0, 1.0],
    }
    found = shares({"resampled": {"training": part, "held-out": part}}, kl_coef=0.5)
    names = ("resampled training r̂", "resampled held-out r*", "resampled training KL", "sampled training r̂")
    assert tuple(found[name] for name in names) == (0.5, 0.5, 0.3, "")


def test_weights_of_the_gibbs_policy_have_its_gain() -> None:
    score = torch.randn(20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws([str(number) for number in range(20)], [], score, score)
    found = gains(gibbs_weights(score.numpy(), 0.5), draws, 0.5)
    gain = np.array(found["score"]) - 0.5 * np.array(found["kl"])
    assert gain == pytest.approx(np.array(found["gibbs score"]), abs=1e-3)
    assert (gain > 0).all()


def test_every_setting_is_asked_once() -> None:
    settings = [setting for each in SETTINGS.values() for setting in each]
    assert len(set(settings)) == len(settings)
