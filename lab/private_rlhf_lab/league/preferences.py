"""`private-rlhf-lab benchmark preferences`: all arms on one bed, the same labels for all; table, verdict, figure.

The claim under test: on the same randomised labels, features and tuning effort no published arm beats the
ridge-regularised private MLE in J. Paired over seeds by Student's t, Holm over arms × ε × n at 5 %, both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import Row, appending
from private_rlhf.core.noise import epsilon_of, is_public
from private_rlhf.core.stats import holm, paired_p, student_mean
from torch.nn.functional import softplus

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.fieller import fieller
from private_rlhf_lab.league.arms import ARMS, OURS, PROJECT, PUBLISHED
from private_rlhf_lab.league.beds import Bed, Labels, draw_private
from private_rlhf_lab.league.central import CENTRAL

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
COUNTS = (500, 1500, 5000, 15_000, 50_000)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(bed: Bed, labels: Labels, arm: str) -> dict[str, float]:
    """Of one arm: j, the gain in J over π_ref; and of its chances σ(margin of r̂) for two held-out answers: accuracy,
    how often a Bradley–Terry label agrees with the likelier; scale, the slope of r*'s margins on r̂'s (1: calibrated,
    below: over-confident); nats, the log-loss on such labels beyond that of r* itself (0: calibrated, all known).
    """
    found = {**ARMS, **CENTRAL}[arm](bed, labels)
    half = bed.held_truth.shape[1] // 2
    true, said = (each[:, :half] - each[:, half : 2 * half] for each in (bed.held_truth, found.reward))
    agrees, chance = torch.sigmoid(true * said.sign()), torch.sigmoid(true)
    loss = softplus(-said) * chance + softplus(said) * (1.0 - chance)
    least = softplus(-true) * chance + softplus(true) * (1.0 - chance)
    return {
        "j": bed.gain(found.policy),
        "accuracy": float(torch.where(said == 0, 0.5, agrees).mean()),
        "scale": float((true * said).sum() / said.square().sum().clamp_min(1e-12)),
        "nats": float((loss - least).mean()),
    }


def measure_all(
    make_bed: Callable[[int], Bed], path: Path, seeds: int, epsilons: Sequence[float], counts: Sequence[int]
) -> list[Row]:
    """A row for each seed, count, ε and arm; those of an earlier call as they are. ε = ∞ (null) is measured by the
    private MLE alone, for what is retained. UserError where the earlier call was on another bed.
    """
    from tqdm import tqdm

    identity = cache(lambda seed: make_bed(seed).identity)
    rows = rows_of(path, lambda row: identity(row["seed"]))
    done = {key_of(row) for row in rows}
    arms = (*ARMS, *CENTRAL)
    cells = [(seed, count, epsilon) for count in counts for seed in range(seeds) for epsilon in (*epsilons, math.inf)]
    wanted = {(s, c, e, arm) for s, c, e in cells for arm in ((OURS,) if is_public(e) else arms)}
    with appending(path) as keep:
        for seed, count, epsilon in tqdm(cells, desc="labels", unit="draw"):
            names = [arm for arm in arms if (seed, count, epsilon, arm) in wanted - done]
            if not names:
                continue
            bed = make_bed(seed)
            labels = draw_private(bed, count, epsilon, seed)
            for arm in names:
                row = {"bed": bed.identity, "seed": seed, "n": count, "arm": arm}
                row |= {"epsilon": None if is_public(epsilon) else epsilon}
                rows.append(row | measure(bed, labels, arm))
                keep(rows[-1])
    return [row for row in rows if key_of(row) in wanted]


def key_of(row: Row) -> tuple[int, int, float, str]:
    """(seed, n, ε, arm)."""
    return row["seed"], row["n"], epsilon_of(row["epsilon"]), row["arm"]


# --- tables -----------------------------------------------------------------------------------------------------------


class Table:
    """The rows by cell: `values(arm, ε, n)` is (seeds,)."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._found = {key_of(row): row for row in rows}
        self.seeds = sorted({seed for seed, _, _, _ in self._found})
        self.counts = sorted({count for _, count, _, _ in self._found})
        self.epsilons = sorted({epsilon for _, _, epsilon, _ in self._found if not is_public(epsilon)})
        self.arms = sorted({arm for _, _, _, arm in self._found})

    def values(self, arm: str, epsilon: float, count: int, what: str = "j") -> np.ndarray:
        """(seeds,)."""
        return np.array([self._found[seed, count, epsilon, arm][what] for seed in self.seeds])

    def mean(self, arm: str, epsilon: float, what: str) -> np.ndarray:
        """(seeds,), mean over n."""
        return np.mean([self.values(arm, epsilon, count, what) for count in self.counts], axis=0)


def verdict(table: Table, arms: Sequence[str]) -> list[Row]:
    """Each arm against the private MLE in each cell: difference ± half a 95 % interval, and whether Holm finds it
    better or worse.
    """
    cells = [(arm, epsilon, count) for arm in arms for epsilon in table.epsilons for count in table.counts]
    found: list[Row] = []
    p = []
    for arm, epsilon, count in cells:
        apart = table.values(arm, epsilon, count) - table.values(OURS, epsilon, count)
        mean, half = interval(apart)
        found.append({"arm": arm, "epsilon": epsilon, "n": count, "difference": mean, "half": half})
        p.append(paired_p(apart))
    for row, differs in zip(found, holm(p), strict=True):
        row["verdict"] = ("better" if float(row["difference"]) > 0 else "worse") if differs else "undecided"
    return found


def interval(values: np.ndarray) -> tuple[float, float]:
    """(mean, half width of the 95 % t interval over seeds)."""
    found = student_mean(values)
    return found.value, found.ci_high - found.value


def retained(gain: np.ndarray, whole: np.ndarray) -> str:
    """The share of one mean gain in another, (seeds,) each, in %; "–" where the other is not clear of 0."""
    try:
        low, high = fieller(gain, whole)
    except ValueError:
        return "–"
    return f"{100 * gain.mean() / whole.mean():.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def league(table: Table) -> Iterator[str]:
    """Markdown: J by arm and ε, mean over n, and what is retained; how often an arm is better or worse than the private
    MLE; J by n, accuracy, scale and calibration at the middle ε; the claim's verdict.
    """
    seeds, counts = len(table.seeds), ", ".join(f"{count:,}" for count in table.counts)
    yield f"J gain over π_ref, mean over n = {counts} ± 95 % over {seeds} paired seeds; in brackets, its share of the"
    yield "private MLE's gain without privacy (ε = ∞), % [95 %, Fieller]."
    yield ""
    yield "| arm | trust | " + " | ".join(f"ε = {epsilon:g}" for epsilon in table.epsilons) + " | better / worse |"
    yield "|---|---|" + "---|" * (len(table.epsilons) + 1)
    others = [arm for arm in table.arms if arm != OURS]
    compared = verdict(table, others)
    whole = table.mean(OURS, math.inf, "j")
    for arm in sorted(table.arms, key=lambda arm: -sum(table.mean(arm, e, "j").mean() for e in table.epsilons)):
        cells = []
        for epsilon in table.epsilons:
            gain = table.mean(arm, epsilon, "j")
            mean, half = interval(gain)
            cells.append(f"{mean:+.3f} ± {half:.3f} ({retained(gain, whole)})")
        own = [row["verdict"] for row in compared if row["arm"] == arm]
        score = "–" if arm == OURS else f"{own.count('better')} / {own.count('worse')} of {len(own)}"
        trust = "trainer sees labels" if arm in CENTRAL else "local"
        name = f"**{arm}**" if arm in PROJECT else arm
        yield f"| {name} | {trust} | {' | '.join(cells)} | {score} |"
    yield ""
    yield "Better / worse: in how many cells (ε, n) the arm differs from the private MLE (Holm over all, 5 %)."
    yield ""
    middle = table.epsilons[len(table.epsilons) // 2]
    heads = [f"J, n = {count:,}" for count in table.counts]
    yield f"| arm, ε = {middle:g} | {' | '.join(heads)} | accuracy | scale | nats |"
    yield "|---|" + "---|" * (len(table.counts) + 3)
    for arm in table.arms:
        cells = ["{:+.3f} ± {:.3f}".format(*interval(table.values(arm, middle, count))) for count in table.counts]
        facts = (interval(table.mean(arm, middle, what))[0] for what in ("accuracy", "scale", "nats"))
        yield f"| {arm} | {' | '.join(cells)} | " + " | ".join(f"{fact:.3f}" for fact in facts) + " |"
    yield ""
    published = verdict(table, [arm for arm in table.arms if arm in PUBLISHED])
    better = [row for row in published if row["verdict"] == "better"]
    worse = sum(row["verdict"] == "worse" for row in published)
    of = f"of {len(published)} cells (arm, ε, n)"
    if better:
        said = "{arm} at ε = {epsilon:g}, n = {n:,}: {difference:+.4f} ± {half:.4f}"
        names = "; ".join(said.format(**row) for row in better)
        yield f"**The claim is refuted**: in {len(better)} {of} a published arm is better ({names}), in {worse} worse."
    else:
        yield f"**The claim holds**: in none {of} is a published arm better, in {worse} it is worse."


def draw(table: Table, path: Path) -> None:
    """J by n, a panel per ε."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (3.4 * len(table.epsilons), 3.6)
    figure, axes = plt.subplots(1, len(table.epsilons), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for place, epsilon in zip(axes[0], table.epsilons, strict=True):
        for arm in table.arms:
            style = "-" if arm in PROJECT else "--" if arm in CENTRAL else ":"
            gains = [table.values(arm, epsilon, count).mean() for count in table.counts]
            place.plot(table.counts, gains, style, label=arm, linewidth=2.2 if arm == OURS else 1.2)
        place.set(title=f"ε = {epsilon:g}", xlabel="labels", xscale="log")
    low = min(0.0, *(table.values(OURS, epsilon, table.counts[0]).mean() for epsilon in table.epsilons))
    axes[0][0].set(ylabel="J gain over π_ref", ylim=(low - 0.5, None))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(
    make_bed: Callable[[int], Bed],
    output: Path,
    seeds: int,
    epsilons: Sequence[float] = EPSILONS,
    counts: Sequence[int] = COUNTS,
) -> str:
    """Measures what is not there yet, and writes OUTPUT/arms.jsonl, league.md and league.png. Returns the table."""
    output.mkdir(parents=True, exist_ok=True)
    table = Table(measure_all(make_bed, output / "arms.jsonl", seeds, epsilons, counts))
    text = "\n".join(league(table)) + "\n"
    atomic.write_text(output / "league.md", text)
    draw(table, output / "league.png")
    return text
