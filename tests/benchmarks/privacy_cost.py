"""What the privacy of labels costs on the demo's task, free of PPO's noise: the exact Gibbs policy on one cached pool.

Of each held-out prompt N completions are drawn from π_ref once, with their features and their true reward. For every
seed and ε, labels are drawn and randomised, a reward is fitted as stage `reward` does, and the Gibbs policy of
r̂ = r̄ − κΓ is evaluated on the pool by self-normalised resampling: its true objective J = E[r*] − kl_coef·KL against
π_ref's, with the private and with the uncorrected likelihood, with and without pessimism; how true and estimated reward
part as KL grows; how often r̄ ± κΓ holds r*. Intervals are over seeds (Student's t), each with its own labels and flips.

Needs a run whose stage `sft` is done:  private-rlhf run --config configs/demo.yaml --only sft --run-dir runs/cost
Run:  python tests/benchmarks/privacy_cost.py --run runs/cost [--prompts 200] [--candidates 64] [--seeds 5]
      (43 minutes on one core beside other work, most of them for the pool, which is kept in RUN/privacy_cost/)
Writes RUN/privacy_cost/: pool.safetensors, results.json, table.md, over_optimisation.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from epsilon_tables import cell, interval, name_of
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from pipeline.core import atomic
from pipeline.core.config import load_recipe
from pipeline.core.noise import LabelNoise
from pipeline.core.recipe import Recipe
from pipeline.core.rundir import RunDir
from pipeline.data import inputs
from pipeline.embedded import task
from pipeline.embedded.truth import true_reward
from pipeline.evaluation.calibration import coverage
from pipeline.lm.features import extract_features
from pipeline.lm.generate import Sampling, sample_key, sample_responses
from pipeline.lm.models import end_ids, load_causal_lm, load_tokenizer
from pipeline.privacy.keys import insecure_seed_key
from pipeline.privacy.mechanism import RandomizedResponse
from reward_models.backbone import load_backbone
from reward_models.gibbs import gibbs_weights, kl_from_uniform
from reward_models.head import PairFeatures, fit_head
from reward_models.model import RewardModel
from reward_models.uncertainty import FisherBonus

EPSILONS = (0.5, 1.0, 2.0, math.inf)
LOSSES = ("private_likelihood", "uncorrected")
KAPPAS = (0.0, 0.5, 1.0, 2.0)
KL_COEFS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Pool:
    """Completions of π_ref: features (n, N, d) float32, truth (n, N); training pairs: features (m, d) of each side."""

    features: torch.Tensor
    truth: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


# --- the pool ---------------------------------------------------------------------------------------------------------


def load_pool(run: RunDir, recipe: Recipe, prompts: int, candidates: int) -> Pool:
    """The pool of this π_ref, made if it is not there yet."""
    path = run.root / "privacy_cost" / "pool.safetensors"
    sft = run.require("sft")
    identity = {"sft": str(sft["fingerprint"]), "prompts": str(prompts), "candidates": str(candidates)}
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == identity:
                return Pool(**{name: file.get_tensor(name) for name in ("features", "truth", "first", "second")})
    pool = make_pool(run, recipe, prompts, candidates)
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in vars(pool).items()}, path, identity)
    return pool


def make_pool(run: RunDir, recipe: Recipe, count: int, candidates: int) -> Pool:
    """Draws and featurises."""
    home = run.stage("sft") / "model"
    renderer = inputs.make_renderer(recipe, load_tokenizer(home))
    prompts = inputs.evaluation_prompts(recipe, run)[:count]
    repeated = [prompt for prompt in prompts for _ in range(candidates)]
    policy = load_causal_lm(home, recipe.model.dtype)
    rows = sample_responses(
        policy,
        [renderer.prompt_ids(prompt) for prompt in repeated],
        [sample_key(recipe.seed, "pool", i, k) for i in range(len(prompts)) for k in range(candidates)],
        Sampling(renderer.max_response_tokens),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(policy, renderer.tokenizer),
        batch_size=recipe.evaluate.batch_size,
        progress="completions of π_ref",
    )
    texts = [renderer.text(row) for row in rows]
    model = RewardModel(load_backbone(home, recipe, renderer), reward_bound=recipe.reward.reward_bound)

    def features(pairs: Sequence[tuple[Any, Any]], what: str) -> torch.Tensor:
        return extract_features(
            model,
            [renderer.prompt_ids(prompt) + renderer.response_ids(response) for prompt, response in pairs],
            pad_token_id=renderer.tokenizer.pad_token_id,
            batch_size=64,
            device=model.weight.device,
            progress=what,
        )

    drawn = features(list(zip(repeated, texts, strict=True)), "features of completions")
    pairs = task.load_pairs("train")
    sides = [(row.prompt, response) for row in pairs for response in (row.response_a, row.response_b)]
    both = features(sides, "features of pairs")
    truth = [true_reward(str(prompt), text) for prompt, text in zip(repeated, texts, strict=True)]
    shape = (len(prompts), candidates)
    return Pool(drawn.reshape(*shape, -1), torch.tensor(truth).reshape(shape), both[0::2], both[1::2])


# --- fits -------------------------------------------------------------------------------------------------------------


def private_labels(seed: int, epsilon: float) -> torch.Tensor:
    """(m,) ±1: Bradley–Terry labels of the seed, randomised at ε; at falling ε a chain, as the pipeline's."""
    pairs = task.load_pairs("train")
    labels = task.draw_labels(pairs, seed)
    if math.isfinite(epsilon):
        mechanism, prf = RandomizedResponse(epsilon), insecure_seed_key(seed).prf
        labels = [mechanism.release(prf, str(i).encode(), label) for i, label in enumerate(labels)]
    return torch.tensor(labels)


def scored(pool: Pool, recipe: Recipe, seed: int, epsilon: float, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """(r̄, Γ at κ = 1) of the pool, (n, N) each, from the seed's labels."""
    prefers_first = (private_labels(seed, epsilon) > 0)[:, None]
    chosen = torch.where(prefers_first, pool.first, pool.second)
    rejected = torch.where(prefers_first, pool.second, pool.first)
    settings = replace(recipe, seed=seed, reward=replace(recipe.reward, loss=loss))
    prompts = [row.prompt for row in task.load_pairs("train")]
    fit, _ = fit_head(PairFeatures(chosen, rejected), prompts, LabelNoise.of(epsilon), settings)
    bonus = FisherBonus.from_fit(fit, 1.0)
    count, each, _ = pool.features.shape
    centre = bonus.reference_gradient(pool.features)[:, None].expand(count, each, -1).reshape(count * each, -1)
    score = bonus.score_centred(pool.features.reshape(count * each, -1), centre)
    return score.reward.reshape(count, each).numpy(), score.bonus.reshape(count, each).numpy()


def gibbs_point(scores: np.ndarray, estimate: np.ndarray, truth: np.ndarray, kl_coef: float) -> dict[str, float]:
    """Means over prompts under the Gibbs policy of `scores`: KL, gains over π_ref in r̂'s estimate, in r* and in J."""
    weights = gibbs_weights(scores, kl_coef)
    kl = float(kl_from_uniform(weights).mean())
    estimated, true = (
        float(((weights - 1 / weights.shape[1]) * values).sum(axis=1).mean()) for values in (estimate, truth)
    )
    effective = float((1 / (weights**2).sum(axis=1)).mean())
    return {"kl": kl, "estimated_gain": estimated, "true_gain": true, "j_gain": true - kl_coef * kl, "ess": effective}


def measure(pool: Pool, recipe: Recipe, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row per seed, ε, loss, κ and kl_coef; with the coverage once per fit."""
    truth = pool.truth.numpy()
    work = [(s, e, loss) for s in seeds for e in EPSILONS for loss in LOSSES if math.isfinite(e) or loss == LOSSES[0]]
    for seed, epsilon, loss in tqdm(work, desc="fits", unit="fit"):
        reward, bonus = scored(pool, recipe, seed, epsilon, loss)
        for kappa in KAPPAS:
            for kl_coef in KL_COEFS:
                point = gibbs_point(reward - kappa * bonus, reward - kappa * bonus, truth, kl_coef)
                yield {"seed": seed, "epsilon": epsilon, "loss": loss, "kappa": kappa, "kl_coef": kl_coef, **point}
        yield {"seed": seed, "epsilon": epsilon, "loss": loss, "coverage": coverage(reward, bonus, truth)}


# --- tables -----------------------------------------------------------------------------------------------------------


def select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows with these values, by seed."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["seed"])


def table(rows: Sequence[dict[str, Any]], kl_coef: float) -> str:
    """Markdown: J gain by ε and arm, retained share of the gain at ε = ∞, κ sweep, coverage."""
    points = [row for row in rows if row.get("kl_coef") == kl_coef]
    best = [row["j_gain"] for row in select(points, epsilon=math.inf, loss=LOSSES[0], kappa=1.0)]
    lines = [f"J gain over π_ref at kl_coef {kl_coef:g}, mean ± 95 % over seeds", ""]
    lines += ["| ε | private, κ = 1 | private, κ = 0 | uncorrected, κ = 1 | uncorrected, κ = 0 | retained, κ = 1 |"]
    lines += ["|---|---|---|---|---|---|"]
    for epsilon in EPSILONS:
        cells = []
        for loss in LOSSES:
            for kappa in (1.0, 0.0):
                found = [row["j_gain"] for row in select(points, epsilon=epsilon, loss=loss, kappa=kappa)]
                cells.append(cell(found) if found else "same as private")
        own = [row["j_gain"] for row in select(points, epsilon=epsilon, loss=LOSSES[0], kappa=1.0)]
        mean, half = interval([100 * value / full for value, full in zip(own, best, strict=True)])
        lines.append(f"| {name_of(epsilon)} | {' | '.join(cells)} | {mean:.0f} ± {half:.0f} % |")
    lines += ["", "κ sweep (private likelihood, J gain), and coverage of the centred r* by r̄ ± κΓ", ""]
    sweep = " | ".join(f"κ = {kappa:g}" for kappa in KAPPAS)
    lines += [f"| ε | {sweep} | coverage at κ = 1 | at κ = 2 | ESS of draws |"]
    lines += ["|---" * (len(KAPPAS) + 4) + "|"]
    for epsilon in EPSILONS:
        arms = [select(points, epsilon=epsilon, loss=LOSSES[0], kappa=kappa) for kappa in KAPPAS]
        covered = [row["coverage"] for row in select(rows, epsilon=epsilon, loss=LOSSES[0]) if "coverage" in row]
        shares = [
            np.mean([row["coverage"] for each in covered for row in each if row["kappa"] == kappa])
            for kappa in (1.0, 2.0)
        ]
        effective = np.mean([row["ess"] for row in arms[KAPPAS.index(1.0)]])
        cells = [cell([row["j_gain"] for row in arm]) for arm in arms] + [f"{share:.2f}" for share in shares]
        lines.append(f"| {name_of(epsilon)} | {' | '.join(cells)} | {effective:.0f} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """True and estimated gain against KL, with and without pessimism, one panel per ε."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(3.4 * len(EPSILONS), 3.2), sharey=True, layout="constrained")
    for place, epsilon in zip(axes, EPSILONS, strict=True):
        for kappa, colour in ((0.0, "tab:orange"), (1.0, "tab:blue")):
            for what, style in (("true_gain", "-"), ("estimated_gain", ":")):
                arms = [select(rows, epsilon=epsilon, loss=LOSSES[0], kappa=kappa, kl_coef=coef) for coef in KL_COEFS]
                kl = [np.mean([row["kl"] for row in arm]) for arm in arms]
                gain = [np.mean([row[what] for row in arm]) for arm in arms]
                place.plot(kl, gain, style, color=colour, label=f"{what.split('_')[0]}, κ = {kappa:g}")
        place.set(title=f"ε = {name_of(epsilon)}", xlabel="KL(π‖π_ref), nats")
    axes[0].set(ylabel="gain in reward over π_ref")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    pool = load_pool(run, recipe, options.prompts, options.candidates)
    rows = list(measure(pool, recipe, range(options.seeds)))
    text = table(rows, recipe.ppo.kl_coef)
    home = run.root / "privacy_cost"
    plain = [row | {"epsilon": None} if math.isinf(row["epsilon"]) else row for row in rows]
    settings = {"prompts": options.prompts, "candidates": options.candidates, "kl_coef": recipe.ppo.kl_coef}
    atomic.write_json(home / "results.json", {"settings": settings, "rows": plain})
    atomic.write_text(home / "table.md", text)
    draw([row for row in rows if "kl_coef" in row], home / "over_optimisation.png")
    print(text)
    print(json.dumps({"written": str(home)}))


if __name__ == "__main__":
    main()
