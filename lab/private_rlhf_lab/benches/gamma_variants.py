"""Other uncertainties than the Fisher bonus, on one pool: does another Γ cover the truth better, or serve J better?

Every Γ belongs to the same fit r̄ of the recipe's reward. Fisher: the recipe's. Sandwich: H⁻¹SH⁻¹ with S the sum of
outer products of each prompt's summed scores (Huber 1967; clusters are prompts). Jackknife: ten times a tenth of the
prompts is left out at the same ridge. Feature sets: the spread of the recipe's fit and fits on each of its blocks of
features alone. The last two measure rewards, centred at each prompt's draws; "with Fisher" adds variances.

κ for 68 %: the multiple with which r̄ ± κΓ holds 68 % of the centred r*, so what a calibrated error bar of this kind
would be; J there, and the best J of any κ, are gains of the Gibbs policy of r̂ = r̄ − κΓ over π_ref.

Needs what `privacy_cost.py --run RUN --name NAME --set …` left behind; give it the same --name and --set.
Run:  python -m private_rlhf_lab.benches.gamma_variants --run runs/cost --name NAME --set … [--seeds 5]  (minutes)
Writes RUN/privacy_cost/NAME/gamma.json and gamma.md
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.render import prompt_key
from private_rlhf.embedded import task
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.head import PairFeatures, fit_head
from private_rlhf.reward_models.linear import LinearFit, PairProblem, fit_linear
from private_rlhf.reward_models.losses import bounded_reward, get_loss
from private_rlhf.reward_models.uncertainty import FisherBonus
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import cell, interval, name_of
from private_rlhf_lab.benches.kappa_without_labels import SHARE, needed
from private_rlhf_lab.benches.privacy_cost import Pool, gibbs_point, opened, private_labels

EPSILONS = (0.5, 2.0, math.inf)
# Of κ for 68 %, in units in which the Fisher bonus has 2.5 there.
MULTIPLES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
FOLDS = 10
Gammas = dict[str, np.ndarray]


def centred_reward(fit: LinearFit, features: torch.Tensor) -> np.ndarray:
    """(n, N) r̄ of draws (n, N, f), less each prompt's mean."""
    reward = bounded_reward(features.double() @ fit.weight, fit.reward_bound).numpy()
    return reward - reward.mean(axis=1, keepdims=True)


def sandwich(fit: LinearFit, chosen: torch.Tensor, rejected: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """Covariance (k, k) of θ̂ whether or not the likelihood is right, pairs of a cluster (m,) being dependent."""
    one, other = fit.basis.coordinates(chosen), fit.basis.coordinates(rejected)
    ones = torch.ones(len(chosen), dtype=torch.float64)
    problem = PairProblem(one, other, ones, fit.noise, fit.reward_bound, get_loss(fit.loss))
    slope = problem.loss.slope(problem.margin(fit.theta), ones, fit.noise)
    scores = slope[:, None] * problem.margin_gradient(fit.theta)
    summed = torch.zeros(int(clusters.max()) + 1, scores.shape[1], dtype=torch.float64).index_add(0, clusters, scores)
    bread = torch.linalg.inv(fit.information)
    return bread @ (summed.T @ summed) @ bread


def gammas(pool: Pool, fit: LinearFit, chosen: torch.Tensor, rejected: torch.Tensor, clusters: torch.Tensor,
           blocks: int) -> Gammas:  # fmt: skip
    """Γ (n, N) of each kind at κ = 1."""
    count, each, width = pool.features.shape
    bonus = FisherBonus.from_fit(fit, 1.0)
    reference = bonus.reference_gradient(pool.features)
    gradient = fit.basis.coordinates(bonus.quantity(pool.features) - reference[:, None]).reshape(count * each, -1)

    def of(covariance: torch.Tensor) -> np.ndarray:
        return ((gradient @ covariance) * gradient).sum(dim=1).sqrt().reshape(count, each).numpy()

    def again(rows: torch.Tensor, basis: FeatureBasis) -> np.ndarray:
        ones = torch.ones(int(rows.sum()))
        refit = fit_linear(chosen[rows], rejected[rows], ones, fit.noise, ridge=fit.ridge, basis=basis,
                           reward_bound=fit.reward_bound)  # fmt: skip
        return centred_reward(refit, pool.features)

    everything = torch.ones(len(chosen), dtype=torch.bool)
    left_out = np.stack([again(clusters % FOLDS != fold, fit.basis) for fold in range(FOLDS)])
    parts = []
    for block in range(blocks):
        mask = torch.zeros(width, 1, dtype=torch.float64)
        mask[block * width // blocks : (block + 1) * width // blocks] = 1.0
        parts.append(again(everything, FeatureBasis(fit.basis.matrix * mask)))
    spread = np.stack([centred_reward(fit, pool.features), *parts]).std(axis=0, ddof=1)
    fisher = of(torch.linalg.inv(fit.information))
    jackknife = np.sqrt((FOLDS - 1) / FOLDS * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    return {
        "Fisher": fisher,
        "sandwich": of(sandwich(fit, chosen, rejected, clusters)),
        "jackknife": jackknife,
        "feature sets": spread,
        "feature sets with Fisher": np.hypot(spread, fisher),
    }


def measured(pool: Pool, recipe: Recipe, seed: int, epsilon: float) -> dict[str, dict[str, float]]:
    """By kind of Γ: coverage at κ = 1, κ for 68 %, J there, and the best J."""
    preferred = (private_labels(seed, epsilon) > 0)[:, None]
    chosen = torch.where(preferred, pool.first, pool.second)
    rejected = torch.where(preferred, pool.second, pool.first)
    prompts = [row.prompt for row in task.load_pairs("train")]
    keys = {key: number for number, key in enumerate(dict.fromkeys(map(prompt_key, prompts)))}
    clusters = torch.tensor([keys[prompt_key(prompt)] for prompt in prompts])
    fit, _ = fit_head(PairFeatures(chosen, rejected), LabelNoise.of(epsilon), recipe.reward, prompts=prompts, seed=seed)
    reward, truth = centred_reward(fit, pool.features), pool.truth.numpy()

    def gain(gamma: np.ndarray, kappa: float) -> float:
        scores = reward - kappa * gamma
        return gibbs_point(scores, scores, truth, recipe.ppo.kl_coef)["j_gain"]

    error = np.abs(reward - (truth - truth.mean(axis=1, keepdims=True)))
    found = {}
    for name, gamma in gammas(pool, fit, chosen, rejected, clusters, recipe.reward.feature_blocks).items():
        kappa = needed(reward, np.maximum(gamma, 1e-9), truth)
        best = max(gain(gamma, kappa * each / 2.5) for each in MULTIPLES)
        found[name] = {
            "coverage": float((error <= gamma).mean()),
            "kappa": kappa,
            "there": gain(gamma, kappa),
            "best": best,
        }
    return found


def table(found: dict[float, list[dict[str, dict[str, float]]]]) -> str:
    """Markdown: one row an ε and Γ."""
    lines = [f"| ε | Γ | r̄ ± Γ holds r* | κ for {SHARE:.0%} | J there | best J of any κ |", "|---|---|---|---|---|---|"]
    for epsilon, rows in found.items():
        for name in rows[0]:
            values = {what: [row[name][what] for row in rows] for what in rows[0][name]}
            covered, kappa = ("{:.3f} ± {:.3f}".format(*interval(values[what])) for what in ("coverage", "kappa"))
            lines.append(f"| {name_of(epsilon)} | {name} | {covered} | {kappa} | {cell(values['there'])} |"
                         f" {cell(values['best'])} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe, home, pool = opened(run, options.name, options.set)
    work = [(epsilon, seed) for epsilon in EPSILONS for seed in range(options.seeds)]
    found: dict[float, list[dict[str, dict[str, float]]]] = {epsilon: [] for epsilon in EPSILONS}
    for epsilon, seed in tqdm(work, unit="fit"):
        found[epsilon].append(measured(pool, recipe, seed, epsilon))
    text = table(found)
    atomic.write_json(home / "gamma.json", {name_of(epsilon): rows for epsilon, rows in found.items()})
    atomic.write_text(home / "gamma.md", text)
    print(text)


if __name__ == "__main__":
    main()
