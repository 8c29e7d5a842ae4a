"""Does the forecast of `private-rlhf design` hold what is then measured?

For each bed, the forecast knows the answers' features, the agreement of two people and kl_coef, and neither truth nor
labels. What is measured is the gain in J retained by labels of the bed's own truth, at every n and ε, over seeds.
A cell is held where the mean over seeds, clipped to [0, 1] as the forecast is, lies in the forecast's 90 % of
simulated rewards. Nothing is retained of a gain that as many true labels do not clearly have: such a cell is empty.

Run:  python -m private_rlhf_lab.benches.design_calibration [--run RUN | --pool FILE] [--seeds 20] [--rewards 20]
Writes docs/results/data/design-BED.csv
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from pathlib import Path

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.evaluation.forecast import Answers, forecasts, learn, margin_scale, middle
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.benches.stored_bed import add_options, bed_of
from private_rlhf_lab.league.beds import Bed

DATA = Path(__file__).parents[3] / "docs/results/data"
COUNTS, EPSILONS = (500, 2000, 8000), (0.5, 1.0, 2.0, 4.0)
COLUMNS = ("labels", "ε", "agreement", "forecast of retained", "5 %", "95 %", "measured", "±", "held",
           "forecast of J", "5 %", "95 %", "measured", "±", "held")  # fmt: skip


def agreement(bed: Bed) -> float:
    """P(two people prefer the same of two answers) under the bed's truth."""
    chance = torch.sigmoid(bed.truth[:, :, None] - bed.truth[:, None, :])
    upper = torch.triu(torch.ones(chance.shape[1:], dtype=torch.bool), diagonal=1)
    return float((chance**2 + (1.0 - chance) ** 2)[:, upper].mean())


def measured(bed: Bed, count: int, seed: int) -> dict[float, float]:
    """J gain of `count` labels of random pairs of the bed, by ε; ∞ among them."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(len(bed.x), (count,), generator=generator)
    one = torch.randint(bed.x.shape[1], (count,), generator=generator)
    other = (one + torch.randint(1, bed.x.shape[1], (count,), generator=generator)) % bed.x.shape[1]
    coins = torch.rand(2, count, generator=generator, dtype=torch.float64)
    margin = bed.truth[prompt, one] - bed.truth[prompt, other]
    true = torch.where(coins[0] < torch.sigmoid(margin), 1.0, -1.0).double()
    rows = bed.x[prompt, one] - bed.x[prompt, other]
    return {epsilon: bed.gain(torch.softmax(bed.held_x @ learn(rows, true, coins[1], epsilon) / bed.kl_coef, dim=1))
            for epsilon in (*EPSILONS, math.inf)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rewards", type=int, default=20)
    options = parser.parse_args()
    name, make_bed = bed_of(options)
    known = make_bed(0)
    answers, held = (Answers.normal(), None) if name == "linear" else (Answers(known.x), Answers(known.held_x))
    cells = [(count, epsilon) for count in COUNTS for epsilon in EPSILONS]
    agreed = agreement(known)
    scales = [margin_scale(agreed)] * options.rewards
    predicted = dict(zip(cells, forecasts(answers, cells, scales, known.kl_coef, held), strict=True))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for count in COUNTS:
        beds = ((make_bed(seed), seed) for seed in range(options.seeds))
        trials = [measured(bed, count, seed) for bed, seed in tqdm(beds, total=options.seeds, desc=f"n = {count}")]
        public = np.array([trial[math.inf] for trial in trials])
        for epsilon in EPSILONS:
            gain, forecast = np.array([trial[epsilon] for trial in trials]), predicted[count, epsilon]
            row: list[object] = [count, f"{epsilon:g}", f"{agreed:.3f}"]
            for values, seen in ((forecast.retained, gain / public.mean()), (forecast.gain, gain)):
                centre, low, high = middle(values)
                mean, half = interval(list(seen))
                row += [f"{number:.3f}" for number in (centre, low, high)]
                if seen is gain or np.subtract(*interval(list(public))) > 0:
                    shown = mean if seen is gain else min(1.0, max(0.0, mean))
                    row += [f"{mean:.3f}", f"{half:.3f}", "yes" if low <= shown <= high else "no"]
                else:
                    row += ["–", "–", "–"]
            writer.writerow(row)
    path = DATA / f"design-{name}.csv"
    atomic.write_text(path, table.getvalue())
    print(table.getvalue(), path, sep="")


if __name__ == "__main__":
    main()
