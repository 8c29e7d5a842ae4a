"""The Gibbs policy without PPO: weighted likelihood moves a policy towards what r̂ prefers, and the table pairs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from private_rlhf.data.inputs import make_renderer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf_lab.benches.gibbs_distilled import BATCH, Draws, distil, table
from support.pipeline_runs import ROOT


def test_one_pass_makes_what_the_reward_prefers_likelier(tmp_path: Path) -> None:
    """Of two answers to each of 2·BATCH prompts the first has a reward 3 kl_coef higher."""
    home = Path(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    recipe = load_recipe(Recipe, ROOT / "configs" / "demo.yaml")
    ppo = replace(recipe.ppo, lora=LoraSettings(rank=4), learning_rate=1e-2)
    recipe = replace(recipe, ppo=ppo, model=replace(recipe.model, dtype="float32"))
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    good, bad = [20, 21, 22], [30, 31, 32]
    prompts = [f"prompt {number}" for number in range(2 * BATCH)]
    score = torch.tensor([[3.0 * ppo.kl_coef, 0.0]], dtype=torch.float64).repeat(len(prompts), 1)
    draws = Draws(prompts, [row for _ in prompts for row in (good, bad)], score)
    assert draws.first(1).rows == [good] * len(prompts)
    margin = []
    for policy in (load_causal_lm(home, "float32"), distil(draws, recipe, renderer, home)):
        rows = [(renderer.prompt_ids("another"), row) for row in (good, bad)]
        likely = mean_logprobs(policy, rows, pad_token_id=0, batch_size=2, device=torch.device("cpu"))
        margin.append(likely[0] - likely[1])
    assert margin[1] > margin[0] + 0.1


def test_the_table_pairs_prompts_with_ppo() -> None:
    noise = np.random.default_rng(0).standard_normal(50)
    ppo = {"policy": "PPO", "count": 100, "true": noise, "kl": [0.5] * 50, "j": noise, "gibbs": noise + 2.0}
    other = ppo | {"policy": "weighted likelihood", "count": 1000, "j": noise + 0.25}
    lines = table([ppo, other]).splitlines()
    assert lines[2].split(" | ")[5] == "–"
    assert lines[3].split(" | ")[5] == "+0.25 [+0.25, +0.25]"
    assert lines[2].split(" | ")[6].startswith(f"{100 * noise.mean() / (noise.mean() + 2):.0f} % [")
    assert "50 prompts" in lines[-1]
