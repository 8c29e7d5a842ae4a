"""Central label-DP beside randomised response: from how many labels does trusting the holder pay?

Bradley–Terry labels of a linear reward on 32 Gaussian features (--features); 1,000 prompts of 16 answers are asked
about, J of the Gibbs policy is measured on 200 others of 64. On the same pairs and labels: randomised response and the
private MLE (ridge by evidence); the noisy statistic of `league.noisy_sum_fit` at (ε, 1e-6) and at pure ε (ridge by
its evidence, the same prior). Paired over seeds; intervals are Student's t. The noise comes from the seeds: a
simulation.

Run:  python -m private_rlhf_lab.benches.central_against_local [--features 32] [--seeds 20] [--output runs/central]
Three minutes on one core (20 seeds). Writes OUTPUT/central.md, central.json, central.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.ridge import ridge_by_evidence

from private_rlhf_lab.benches.epsilon_tables import cell, interval
from private_rlhf_lab.league.beds import Bed, Labels, draw_private, linear_bed
from private_rlhf_lab.league.central import central_fit

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
COUNTS = (500, 1000, 2000, 4000, 8000, 16000, 50000)
DELTAS: Mapping[str, float] = {"central": 1e-6, "central, pure": 0.0}
LOCAL = "randomised response"

Table = dict[tuple[float, int], dict[str, list[float]]]


def local_theta(labels: Labels) -> torch.Tensor:
    """θ (k,) from released labels alone."""
    zero = torch.zeros_like(labels.x)
    ridge = ridge_by_evidence(labels.x, zero, labels.z, labels.noise, None)
    return fit_linear(labels.x, zero, labels.z, labels.noise, ridge=ridge, tolerance=1e-5).theta


def gains(bed: Bed, labels: Labels) -> dict[str, float]:
    """J of each one's Gibbs policy less that of π_ref."""
    thetas = {LOCAL: local_theta(labels)} | {name: central_fit(labels, delta).theta for name, delta in DELTAS.items()}
    return {name: bed.gain(torch.softmax(bed.held_x @ theta / bed.kl_coef, dim=1)) for name, theta in thetas.items()}


def measure(features: int, seeds: int) -> Table:
    """{(ε, n): {arm: gains by seed}}."""
    table: Table = {(epsilon, count): {} for epsilon in EPSILONS for count in COUNTS}
    for seed in range(seeds):
        bed = linear_bed(seed, dimension=features)
        for (epsilon, count), cells in table.items():
            for name, gain in gains(bed, draw_private(bed, count, epsilon, seed)).items():
                cells.setdefault(name, []).append(gain)
        print(f"seed {seed + 1} of {seeds}", flush=True)
    return table


def crossover(table: Table, epsilon: float, name: str) -> str:
    """The least n at which the arm's paired gain over randomised response is above 0 with 95 %, and below it with 95 %
    at no larger n; many labels make both as good as the truth.
    """
    found = [interval(np.subtract(table[epsilon, count][name], table[epsilon, count][LOCAL]).tolist())
             for count in COUNTS]  # fmt: skip
    for place, (mean, half) in enumerate(found):
        if mean > half and not any(later < -width for later, width in found[place:]):
            return f"{COUNTS[place]:,}" if place else f"{COUNTS[0]:,} or fewer"
    return "never here"


def markdown(table: Table) -> str:
    """J by ε and n, the paired differences, and the crossovers."""
    lines = ["| ε | n | randomised | central, δ = 1e-6 | central, pure | central − randomised | pure − randomised |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for (epsilon, count), cells in table.items():
        apart = [np.subtract(cells[name], cells[LOCAL]).tolist() for name in DELTAS]
        shown = " | ".join(cell(values) for values in (*(cells[name] for name in (LOCAL, *DELTAS)), *apart))
        lines.append(f"| {epsilon:g} | {count:,} | {shown} |")
    lines += ["", "| ε | central wins from n = | pure central wins from n = |", "|---|---|---|"]
    lines += [f"| {epsilon:g} | " + " | ".join(crossover(table, epsilon, name) for name in DELTAS) + " |"
              for epsilon in EPSILONS]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(table: Table, path: Path) -> None:
    """J over n, one panel an ε."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(3 * len(EPSILONS), 3), sharey=True, layout="constrained")
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        for name in (LOCAL, *DELTAS):
            means, halves = zip(*(interval(table[epsilon, count][name]) for count in COUNTS), strict=True)
            axis.errorbar(COUNTS, means, halves, label=name, marker="o", markersize=3, capsize=2)
        axis.set(xscale="log", xlabel="labels", title=f"ε = {epsilon:g}")
    axes[0].set_ylabel("J − J(π_ref)")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Central label-DP beside randomised response.")
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/central"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = measure(args.features, args.seeds)
    args.output.mkdir(parents=True, exist_ok=True)
    rows = [{"epsilon": epsilon, "labels": count, "gain": cells} for (epsilon, count), cells in table.items()]
    atomic.write_json(args.output / "central.json", rows)
    (args.output / "central.md").write_text(markdown(table), encoding="utf-8")
    draw(table, args.output / "central.png")
    print(markdown(table))


if __name__ == "__main__":
    main()
