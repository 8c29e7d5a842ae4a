"""The linearised policy: its kernel is that of the gradients, and its regression explains what one rule decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_rlhf.data.render import make_renderer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.rl.replay import Answers
from private_rlhf_lab.benches.gibbs_learnt import Bench
from private_rlhf_lab.benches.gibbs_linear import Gradients, best_ridge, explained, lines, places, ridge_regression
from support.pipeline_runs import ROOT

GOOD, BAD = [20, 21, 22], [30, 31]
PROMPTS = 20


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Of two answers of the tiny model to each of 20 prompts the first has a reward 2 kl_coef higher."""
    recipe = load_recipe(Recipe, ROOT / "configs" / "demo.yaml")
    recipe = replace(recipe, model=replace(recipe.model, dtype="float32"))
    home = Path(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path)))
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    ids = [renderer.prompt_ids(f"prompt {number}") for number in range(PROMPTS) for _ in range(2)]
    score = [2.0 * recipe.ppo.kl_coef, 0.0] * PROMPTS
    return Bench(recipe, home, Answers.unscored(ids, [GOOD, BAD] * PROMPTS, 0, score))


def test_the_kernel_is_that_of_the_gradients_of_each_answer_by_itself(bench: Bench) -> None:
    lora = LoraSettings(rank=4, last_layers=1, target_modules=["q_proj", "up_proj"])
    gradients = Gradients(bench, lora)
    (layer,) = gradients.kernels
    rows = [row for prompt in bench.rows for row in prompt][:5]
    expected = []
    for row in rows:
        ids = torch.tensor([bench.answers.prompts[row] + bench.answers.responses[row]])
        logprobs = gradients.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        tokens = bench.answers.responses[row]
        logprobs[-len(tokens) :].gather(1, torch.tensor(tokens)[:, None]).sum().backward()
        weights = [each for name, each in sorted(gradients.model.named_parameters()) if "lora_B" in name]
        expected.append(torch.cat([weight.grad.flatten() for weight in weights]))
        gradients.model.zero_grad(set_to_none=True)
    table = torch.stack(expected)
    found = gradients.kernels[layer][:5, :5]
    scale = float((table @ table.T).diagonal().mean())
    assert float((found - table @ table.T).abs().max()) < 0.02 * scale  # they are kept in bfloat16


def test_what_one_rule_decides_is_explained_on_prompts_that_are_not_learnt_from(bench: Bench) -> None:
    gradients = Gradients(bench, LoraSettings(rank=4, last_layers=1, target_modules=["q_proj", "up_proj"]))
    (layer,) = gradients.kernels
    found = list(lines(bench, gradients, [range(layer, layer + 1)], [6, 15]))
    assert [(line["prompts"], line["answers"]) for line in found] == [(6, 12), (15, 30)]
    assert all(line["held-out explained, π_ref"] > 0.8 for line in found)


def test_ridge_regression_by_hand() -> None:
    """Two known places with a product of 1 with themselves: f = ½·y of either for an asked place like the first."""
    kernel = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([3.0, -3.0, 3.0], dtype=torch.float64)
    found = ridge_regression(kernel, target, torch.tensor([0, 1]), torch.tensor([2]), 1.0)
    assert found.tolist() == [1.5]
    assert explained(found, target[2:]) == pytest.approx(0.75)


def test_a_noisy_target_asks_for_a_larger_ridge() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(80, 40, dtype=torch.float64, generator=generator)
    kernel = features @ features.T / 40
    signal = features[:, 0]
    noise = torch.randn(80, dtype=torch.float64, generator=generator)
    prompts = list(range(40))
    clean, noisy = (best_ridge(kernel, signal + size * noise, prompts, 2) for size in (0.0, 3.0))
    assert clean < noisy
    assert places([1, 3], 2).tolist() == [2, 3, 6, 7]
