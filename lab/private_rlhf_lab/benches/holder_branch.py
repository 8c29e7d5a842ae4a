"""Who is trusted, on the demo's task: one noisy sum of the labels beside randomised response, at the same ε.

(1) The reward models of two runs, as stage `reward` released them. (2) For other labels and noise: both fits on the
same pool of π_ref's answers and the same features of the training pairs (`privacy_cost`), paired over seeds; the sum in
as many principal components as the recipe says and in fewer. r* is known: how often r̄ orders two answers to a held-out
prompt as r* does, and J of the Gibbs policy of r̂ = r̄ − κΓ less that of π_ref. Intervals are Student's t over seeds.

Needs two runs with one stage sft, the second a copy of the first after it:
  private-rlhf run --config configs/demo.yaml --run-dir runs/holder --only STAGE privatize.trust=holder
      for STAGE in sft, privatize, statistic, reward; and for runs/labeller without that key: privatize, reward
Run:  python -m private_rlhf_lab.benches.holder_branch --holder runs/holder --labeller runs/labeller
      (fifteen minutes on one busy core, three and a half of its time)
Writes HOLDER/holder_branch/: table.md, results.json, pool.safetensors
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.data import inputs
from private_rlhf.embedded import task
from private_rlhf.privacy.counts import Bits
from private_rlhf.privacy.prf import Prf
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.basis import pair_basis
from private_rlhf.reward_models.central import fit_statistic, release_statistic
from private_rlhf.reward_models.checkpoint import load_reward_checkpoint
from private_rlhf.reward_models.head import PairFeatures, fit_head
from private_rlhf.reward_models.uncertainty import FisherBonus

from private_rlhf_lab.benches.epsilon_tables import cell, interval
from private_rlhf_lab.benches.privacy_cost import Pool, gibbs_point, load_pool, private_labels, true_labels

EPSILONS = (0.1, 0.5, 1.0, 2.0)
COMPONENTS = (128, 32)
DELTA = 1e-6


def by_labeller(pool: Pool, recipe: Recipe, seed: int, epsilon: float) -> FisherBonus:
    """The private MLE of labels through randomised response, ridge by marginal likelihood as the sum's."""
    first = (private_labels(seed, epsilon) > 0)[:, None]
    sides = torch.where(first, pool.first, pool.second), torch.where(first, pool.second, pool.first)
    prompts = [row.prompt for row in task.load_pairs("train")]
    own = replace(recipe, seed=seed, reward=replace(recipe.reward, ridge="evidence"))
    fit, _ = fit_head(PairFeatures(*sides), LabelNoise.of(epsilon), own.reward, prompts=prompts, seed=own.seed)
    return FisherBonus.from_fit(fit, recipe.reward.kappa)


def by_holder(pool: Pool, recipe: Recipe, seed: int, epsilon: float, components: int) -> FisherBonus:
    """The fit to one noisy sum of the same true labels."""
    blocks = recipe.reward.feature_blocks
    basis = pair_basis(pool.first, pool.second, num_components=components, whiten=False, blocks=blocks)
    labels = torch.tensor(true_labels(seed))
    difference = basis.coordinates(pool.first) - basis.coordinates(pool.second)
    name = hashlib.sha256(f"{seed} {epsilon} {components}".encode()).digest()
    fit = fit_statistic(release_statistic(difference, labels, epsilon, DELTA, bits=Bits(Prf(bytes(32)), name)))
    return FisherBonus(basis.weight(fit.theta), basis, fit.information, recipe.reward.reward_bound, recipe.reward.kappa)


def judged(pool: Pool, bonus: FisherBonus, kl_coef: float) -> tuple[float, float]:
    """(share of answer pairs ordered as r* orders them, J gain of the Gibbs policy of r̂)."""
    count, each, _ = pool.features.shape
    centre = bonus.reference_gradient(pool.features)[:, None].expand(count, each, -1).reshape(count * each, -1)
    score = bonus.score_centred(pool.features.reshape(count * each, -1), centre)
    reward, truth = score.reward.reshape(count, each).numpy(), pool.truth.numpy()
    apart = np.triu(np.ones((each, each), bool), 1) & (truth[:, :, None] != truth[:, None, :])
    same = (reward[:, :, None] > reward[:, None, :]) == (truth[:, :, None] > truth[:, None, :])
    scores = (score.reward - score.bonus).reshape(count, each).numpy()
    return float(same[apart].mean()), gibbs_point(scores, scores, truth, kl_coef)["j_gain"]


def spread(values: Sequence[float]) -> str:
    """Mean ± 95 % of differences of shares."""
    mean, half = interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holder", type=Path, required=True)
    parser.add_argument("--labeller", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--candidates", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run = RunDir(args.holder)
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    home, kl_coef = run.root / "holder_branch", recipe.ppo.kl_coef
    prompts = inputs.evaluation_prompts(recipe.data.evaluation_prompts, run.released)[: args.prompts]
    pool = load_pool(run, recipe, home / "pool.safetensors", prompts, args.candidates)
    lines, rows = ["| run | ordered as r* | J − J(π_ref) |", "|---|---|---|"], []
    for name, folder in (("one noisy sum", args.holder), ("randomised response", args.labeller)):
        bonus = load_reward_checkpoint(folder / "reward" / "model").bonus
        assert isinstance(bonus, FisherBonus)
        share, gain = judged(pool, bonus, kl_coef)
        lines.append(f"| {name} | {share:.3f} | {gain:+.2f} |")
    lines += ["", "| ε | arm | ordered as r* | J − J(π_ref) | ordered, less randomised response | J, less it |"]
    lines += ["|---|---|---|---|---|---|"]
    for epsilon in EPSILONS:
        arms = {"randomised response": [judged(pool, by_labeller(pool, recipe, seed, epsilon), kl_coef)
                                        for seed in range(args.seeds)]}  # fmt: skip
        for components in COMPONENTS:
            arms[f"one noisy sum, {components} components"] = [
                judged(pool, by_holder(pool, recipe, seed, epsilon, components), kl_coef) for seed in range(args.seeds)
            ]
        base = np.array(arms["randomised response"])
        for name, found in arms.items():
            apart = (np.array(found) - base).T.tolist()
            shares, gains = np.array(found).T.tolist()
            told = f"{spread(apart[0])} | {cell(apart[1])}" if name in list(arms)[1:] else " | "
            lines.append(f"| {epsilon:g} | {name} | {np.mean(shares):.3f} | {cell(gains)} | {told} |")
            rows.append({"epsilon": epsilon, "arm": name, "ordered": shares, "j_gain": gains})
    atomic.write_json(home / "results.json", rows)
    atomic.write_text(home / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
