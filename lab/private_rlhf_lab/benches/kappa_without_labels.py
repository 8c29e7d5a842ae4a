"""κ without a label: what the recipe's reward and Γ would need if the truth were one of many simulated rewards.

A simulated reward scores words: a random direction among the 30 in which answers' sums of input embeddings differ most,
scaled so that margins have the standard deviation that is stated below. Its labels on the training pairs are drawn,
randomised and fitted as those of the task are, and κ is what r̄ ± κΓ needs to hold 68 % of the simulated rewards of the
pool's draws, a median over rewards. Neither the task's truth nor a label of anybody is read; the last column, which
reads the truth, is there to judge the rule.

Needs what `privacy_cost.py --run RUN --name NAME --set …` left behind; give it the same --name and --set.
Run:  python -m private_rlhf_lab.benches.kappa_without_labels --run runs/cost --name NAME --set … [--rewards 12]
Writes RUN/privacy_cost/NAME/kappa.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.render import make_renderer
from private_rlhf.embedded import task
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.basis import pair_basis
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import name_of
from private_rlhf_lab.benches.privacy_cost import EPSILONS, LOSSES, draws, identity_of, opened, private_labels, scored

DIRECTIONS, MARGIN, SHARE = 30, 2.0, 0.6827


def word_sums(run: RunDir, recipe: Recipe, texts: Sequence[str]) -> torch.Tensor:
    """(n, d) float32: the sum of each answer's input embeddings."""
    home = run.stage("sft") / "model"
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    model: Any = load_causal_lm(home, recipe.model.dtype)
    table = model.get_input_embeddings().weight.detach().float()
    return torch.stack([table[torch.tensor(renderer.response_ids(text))].sum(dim=0) for text in texts])


def texts_of(run: RunDir, recipe: Recipe, home: Path) -> list[list[str]]:
    """The completions of the pool in `home`: drawn again where a call with other prompts has drawn since."""
    pool = identity_of(home / "pool.safetensors")
    return draws(run, recipe, json.loads(pool["prompts"]), int(pool["candidates"]))


def simulated(run: RunDir, recipe: Recipe, texts: list[list[str]], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` rewards of the pool's draws (count, n, N) and of the training pairs (count, m, 2), float64."""
    pairs = [text for row in task.load_pairs("train") for text in (row.response_a, row.response_b)]
    drawn = word_sums(run, recipe, [text for own in texts for text in own])
    both = word_sums(run, recipe, pairs)
    basis = pair_basis(both[0::2], both[1::2], num_components=DIRECTIONS, whiten=True)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(DIRECTIONS, count, generator=generator, dtype=torch.float64)
    of_pairs = (basis.coordinates(both) @ direction).T.reshape(count, -1, 2)
    scale = MARGIN / (of_pairs[..., 0] - of_pairs[..., 1]).std(dim=1)[:, None, None]
    of_draws = (basis.coordinates(drawn) @ direction).T.reshape(count, len(texts), -1)
    return of_draws * scale, of_pairs * scale


def randomised(margin: torch.Tensor, epsilon: float, seed: int) -> torch.Tensor:
    """(m,) ±1: Bradley–Terry labels of margins (m,), through randomised response."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(2, len(margin), generator=generator, dtype=torch.float64)
    label = torch.where(coins[0] < torch.sigmoid(margin), 1, -1)
    return torch.where(coins[1] < LabelNoise.of(epsilon).keep_prob, label, -label)


def needed(reward: np.ndarray, bonus: np.ndarray, truth: np.ndarray) -> float:
    """κ at which r̄ ± κΓ holds `SHARE` of the centred truth, all (n, N)."""
    error = (reward - reward.mean(axis=1, keepdims=True)) - (truth - truth.mean(axis=1, keepdims=True))
    return float(np.quantile(np.abs(error) / bonus, SHARE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--rewards", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe, home, pool = opened(run, options.name, options.set)
    texts = texts_of(run, recipe, home)
    of_draws, of_pairs = simulated(run, recipe, texts, options.rewards)
    print("| ε | κ needed by simulated rewards, median [quartiles] | by the truth |")
    print("|---|---|---|")
    found: dict[str, Any] = {}
    for epsilon in EPSILONS:
        asked = []
        for number in tqdm(range(options.rewards), desc=f"ε = {epsilon:g}", leave=False):
            labels = randomised(of_pairs[number, :, 0] - of_pairs[number, :, 1], epsilon, number)
            asked.append(needed(*scored(pool, recipe, number, epsilon, LOSSES[0], labels), of_draws[number].numpy()))
        true = [
            needed(*scored(pool, recipe, seed, epsilon, LOSSES[0], private_labels(seed, epsilon)), pool.truth.numpy())
            for seed in range(5)
        ]
        found[name_of(epsilon)] = {"simulated": asked, "truth": true}
        low, middle, high = np.quantile(asked, [0.25, 0.5, 0.75])
        print(f"| {name_of(epsilon)} | {middle:.2f} [{low:.2f}, {high:.2f}] | {np.mean(true):.2f} |")
    everything = float(np.median([value for each in found.values() for value in each["simulated"]]))
    print(f"\nmedian over all: κ = {everything:.2f}")
    atomic.write_json(home / "kappa.json", found)


if __name__ == "__main__":
    main()
