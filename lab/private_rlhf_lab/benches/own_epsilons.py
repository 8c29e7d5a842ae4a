"""Each person at an ε of their own, against one ε for all: J of the Gibbs policy on beds with a known truth.

Of n people with one label each, shares of a mix give theirs at several levels. The same pairs and true labels, paired
by seed, are learnt from in six ways: each label at its own ε; all at the least level, which everyone accepts; without
those who want the least level; all as of the mean ε, which is wrong; the true labels that the law counts, Σ tanh²(εᵢ/2)
of them, released as they are; and all true labels. The ridge is that of the largest evidence in each.

Run:  python -m private_rlhf_lab.benches.own_epsilons [--run RUN | --pool FILE] [--seeds 24]
Writes docs/results/data/levels-BED.csv, with BED linear, stored or the pool's name; resumes by seed from CACHE.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise, known_noise, rows_of
from private_rlhf.reward_models.basis import identity_basis
from private_rlhf.reward_models.linear import minimize, pair_problem
from private_rlhf.reward_models.ridge import ridge_by_evidence
from torch import Tensor
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.benches.stored_bed import add_options, bed_of
from private_rlhf_lab.fieller import fieller
from private_rlhf_lab.league.beds import Bed, draw_private

DATA = Path(__file__).parents[3] / "docs/results/data"
MIXES: tuple[Mapping[float, float], ...] = ({0.5: 0.4, 1.0: 0.4, 4.0: 0.2}, {0.5: 0.8, 4.0: 0.2})
COUNTS = (500, 2000, 8000)
OWN, TRUE = "each at their own ε", "all true labels"
WAYS = (
    OWN,
    "all at the least level",
    "without the least level",
    "all read at the mean ε (biased)",
    "as many true labels as the law counts",
    TRUE,
)
COLUMNS = ("mix", "labels", "way", "J gain", "±", "less own ε", "±", "retained", "from", "to", "slope", "±")


def gain(bed: Bed, x: Tensor, z: Tensor, noise: AnyNoise) -> tuple[float, float]:
    """(J on held-out prompts less π_ref's, the slope of the fitted reward on the true one) of labels z (n,) of pairs
    that differ by x (n, k)."""
    zeros = torch.zeros_like(x)
    known = known_noise(noise)
    ridge = ridge_by_evidence(x, zeros, z, known, None)
    problem = pair_problem(x, zeros, z, known, identity_basis(x.shape[1]), None, "private_likelihood")
    theta = minimize(problem, ridge, torch.zeros(x.shape[1], dtype=torch.float64), tolerance=1e-6)
    reward = bed.held_x @ theta
    centred, truth = (each - each.mean(dim=1, keepdim=True) for each in (reward, bed.held_truth))
    slope = float((centred * truth).sum() / truth.square().sum())
    return bed.gain(torch.softmax(reward / bed.kl_coef, dim=1)), slope


def trial(bed: Bed, mix: Mapping[float, float], count: int, seed: int) -> dict[str, tuple[float, float]]:
    """`gain` of every way of WAYS with one draw of people, pairs and labels."""
    generator = np.random.default_rng(seed)
    labels = draw_private(bed, count, math.inf, seed)
    noise = LevelledNoise.of(list(mix), generator.choice(list(mix), count, p=list(mix.values())).tolist())
    coins = generator.random(count)

    def private(at: AnyNoise) -> Tensor:
        known = known_noise(at)
        keep = torch.as_tensor(coins >= np.asarray(known.flip_prob))
        return torch.where(keep, labels.y, -labels.y)

    levels = [level.epsilon for level in noise.levels]
    mean = sum(epsilon * share for epsilon, share in mix.items())
    bold = np.flatnonzero(noise.level > 0)
    worth = max(2, round(float(np.square(noise.factor).sum())))
    z = private(noise)
    gains = (
        gain(bed, labels.x, z, noise),
        gain(bed, labels.x, private(levels[0]), levels[0]),
        gain(bed, labels.x[bold], z[bold], rows_of(noise, bold)),
        gain(bed, labels.x, z, mean),
        gain(bed, labels.x[:worth], labels.y[:worth], math.inf),
        gain(bed, labels.x, labels.y, math.inf),
    )
    return dict(zip(WAYS, gains, strict=True))


def rows_of_cell(mix: str, count: int, trials: Sequence[Mapping[str, Sequence[float]]]) -> Iterator[tuple[object, ...]]:
    """A row of COLUMNS for each way: means with the half width of their 95 % interval over seeds; what is retained of
    the gain from all true labels, with Fieller's interval; NaN where those have no clear gain."""
    own, true = (np.array([each[way][0] for each in trials]) for way in (OWN, TRUE))
    for way in WAYS:
        gains = np.array([each[way][0] for each in trials])
        known = np.subtract(*interval(list(true))) > 0
        retained = (gains.mean() / true.mean(), *fieller(gains, true)) if known else (math.nan,) * 3
        numbers = (*interval(list(gains)), *interval(list(gains - own)), *retained)
        yield mix, count, way, *(f"{number:.3f}" for number in (*numbers, *interval([each[way][1] for each in trials])))


def read_cache(path: Path) -> dict[str, dict[str, list[float]]]:
    """Trials that an earlier run has finished, by bed, mix, count and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(json.loads(line) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--cache", type=Path, default=Path("runs/benchmark/levels.jsonl"))
    parser.add_argument("--output", type=Path, default=DATA)
    options = parser.parse_args()
    name, make_bed = bed_of(options)
    known = read_cache(options.cache)
    options.cache.parent.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    with options.cache.open("a", encoding="utf-8") as cache:
        for mix in MIXES:
            text = ", ".join(f"{100 * share:.0f} % at {epsilon:g}" for epsilon, share in mix.items())
            for count in COUNTS:
                if count > make_bed(0).most_pairs:
                    continue
                trials = []
                for seed in tqdm(range(options.seeds), desc=f"{name}, {text}, n = {count}", leave=False):
                    bed = make_bed(seed)
                    key = f"{bed.identity}, {text}, {count}, seed {seed}"
                    if key not in known:
                        known[key] = {way: list(pair) for way, pair in trial(bed, mix, count, seed).items()}
                        cache.write(json.dumps([key, known[key]]) + "\n")
                        cache.flush()
                    trials.append(known[key])
                writer.writerows(rows_of_cell(text, count, trials))
    path = options.output / f"levels-{name}.csv"
    atomic.write_text(path, table.getvalue())
    print(table.getvalue(), path, sep="")


if __name__ == "__main__":
    main()
