"""Noise before and after privacy-loss distributions: the least noise multiplier for ε = 1 by Rényi's bound and by them.

python -m private_rlhf_lab.studies.dptd.before_after    prints the table of docs/results/dptd.md; a CPU minute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from private_rlhf.accounting.subset_sampling import composed_epsilon, least_noise_multiplier

from private_rlhf_lab.accounting.subset_pairs import pair_epsilon
from private_rlhf_lab.studies.dptd.noise import few_orders

EPSILON, DELTA = 1.0, 1e-5
# What is counted, its number, T. Cart Pole and Pong: five trajectories as in Figures 1 and 2.
SETTINGS = (
    ("transitions, the theorem's T", 2500, 39),
    ("Cart Pole, the theorem's T", 1048, 18),
    ("Cart Pole, the figures' T", 1048, 10_480),
    ("Pong, the figures' T", 2500, 2500),
    ("transitions, ten passes", 2500, 25_000),
    ("whole trajectories", 5, 1000),
)


@dataclass(frozen=True)
class Row:
    """Multipliers for EPSILON by both bounds; at Rényi's multiplier, the ε certified by losses (high), and the ε that
    one pair spends (low).
    """

    name: str
    population: int
    steps: int
    renyi: float
    losses: float
    low: float
    high: float


def rows(settings: Sequence[tuple[str, int, int]] = SETTINGS) -> list[Row]:
    """One a setting."""
    made = []
    for name, population, steps in settings:
        asked = (EPSILON, population, steps, DELTA)
        renyi, losses = least_noise_multiplier(*asked, bound=few_orders), least_noise_multiplier(*asked)
        phases = [(renyi, steps)]
        low = pair_epsilon(1.0 / population, phases, DELTA)
        made.append(Row(name, population, steps, renyi, losses, low, composed_epsilon(population, phases, DELTA)))
    return made


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    heads = ("setting", "n or m", "T", "multiplier by Rényi", "by losses", "ratio", "true ε of the first")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in found:
        lines.append(f"| {one.name} | {one.population} | {one.steps} | {one.renyi:.3f} | {one.losses:.3f}"
                     f" | {one.losses / one.renyi:.2f} | {one.low:.3f}–{one.high:.3f} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows()))
