"""Over-optimisation on a pool of answers with a known truth: what a learnt reward promises, and what r* pays for it.

Labels of `--pairs` distinct pairs are drawn from r*, randomised at ε, and the private MLE is fitted as in `benchmark
preferences`. Then its Gibbs policy is pushed: a smaller and smaller kl_coef, with pessimism r̄ − κΓ and without. At each
KL stand the gain in r̂'s own eyes and the gain in r*; where they part, the policy has learnt the fit's errors.

Run:  python -m private_rlhf_lab.benches.over_optimisation --pool hh_pool.safetensors [--pairs 2100] [--seeds 10]
      [--output runs/over_optimisation]     (a minute on one core; the pool: human_pool.py, or `benchmark preferences`)
Writes OUTPUT/over_optimisation.md and .png; ± and bands are 95 % over seeds (Student's t)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.reward_models.losses import get_loss
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import cell, interval, name_of
from private_rlhf_lab.league.arms import fit
from private_rlhf_lab.league.beds import Bed, draw_private, pool_bed

EPSILONS = (0.5, 1.0, 2.0, float("inf"))
KAPPAS = (0.0, 1.0)
KL_COEFS = tuple(float(value) for value in np.geomspace(2.0, 0.01, 24))
Curve = dict[str, np.ndarray]
"""kl, promised, true: (seeds, len(KL_COEFS)) each."""


def curve_of(scores: np.ndarray, truth: np.ndarray) -> tuple[list[float], list[float], list[float]]:
    """KL, gain in `scores` and gain in `truth`, (M, N) each, of the Gibbs policy of `scores` at each of KL_COEFS."""
    weights = [gibbs_weights(scores, kl_coef) for kl_coef in KL_COEFS]
    above = [[((w - 1.0 / w.shape[1]) * of).sum(axis=1).mean() for w in weights] for of in (scores, truth)]
    return [float(kl_from_uniform(w).mean()) for w in weights], above[0], above[1]


def measure(bed: Bed, pairs: int, seeds: int) -> dict[tuple[float, float], Curve]:
    """A curve for each (ε, κ)."""
    loss, truth = get_loss("private_likelihood"), bed.held_truth.numpy()
    found: dict[tuple[float, float], list[tuple[list[float], ...]]] = {}
    for epsilon in tqdm(EPSILONS, desc="fits", unit="ε"):
        for seed in range(seeds):
            made = fit(bed, draw_private(bed, pairs, epsilon, seed), loss)
            reward, gamma = (bed.held_x @ made.theta).numpy(), made.gamma(bed.held_x).numpy()
            for kappa in KAPPAS:
                found.setdefault((epsilon, kappa), []).append(curve_of(reward - kappa * gamma, truth))
    names = ("kl", "promised", "true")
    return {at: dict(zip(names, np.array(own).transpose(1, 0, 2), strict=True)) for at, own in found.items()}


def table(curves: Mapping[tuple[float, float], Curve], pairs: int) -> str:
    """Markdown: each curve where its mean gain in r* is largest, and at its end."""
    lines = [f"{pairs:,} labels; ± 95 % over seeds; gains over π_ref in reward, logits", ""]
    lines += ["| ε | κ | KL at the peak, nats | promised there | true there | KL at the end | promised | true |"]
    lines += ["|---" * 8 + "|"]
    for (epsilon, kappa), own in curves.items():
        peak, end = int(own["true"].mean(axis=0).argmax()), len(KL_COEFS) - 1
        kls = [f"{own['kl'][:, at].mean():.2f}" for at in (peak, end)]
        gains = [[cell(own[what][:, at].tolist()) for what in ("promised", "true")] for at in (peak, end)]
        both = " | ".join(f"{kl} | {' | '.join(own_gains)}" for kl, own_gains in zip(kls, gains, strict=True))
        lines.append(f"| {name_of(epsilon)} | {kappa:g} | {both} |")
    return "\n".join(lines) + "\n"


def draw(curves: Mapping[tuple[float, float], Curve], path: Path) -> None:
    """Gains against KL, one panel an ε: dotted what is promised, with a line and its band what is true."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(3.2 * len(EPSILONS), 3.0), sharey=True, layout="constrained")
    colours: Sequence[str] = ("tab:orange", "tab:blue")
    for place, epsilon in zip(axes, EPSILONS, strict=True):
        for kappa, colour in zip(KAPPAS, colours, strict=True):
            own = curves[epsilon, kappa]
            kl = own["kl"].mean(axis=0)
            ends = np.array([interval(column) for column in own["true"].T])
            place.plot(kl, own["promised"].mean(axis=0), ":", color=colour, label=f"promised, κ = {kappa:g}")
            place.plot(kl, ends[:, 0], color=colour, label=f"true, κ = {kappa:g}")
            low, high = ends[:, 0] - ends[:, 1], ends[:, 0] + ends[:, 1]
            place.fill_between(kl, low, high, color=colour, alpha=0.2, linewidth=0)
        place.set(title=f"ε = {name_of(epsilon)}", xlabel="KL(π‖π_ref), nats")
    axes[0].set(ylabel="gain over π_ref")
    axes[0].legend(fontsize=7)
    with atomic.new_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("runs/over_optimisation"))
    options = parser.parse_args()
    try:
        curves = measure(pool_bed(options.pool, 1.0), options.pairs, options.seeds)
    except UserError as error:
        print(f"over_optimisation: {error}", file=sys.stderr)
        return 2
    text = table(curves, options.pairs)
    options.output.mkdir(parents=True, exist_ok=True)
    atomic.write_text(options.output / "over_optimisation.md", text)
    draw(curves, options.output / "over_optimisation.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
