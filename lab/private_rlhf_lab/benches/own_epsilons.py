"""Each person at an ε of their own, against one ε for all: J of the Gibbs policy on a linear bed.

Of n people with one label each, shares of a mix give theirs at several levels. The same pairs and true labels, paired
by seed, are learnt from in five ways: each label at its own ε; all at the least level, which everyone accepts; without
those who want the least level; all as of the mean ε, which is wrong; and the true labels that the law counts,
Σ tanh²(εᵢ/2) of them, released as they are. The ridge is that of the largest evidence in each.

Run:  python -m private_rlhf_lab.benches.own_epsilons [--seeds 40]
Writes docs/results/levels.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
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
from private_rlhf_lab.league.beds import Bed, draw_private, linear_bed

PAGE = Path(__file__).parents[3] / "docs/results/levels.md"
MIXES: tuple[Mapping[float, float], ...] = ({0.5: 0.4, 1.0: 0.4, 4.0: 0.2}, {0.5: 0.8, 4.0: 0.2})
COUNTS = (500, 2000, 8000)
WAYS = (
    "each at their own ε",
    "all at the least level",
    "without the least level",
    "all read at the mean ε (biased)",
    "as many true labels as the law counts",
)

HEAD = """\
Made by `python -m private_rlhf_lab.benches.own_epsilons --seeds {seeds}`. A linear bed (32 features, a
reward of standard deviation 1, kl_coef 0.5), n people with one label each. J of the Gibbs policy on held-out
prompts, gain over π_ref, ± 95 % over {seeds} seeds; in brackets the paired difference to the first row. Slope: of
the fitted reward on the true one, 1 but for the ridge where the labels are read as they are."""


def gain(bed: Bed, x: Tensor, z: Tensor, noise: AnyNoise) -> tuple[float, float]:
    """(J on held-out prompts less π_ref's, the slope of the fitted reward on the true one) of labels z (n,) of pairs
    that differ by x (n, k)."""
    zeros = torch.zeros_like(x)
    known = known_noise(noise)
    ridge = ridge_by_evidence(x, zeros, z, known, None)
    problem = pair_problem(x, zeros, z, known, identity_basis(x.shape[1]), None, "private_likelihood")
    theta, _ = minimize(problem, ridge, torch.zeros(x.shape[1], dtype=torch.float64), tolerance=1e-6)
    reward = bed.held_x @ theta
    centred, truth = (each - each.mean(dim=1, keepdim=True) for each in (reward, bed.held_truth))
    slope = float((centred * truth).sum() / truth.square().sum())
    return bed.gain(torch.softmax(reward / bed.kl_coef, dim=1)), slope


def trial(mix: Mapping[float, float], count: int, seed: int) -> dict[str, tuple[float, float]]:
    """`gain` of every way of WAYS with one draw of people, pairs and labels."""
    bed, generator = linear_bed(seed), np.random.default_rng(seed)
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
    found = (
        gain(bed, labels.x, z, noise),
        gain(bed, labels.x, private(levels[0]), levels[0]),
        gain(bed, labels.x[bold], z[bold], rows_of(noise, bold)),
        gain(bed, labels.x, z, mean),
        gain(bed, labels.x[:worth], labels.y[:worth], math.inf),
    )
    return dict(zip(WAYS, found, strict=True))


def lines_of(seeds: int) -> Iterator[str]:
    """The page, in Markdown."""
    yield "# Each person at an ε of their own"
    yield ""
    yield HEAD.format(seeds=seeds)
    for mix in MIXES:
        law = sum(share * math.tanh(epsilon / 2) ** 2 for epsilon, share in mix.items())
        text = ", ".join(f"{100 * share:.0f} % at {epsilon:g}" for epsilon, share in mix.items())
        found = {count: [trial(mix, count, seed) for seed in tqdm(range(seeds), leave=False)] for count in COUNTS}
        yield ""
        yield f"## {text}"
        yield ""
        yield f"Σ tanh²(ε/2) is {law:.3f} a label; at the least level for all {math.tanh(min(mix) / 2) ** 2:.3f}."
        yield ""
        yield f"| | {' | '.join(f'n = {count}' for count in COUNTS)} | slope, n = {COUNTS[-1]} |"
        yield "|---|" + "---|" * (len(COUNTS) + 1)
        for way in WAYS:
            cells = []
            for count in COUNTS:
                mean, half = interval([row[way][0] for row in found[count]])
                paired, spread = interval([row[way][0] - row[WAYS[0]][0] for row in found[count]])
                beside = "" if way == WAYS[0] else f" ({paired:+.3f} ± {spread:.3f})"
                cells.append(f"{mean:+.3f} ± {half:.3f}{beside}")
            slope, half = interval([row[way][1] for row in found[COUNTS[-1]]])
            yield f"| {way} | {' | '.join(cells)} | {slope:.2f} ± {half:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    text = "\n".join(lines_of(parser.parse_args().seeds)) + "\n"
    atomic.write_text(PAGE, text)
    print(text)


if __name__ == "__main__":
    main()
