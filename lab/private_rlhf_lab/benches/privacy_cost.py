"""What the privacy of labels costs on the demo's task, free of PPO's noise: the exact Gibbs policy on one cached pool.

Of each held-out prompt N completions are drawn from π_ref once, with their features and their true reward. For every
seed and ε, labels are drawn and randomised, a reward is fitted as stage `reward` does, and the Gibbs policy of
r̂ = r̄ − κΓ is evaluated on the pool by self-normalised resampling: its true objective J = E[r*] − kl_coef·KL against
π_ref's, with the private and with the uncorrected likelihood, with and without pessimism; how true and estimated reward
part as KL grows; how often r̄ ± κΓ holds r*. Intervals are over seeds (Student's t), each with its own labels and flips.

"Sizes known" is a ceiling: the same features, labels and likelihood, but the prior of each coordinate has the size of
the truth's own least-squares weight there, so that only signs, and what noise moves, are left to the labels.
"Directions of draws" is semi-supervised: principal directions of unlabelled draws of π_ref in the place of the pairs'.

Needs a run whose stage `sft` is done:  private-rlhf run --config configs/demo.yaml --only sft --run-dir runs/cost
Run:  python -m private_rlhf_lab.benches.privacy_cost --run runs/cost [--prompts 200] [--candidates 64] [--seeds 5]
      [--every-other 0|1] [--first-seed 0] [--name NAME --set reward.num_layers=14 …]
      (a quarter of an hour on one core, most of it for the pool, which is kept in RUN/privacy_cost/NAME)
--every-other takes the prompts of even or odd numbers, --first-seed other labels: choose on some, report on others.
Writes RUN/privacy_cost/NAME: pool.safetensors, results.json, table.md, over_optimisation.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, epsilon_of
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.inputs import named_prompts
from private_rlhf.data.render import make_renderer
from private_rlhf.embedded import task
from private_rlhf.embedded.truth import true_reward
from private_rlhf.evaluation.calibration import coverage
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.models import end_ids, load_causal_lm, load_tokenizer
from private_rlhf.privacy.keys import insecure_seed_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.reward_models.head import PairFeatures, fit_head
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.ridge import ridge_by_evidence
from private_rlhf.reward_models.uncertainty import FisherBonus
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import cell, interval, name_of

EPSILONS = (0.5, 1.0, 2.0, math.inf)
LOSSES = ("private_likelihood", "uncorrected")
CEILING = "sizes known"
UNLABELLED = "directions of draws"
KAPPAS = (0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
KL_COEFS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Pool:
    """Completions of π_ref: features (n, N, f) float32, truth (n, N); training pairs: features (m, f) of each side, and
    r* (m, 2).
    """

    features: torch.Tensor
    truth: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    pair_truth: torch.Tensor


# --- the pool ---------------------------------------------------------------------------------------------------------


def load_pool(run: RunDir, recipe: Recipe, path: Path, prompts: list[Any], candidates: int) -> Pool:
    """The pool of this π_ref in the file `path`, made if it is not there yet."""
    sft = run.require("sft")
    identity = {"sft": str(sft["fingerprint"]), "prompts": json.dumps(prompts), "candidates": str(candidates)}
    identity |= {"features": features_of(recipe)}
    if identity_of(path) == identity:
        return Pool(**load_file(path))
    pool = make_pool(run, recipe, prompts, candidates)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in vars(pool).items()}, path, identity)
    return pool


def features_of(recipe: Recipe) -> str:
    """The states of a text that a recipe reads: reward.pooling and num_layers."""
    return f"{recipe.reward.pooling} {recipe.reward.num_layers}"


def identity_of(path: Path) -> dict[str, str]:
    """The draws and features of the pool in a file; {} without the file."""
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def draws(run: RunDir, recipe: Recipe, prompts: list[Any], candidates: int) -> list[list[str]]:
    """`candidates` completions of π_ref to each prompt, kept in RUN/privacy_cost/draws.json for all names."""
    path = run.root / "privacy_cost" / "draws.json"
    identity = [str(run.require("sft")["fingerprint"]), prompts, candidates]
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["identity"] == identity:
            texts: list[list[str]] = kept["texts"]
            return texts
    home = run.stage("sft") / "model"
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    policy = load_causal_lm(home, recipe.model.dtype)
    rows = sample_responses(
        policy,
        [renderer.prompt_ids(prompt) for prompt in prompts for _ in range(candidates)],
        [sample_key(recipe.seed, "pool", i, k) for i in range(len(prompts)) for k in range(candidates)],
        Sampling(renderer.max_response_tokens),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(policy, renderer.tokenizer),
        batch_size=recipe.evaluate.batch_size,
        progress="completions of π_ref",
    )
    flat = [renderer.text(row) for row in rows]
    texts = [flat[start : start + candidates] for start in range(0, len(flat), candidates)]
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, {"identity": identity, "texts": texts})
    return texts


def make_pool(run: RunDir, recipe: Recipe, prompts: list[Any], candidates: int) -> Pool:
    """Draws and featurises."""
    home = run.stage("sft") / "model"
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    drawn_texts = draws(run, recipe, prompts, candidates)
    own = [(prompt, text) for prompt, texts in zip(prompts, drawn_texts, strict=True) for text in texts]
    layers = load_backbone(home, recipe.reward, recipe.model.dtype, renderer.tokenizer.pad_token_id)
    model = RewardModel(layers, reward_bound=recipe.reward.reward_bound)

    def features(pairs: Sequence[tuple[Any, Any]], what: str) -> torch.Tensor:
        return extract_features(
            model,
            [renderer.prompt_ids(prompt) + renderer.response_ids(response) for prompt, response in pairs],
            pad_token_id=renderer.tokenizer.pad_token_id,
            batch_size=64,
            device=model.weight.device,
            progress=what,
        )

    drawn = features(own, "features of completions")
    pairs = task.load_pairs("train")
    sides = [(row.prompt, response) for row in pairs for response in (row.response_a, row.response_b)]
    both = features(sides, "features of pairs")
    truth = [true_reward(str(prompt), text) for prompt, text in own]
    shape = (len(prompts), candidates)
    of_pairs = torch.tensor([true_reward(str(prompt), text) for prompt, text in sides]).reshape(-1, 2)
    return Pool(drawn.reshape(*shape, -1), torch.tensor(truth).reshape(shape), both[0::2], both[1::2], of_pairs)


def opened(run: RunDir, name: str, overrides: Sequence[str]) -> tuple[Recipe, Path, Pool]:
    """The recipe, the folder and the pool that a call with this --name and these --set left in a run. UserError where
    the pool has other features."""
    home, recipe = run.root / "privacy_cost" / name, load_recipe(Recipe, run.root / "recipe.yaml", overrides)
    path = home / "pool.safetensors"
    if (found := identity_of(path).get("features")) != (asked := features_of(recipe)):
        raise UserError(f"reward.pooling and num_layers must be those of {path}, {found}, got {asked}: repeat --set")
    return recipe, home, Pool(**load_file(path))


# --- fits -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def true_labels(seed: int) -> list[int]:
    """(m,) ±1: Bradley–Terry labels of the seed."""
    return task.draw_labels(task.load_pairs("train"), seed)


@lru_cache(maxsize=1)
def private_labels(seed: int, epsilon: float) -> torch.Tensor:
    """(m,) ±1: those labels, randomised at ε; at falling ε a chain, as the pipeline's."""
    labels = true_labels(seed)
    if math.isfinite(epsilon):
        mechanism, prf = RandomizedResponse(epsilon), insecure_seed_key(seed).prf
        labels = [mechanism.release(prf, str(i).encode(), label) for i, label in enumerate(labels)]
    return torch.tensor(labels)


def scored(
    pool: Pool, recipe: Recipe, seed: int, epsilon: float, arm: str, labels: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """(r̄, Γ at κ = 1) of the pool, (n, N) each, from private labels (m,); arm: a loss, or CEILING."""
    prefers_first = (labels > 0)[:, None]
    chosen = torch.where(prefers_first, pool.first, pool.second)
    rejected = torch.where(prefers_first, pool.second, pool.first)
    if arm in (CEILING, UNLABELLED):
        noise, bound, ones = LabelNoise.of(epsilon), recipe.reward.reward_bound, torch.ones(len(chosen)).double()
        basis, ridge = (known_sizes if arm == CEILING else drawn_directions)(pool, recipe), 1.0
        if arm == UNLABELLED:
            one, other = basis.coordinates(chosen), basis.coordinates(rejected)
            ridge = ridge_by_evidence(one, other, ones, noise, bound)
        fit = fit_linear(chosen, rejected, ones, noise, ridge=ridge, basis=basis, reward_bound=bound)
    else:
        settings = replace(recipe.reward, loss=cast(Any, arm))
        prompts = [row.prompt for row in task.load_pairs("train")]
        pairs, noise = PairFeatures(chosen, rejected), LabelNoise.of(epsilon)
        fit, _ = fit_head(pairs, noise, settings, prompts=prompts, seed=seed)
    bonus = FisherBonus.from_fit(fit, 1.0)
    count, each, _ = pool.features.shape
    centre = bonus.reference_gradient(pool.features)[:, None].expand(count, each, -1).reshape(count * each, -1)
    score = bonus.score_centred(pool.features.reshape(count * each, -1), centre)
    return score.reward.reshape(count, each).numpy(), score.bonus.reshape(count, each).numpy()


def known_sizes(pool: Pool, recipe: Recipe) -> FeatureBasis:
    """The recipe's coordinates, each in units of the weight that the true margins of the training pairs have there."""
    count, blocks = recipe.reward.num_components, recipe.reward.feature_blocks
    basis = pair_basis(pool.first, pool.second, num_components=count, whiten=False, blocks=blocks)
    x = basis.coordinates(pool.first - pool.second)
    gram = x.T @ x
    gram.diagonal().add_(x.shape[1] / 4.0)  # margins of standard deviation 2 before they are seen
    weight = torch.linalg.solve(gram, x.T @ (pool.pair_truth[:, 0] - pool.pair_truth[:, 1]).double())
    return FeatureBasis(basis.matrix * weight.abs())


def drawn_directions(pool: Pool, recipe: Recipe) -> FeatureBasis:
    """Directions in which π_ref's draws for the judged prompts differ: features without a label choose what is fitted,
    as the answers that a policy is compared on, not the pairs', are where the reward must be right.
    """
    even = pool.features.shape[1] // 2 * 2
    sides = (pool.features[:, place:even:2].flatten(0, 1) for place in (0, 1))
    count, blocks = recipe.reward.num_components, recipe.reward.feature_blocks
    return pair_basis(*sides, num_components=count, whiten=False, blocks=blocks)


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
    arms = (*LOSSES, CEILING, UNLABELLED)
    work = [(s, e, loss) for s in seeds for e in EPSILONS for loss in arms if math.isfinite(e) or loss != LOSSES[1]]
    for seed, epsilon, loss in tqdm(work, desc="fits", unit="fit"):
        reward, bonus = scored(pool, recipe, seed, epsilon, loss, private_labels(seed, epsilon))
        for kappa in KAPPAS:
            for kl_coef in KL_COEFS:
                point = gibbs_point(reward - kappa * bonus, reward - kappa * bonus, truth, kl_coef)
                yield {"seed": seed, "epsilon": epsilon, "loss": loss, "kappa": kappa, "kl_coef": kl_coef, **point}
        yield {"seed": seed, "epsilon": epsilon, "loss": loss, "coverage": coverage(reward, bonus, truth, KAPPAS)}


# --- tables -----------------------------------------------------------------------------------------------------------


def select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows with these values, by seed."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["seed"])


def apart(
    rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], epsilon: float, kappa: float, arm: str = LOSSES[0]
) -> str:
    """J gain of `arm` in rows less that of the private likelihood in others, of one kl_coef each: paired over seeds."""
    mine, theirs = (select(each, epsilon=epsilon, loss=loss, kappa=kappa) for each, loss in
                    ((rows, arm), (others, LOSSES[0])))  # fmt: skip
    pairs = zip(mine, theirs, strict=True)
    return "{:+.3f} ± {:.3f}".format(*interval([one["j_gain"] - other["j_gain"] for one, other in pairs]))


def earlier_rows(own: Path, other: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of an earlier call in the folder `other`. UserError unless its draws and seeds are those of `own`."""
    rows = json.loads((other / "results.json").read_text(encoding="utf-8"))["rows"]
    mine, theirs = (identity_of(home / "pool.safetensors") | {"features": ""} for home in (own, other))
    if mine != theirs or {row["seed"] for row in rows} != {*seeds}:
        raise UserError(f"--against must name a call with the same draws and seeds, got {other.name}: measure it again")
    return [row | {"epsilon": epsilon_of(row["epsilon"])} for row in rows]


def against(rows: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]], kl_coef: float, kappa: float) -> str:
    """J gain less that of `earlier_rows`."""
    mine, theirs = ([row for row in each if row.get("kl_coef") == kl_coef] for each in (rows, earlier))
    return ", ".join(f"{apart(mine, theirs, epsilon, kappa)} at ε = {name_of(epsilon)}" for epsilon in EPSILONS)


def table(rows: Sequence[dict[str, Any]], kl_coef: float, own: float) -> str:
    """Markdown: J gain by ε and arm at the recipe's κ `own`, retained share of the gain at ε = ∞, κ sweep, coverage."""
    points = [row for row in rows if row.get("kl_coef") == kl_coef]

    def gains(epsilon: float, loss: str, kappa: float) -> list[float]:
        return [row["j_gain"] for row in select(points, epsilon=epsilon, loss=loss, kappa=kappa)]

    lines = [f"J gain over π_ref at kl_coef {kl_coef:g}, mean ± 95 % over seeds; κ = {own:g} unless said", ""]
    lines += [f"| ε | private | private, κ = 0 | uncorrected | uncorrected, κ = 0 | retained | {CEILING} | retained |"
              f" {UNLABELLED} |"]  # fmt: skip
    lines += ["|---" * 9 + "|"]
    for epsilon in EPSILONS:
        arms = [(loss, kappa) for loss in LOSSES for kappa in (own, 0.0)]
        cells = [cell(found) if (found := gains(epsilon, *arm)) else "same as private" for arm in arms]
        shares = []
        for arm in (LOSSES[0], CEILING):
            pairs = zip(gains(epsilon, arm, own), gains(math.inf, arm, own), strict=True)
            shares.append("{:.1f} ± {:.1f} %".format(*interval([100 * value / full for value, full in pairs])))
        ceiling = cell(gains(epsilon, CEILING, own))
        unlabelled = (
            f"{cell(gains(epsilon, UNLABELLED, own))}, less private {apart(points, points, epsilon, own, UNLABELLED)}"
        )
        ends = " | ".join([shares[0], ceiling, shares[1], unlabelled])
        lines.append(f"| {name_of(epsilon)} | {' | '.join(cells)} | {ends} |")
    sweep = " | ".join(f"κ = {kappa:g}" for kappa in KAPPAS)
    lines += ["", "κ sweep: J gain with the private likelihood", ""]
    lines += [f"| ε | {sweep} | ESS of draws |", "|---" * (len(KAPPAS) + 2) + "|"]
    for epsilon in EPSILONS:
        effective = np.mean([row["ess"] for row in select(points, epsilon=epsilon, loss=LOSSES[0], kappa=own)])
        cells = [cell(gains(epsilon, LOSSES[0], kappa)) for kappa in KAPPAS]
        lines.append(f"| {name_of(epsilon)} | {' | '.join(cells)} | {effective:.0f} |")
    lines += ["", "Coverage of the centred r* by r̄ ± κΓ", ""]
    lines += [f"| ε | {sweep} |", "|---" * (len(KAPPAS) + 1) + "|"]
    for epsilon in EPSILONS:
        covered = [row["coverage"] for row in select(rows, epsilon=epsilon, loss=LOSSES[0]) if "coverage" in row]
        by_kappa = zip(*([each["coverage"] for each in row] for row in covered), strict=True)  # in the order of KAPPAS
        cells = ["{:.3f} ± {:.3f}".format(*interval(found)) for found in by_kappa]
        lines.append(f"| {name_of(epsilon)} | {' | '.join(cells)} |")
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
    parser.add_argument("--first-seed", type=int, default=0, help="of the labels: choose on some, report on others")
    parser.add_argument("--every-other", type=int, choices=(0, 1), help="prompts of even or odd numbers alone")
    parser.add_argument("--name", default="", help="of a folder of its own, with --set")
    parser.add_argument("--against", default="", help="--name of an earlier call, same prompts and seeds: differences")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe = load_recipe(Recipe, run.root / "recipe.yaml", options.set)
    if recipe.reward.kappa not in KAPPAS:
        parser.error(f"reward.kappa must be one of {', '.join(map(str, KAPPAS))}")
    prompts = named_prompts(recipe.data, "evaluation_prompts", run.released)
    if options.every_other is not None:
        prompts = prompts[options.every_other :: 2]
    prompts = prompts[: options.prompts]
    home = run.root / "privacy_cost" / options.name
    pool = load_pool(run, recipe, home / "pool.safetensors", prompts, options.candidates)
    seeds, other = range(options.first_seed, options.first_seed + options.seeds), options.against
    earlier = earlier_rows(home, run.root / "privacy_cost" / other, seeds) if other else []
    rows = list(measure(pool, recipe, seeds))
    text = table(rows, recipe.ppo.kl_coef, recipe.reward.kappa)
    if other:
        differences = against(rows, earlier, recipe.ppo.kl_coef, recipe.reward.kappa)
        text += f"\nJ gain less that of {other}, paired over seeds: {differences}\n"
    plain = [row | {"epsilon": None} if math.isinf(row["epsilon"]) else row for row in rows]
    settings = {"prompts": len(prompts), "candidates": options.candidates, "kl_coef": recipe.ppo.kl_coef}
    atomic.write_json(home / "results.json", {"settings": settings, "rows": plain})
    atomic.write_text(home / "table.md", text)
    draw([row for row in rows if "kl_coef" in row], home / "over_optimisation.png")
    print(text)
    print(json.dumps({"written": str(home)}))


if __name__ == "__main__":
    main()
