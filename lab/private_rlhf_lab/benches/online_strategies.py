"""How many labels each way of asking needs: rounds of questions on one pool of answers of π_ref, with the known truth.

Of every training prompt N answers are drawn from π_ref once, and M of every held-out prompt. An arm asks in batches
(`online.strategies`), each pair once, gets answers of r* through randomised response at ε, and fits r̄ again;
after each batch the Gibbs policy π_ref·exp(r̄/kl_coef) is evaluated on the held-out prompts: J = E[r*] − kl_coef·KL,
less π_ref's. Stated: J by labels; the labels at which the mean curve of an arm reaches what passive asking reaches with
all labels, and the share saved [95 % bootstrap over paired seeds]; cumulative regret of the Gibbs policy on the
training prompts against the best one within the feature class, its exponent over the last half of the labels (log-log
slope, 95 % over seeds, Student's t), and what the class itself misses.

Needs a run whose stage `sft` is done:  private-rlhf run --config configs/demo.yaml --only sft --run-dir runs/online
Run:  python -m private_rlhf_lab.benches.online_strategies --run runs/online [--seeds 20] [--labels 4000]
      (resumable: finished arms are kept; 8 minutes for the pool, then an hour on one core)
Writes RUN/online_strategies/: pool.safetensors, arms.jsonl, table.md, curves.png (docs/results/online.md)
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.online.pool import OpenPairs
from private_rlhf.online.posterior import Learner, Posterior
from private_rlhf.online.strategies import STRATEGIES, Strategy, choose
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.basis import pair_basis
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.league.pool import make_pool

EPSILONS = (0.5, 1.0, 2.0)
OFFLINE = "offline"
ARMS = (*STRATEGIES, OFFLINE)
ASKED, HELD_OUT = 16, 32  # answers to each prompt
COMPONENTS = 128
BATCH = 200
RESAMPLES = 10_000
SAME = 1e-3  # of the largest coordinate


class Bed:
    """The pool in the coordinates of a label-free basis: x (M, N, k) and truth (M, N) of both splits."""

    def __init__(self, tensors: dict[str, torch.Tensor], kl_coef: float, reward_bound: float | None) -> None:
        drawn = tensors["train_features"]
        sides = (drawn[:, place::2].reshape(-1, drawn.shape[-1]) for place in (0, 1))
        basis = pair_basis(*sides, num_components=COMPONENTS, whiten=False)
        self.x, self.truth = basis.coordinates(drawn), tensors["train_truth"].double()
        self.held_out = basis.coordinates(tensors["eval_features"]), tensors["eval_truth"].double()
        self.kl_coef, self.reward_bound = kl_coef, reward_bound
        apart = (self.x[:, :, None] - self.x[:, None, :]).abs().amax(dim=-1)
        self._first = (apart <= SAME * self.x.abs().amax()).int().argmax(dim=2)
        answers = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()[:16]
        settings = f"kl_coef {kl_coef:g}, bound {reward_bound}, {COMPONENTS} directions, each pair once"
        self.identity = f"pool {answers}, {settings}"

    def open_pairs(self) -> OpenPairs:
        """All pairs of different answers; a pool has no texts, and equal ones have equal features, but for rounding."""
        return OpenPairs.among(self._first)

    def objective(self, policy: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """J less that of π_ref, mean over prompts; policy (M, N) over draws of π_ref."""
        count = policy.shape[1]
        kl = (policy * torch.log(policy.clamp_min(1e-300) * count)).sum(dim=1)
        return (((policy - 1 / count) * truth).sum(dim=1) - self.kl_coef * kl).mean()

    def best_in_class(self, restarts: int = 3) -> tuple[float, float]:
        """J on the training prompts of the best Gibbs policy of a reward of the class, and of the truth's own."""
        best = -math.inf
        for seed in range(restarts):
            theta = 0.3 * torch.randn(COMPONENTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            theta.requires_grad_()
            solver = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe")

            def loss(theta: torch.Tensor = theta, solver: Any = solver) -> torch.Tensor:
                solver.zero_grad()
                value = -self.objective(self._posterior(theta).policy(self.x), self.truth)
                value.backward()
                return value

            solver.step(loss)
            best = max(best, float(self.objective(self._posterior(theta.detach()).policy(self.x), self.truth)))
        own = torch.softmax(self.truth / self.kl_coef, dim=1)
        return best, float(self.objective(own, self.truth))

    def _posterior(self, theta: torch.Tensor) -> Posterior:
        nothing = torch.eye(COMPONENTS, dtype=torch.float64)
        return Posterior(theta, nothing, 1.0, LabelNoise.of(1.0), self.reward_bound, self.kl_coef)


# --- arms -------------------------------------------------------------------------------------------------------------


def answers_of(bed: Bed, picked: torch.Tensor, noise: LabelNoise, generator: torch.Generator) -> torch.Tensor:
    """Bradley–Terry answers (n,) ±1 of r* about the pairs (n, 3), through randomised response."""
    prompt, one, other = picked.T
    preferred = torch.sigmoid(bed.truth[prompt, one] - bed.truth[prompt, other])
    plus = noise.keep_prob * preferred + noise.flip_prob * (1 - preferred)
    return torch.where(torch.rand(len(picked), generator=generator, dtype=torch.float64) < plus, 1.0, -1.0)


def pessimistic_policy(posterior: Posterior, x: torch.Tensor) -> torch.Tensor:
    """∝ π_ref·exp((r̄ − Γ)/kl_coef) among draws of π_ref, Γ = √(g̃ᵀH⁻¹g̃) centred by π_ref (PPKL Algorithm 1):
    (M, N, k) -> (M, N)."""
    reference = torch.full(x.shape[:2], 1 / x.shape[1], dtype=torch.float64)
    return torch.softmax((posterior.reward(x) - posterior.spread(x, reference)) / posterior.kl_coef, dim=-1)


def ask(bed: Bed, arm: str, epsilon: float, seed: int, labels: int) -> dict[str, Any]:
    """One arm: J on held-out prompts after each batch, and J on the training prompts of the policy asked about:
    π_ref, so 0, for `offline`, whose answers are those of passive asking and whose policy is pessimistic (κ = 1).
    """
    noise, generator = LabelNoise.of(epsilon), torch.Generator().manual_seed(seed)
    learner, pairs = Learner(COMPONENTS, noise, bed.reward_bound, bed.kl_coef), bed.open_pairs()
    strategy: Strategy = "passive" if arm == OFFLINE else cast(Strategy, arm)
    held_out, training = [], []
    while len(learner) < labels:
        policy = learner.posterior.policy(bed.x)
        training.append(0.0 if arm == OFFLINE else float(bed.objective(policy, bed.truth)))
        picked = choose(strategy, learner.posterior, bed.x, pairs, BATCH, generator, asked=len(learner))
        prompt, one, other = picked.T
        z = answers_of(bed, picked, noise, generator)
        posterior = learner.add(bed.x[prompt, one], bed.x[prompt, other], z)
        held_x, held_truth = bed.held_out
        learnt = pessimistic_policy(posterior, held_x) if arm == OFFLINE else posterior.policy(held_x)
        held_out.append(float(bed.objective(learnt, held_truth)))
    return {"strategy": arm, "epsilon": epsilon, "seed": seed, "j": held_out, "training_j": training}


def arms(bed: Bed, path: Path, seeds: int, labels: int) -> list[dict[str, Any]]:
    """All arms, those of an earlier call as they are. UserError where that was on other answers or another kl_coef."""
    rows = rows_of(path, lambda _: bed.identity)
    done = {(row["strategy"], row["epsilon"], row["seed"]) for row in rows if len(row["j"]) * BATCH == labels}
    wanted = [(s, e, seed) for seed in range(seeds) for e in EPSILONS for s in ARMS]
    with appending(path) as keep:
        for each in tqdm([each for each in wanted if each not in done], desc="arms", unit="arm"):
            rows.append({"bed": bed.identity, **ask(bed, *each, labels)})
            keep(rows[-1])
    return [row for row in rows if row["seed"] < seeds and len(row["j"]) * BATCH == labels]


# --- tables -----------------------------------------------------------------------------------------------------------


def curves(rows: Sequence[dict[str, Any]], strategy: str, epsilon: float, what: str = "j") -> np.ndarray:
    """(seeds, batches) of an arm."""
    own = [row for row in rows if (row["strategy"], row["epsilon"]) == (strategy, epsilon)]
    return np.array([row[what] for row in sorted(own, key=lambda row: row["seed"])])


def needed(curve: np.ndarray, target: float) -> float:
    """Labels at which a curve (batches,) first reaches the target, between batches by a straight line; inf if never."""
    reached = np.flatnonzero(curve >= target)
    if not len(reached):
        return math.inf
    last = int(reached[0])
    before = 0.0 if last == 0 else curve[last - 1]  # no labels: π_ref, J gain 0
    return BATCH * (last + (target - before) / (curve[last] - before))


def saved(passive: np.ndarray, own: np.ndarray) -> tuple[float, float, float, float]:
    """(labels needed, share saved in %, its 95 % interval): curves (seeds, batches), resampled by seed together."""

    def share(picked: np.ndarray) -> float:
        target = float(passive[picked].mean(axis=0)[-1])
        return 100 * (1 - needed(own[picked].mean(axis=0), target) / (BATCH * own.shape[1]))

    everything = np.arange(len(own))
    generator = np.random.default_rng(0)
    drawn = [share(generator.integers(0, len(own), len(own))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")  # a draw may be −∞: never reached
    target = float(passive.mean(axis=0)[-1])
    return needed(own.mean(axis=0), target), share(everything), float(low), float(high)


def exponent(regret: np.ndarray) -> tuple[float, float]:
    """Mean ± half 95 % interval over seeds of the slope of log regret by log labels, over the last half of them."""
    labels = np.log(BATCH * np.arange(1, regret.shape[1] + 1))
    half = regret.shape[1] // 2
    return interval([float(np.polyfit(labels[half:], np.log(row[half:]), 1)[0]) for row in regret])


def lines_of(bed: Bed, rows: Sequence[dict[str, Any]], labels: int) -> Iterator[str]:
    """The tables in Markdown."""
    in_class, own = bed.best_in_class()
    seeds = 1 + max(row["seed"] for row in rows)
    (prompts, answers), (others, more) = bed.truth.shape, bed.held_out[1].shape
    yield f"Questions about {prompts} prompts, {answers} answers each; J, its gain over π_ref, on {others} more"
    yield f"with {more}; {seeds} paired seeds, batches of {BATCH}, kl_coef {bed.kl_coef:g}, {COMPONENTS} directions."
    for epsilon in EPSILONS:
        passive = curves(rows, "passive", epsilon)
        yield ""
        yield f"| ε = {epsilon:g} | J at {labels // 4} labels | at {labels} | labels for passive's J | saved |"
        yield "|---|---|---|---|---|"
        for strategy in ARMS:
            j = curves(rows, strategy, epsilon)
            early, late = (interval(j[:, place].tolist()) for place in (labels // 4 // BATCH - 1, -1))
            count, share, low, high = saved(passive, j)
            lowest = "never" if math.isinf(low) else f"{low:.0f}"
            found = "the same" if strategy == "passive" else f"{share:.0f} % [{lowest}, {high:.0f}]"
            shown = "never" if math.isinf(count) else f"{count:.0f}"
            cells = f"{early[0]:.3f} ± {early[1]:.3f} | {late[0]:.3f} ± {late[1]:.3f}"
            yield f"| {strategy} | {cells} | {shown} | {found if math.isfinite(count) else '–'} |"
    yield ""
    yield f"Regret of the Gibbs policy on the training prompts against the best of the class, J = {in_class:.3f}; the"
    yield f"truth's own has J = {own:.3f}, so {own - in_class:.3f} a question is misspecification and not counted."
    yield ""
    yield f"| cumulative regret at {labels} labels | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |"
    yield "|---" * (len(EPSILONS) + 1) + "|"
    for strategy in ARMS:
        regrets = []
        for epsilon in EPSILONS:
            regret = BATCH * np.cumsum(in_class - curves(rows, strategy, epsilon, "training_j"), axis=1)
            (mean, half), (slope, spread) = interval(regret[:, -1].tolist()), exponent(regret)
            regrets.append(f"{mean:.0f} ± {half:.0f}, T^({slope:.2f} ± {spread:.2f})")
        yield f"| {strategy} | {' | '.join(regrets)} |"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """J by labels, a panel per ε; bands are 95 % over seeds."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(4 * len(EPSILONS), 3.4), sharey=True, layout="constrained")
    for place, epsilon in zip(axes, EPSILONS, strict=True):
        for strategy in ARMS:
            j = curves(rows, strategy, epsilon)
            labels = BATCH * np.arange(1, j.shape[1] + 1)
            mean, half = np.array([interval(column.tolist()) for column in j.T]).T
            (line,) = place.plot(labels, mean, label=strategy)
            place.fill_between(labels, mean - half, mean + half, color=line.get_color(), alpha=0.15, linewidth=0)
        place.set(title=f"ε = {epsilon:g}", xlabel="labels")
    axes[0].set(ylabel="J of the Gibbs policy, gain over π_ref")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--labels", type=int, default=4000)
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    home = run.root / "online_strategies"
    tensors = make_pool(run, recipe, home / "pool.safetensors", ASKED, HELD_OUT)
    bed = Bed(tensors, recipe.ppo.kl_coef, recipe.reward.reward_bound)
    rows = arms(bed, home / "arms.jsonl", options.seeds, options.labels)
    text = "\n".join(lines_of(bed, rows, options.labels)) + "\n"
    atomic.write_text(home / "table.md", text)
    draw(rows, home / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
