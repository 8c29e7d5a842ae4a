"""The search behind `private_rlhf_lab.studies.private_rl.schedules`: plans at a total ε = 8 whose plateaus come early.

A race: random plans on few runs, then the neighbours of the best on more, generation after generation, the best few
last on fresh runs. Every generation is a file, and one that is there is not run again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from private_rlhf.core import atomic

from private_rlhf_lab.studies.private_rl import outcome, schedules
from private_rlhf_lab.studies.private_rl.schedules import EPSILON, LONGEST, Plan

# What a plan is judged by: both published plateaus at once, or one of them, or the sum of the two regrets.
GOALS = ("both", "easy", "hard", "regret")
GENERATIONS, STARTS, KEPT, CHILDREN = 10, 300, 10, 4
RUNS = (60, 500, 4000)  # of a first plan, of a later one, of a finalist
SEED = 61


def random_plan(rng: np.random.Generator) -> Plan:
    """A point of the search."""
    return Plan(
        first=int(rng.integers(2, 61)), second=int(rng.integers(2, 31)),
        growth=float(rng.choice([1.0, 1.05, 1.1, 1.15, 1.2, 1.3])), decay=float(rng.uniform(0.3, 1.0)),
        reads=int(rng.integers(1, LONGEST + 1)), optimism=float(rng.uniform(0.0, 8.0)),
        stay=float(rng.uniform(0.0, 6.0)), memory=float(rng.uniform(0.0, 0.9)),
        noise="exponential" if rng.random() < 0.5 else "gumbel",
    )  # fmt: skip


def neighbour(plan: Plan, rng: np.random.Generator) -> Plan:
    """A plan near another."""

    def near(value: float, step: float, low: float, high: float) -> float:
        return float(np.clip(value + rng.normal(0.0, step), low, high))

    return Plan(
        first=round(near(plan.first, 2.0, 1, 80)), second=round(near(plan.second, 2.0, 1, 60)),
        growth=near(plan.growth, 0.04, 1.0, 1.5), decay=near(plan.decay, 0.1, 0.1, 1.0),
        reads=round(near(plan.reads, 1.5, 1, LONGEST)), optimism=near(plan.optimism, 0.7, 0.0, 12.0),
        stay=near(plan.stay, 0.7, 0.0, 8.0), memory=near(plan.memory, 0.15, 0.0, 0.95),
        noise=plan.noise,
    )  # fmt: skip


def judge(plan: Plan, goal: str, worlds: Sequence[outcome.OutcomeProblem], runs: int, seed: int) -> float:
    """Plateau / published, the larger of the two for "both"; the sum of the mean regrets for "regret"."""
    chosen = [world for world in worlds if goal in (world.name, "both", "regret")]
    cells = [schedules.cell(world, plan, EPSILON, runs, seed) for world in chosen]
    if goal == "regret":
        return float(sum(each.cumulative[:, -1].mean() for each in cells))
    return schedules.misfit(cells)


def _generation(goal: str, number: int, parents: Sequence[Plan]) -> list[tuple[float, Plan]]:
    """Plans with what they were judged, best first."""
    worlds = [outcome.problem(name) for name in outcome.PUBLISHED]
    rng = np.random.default_rng([SEED, GOALS.index(goal), number])
    if number == 0:
        plans = [random_plan(rng) for _ in range(STARTS)]
    else:
        plans = [*parents, *(neighbour(plan, rng) for plan in parents for _ in range(CHILDREN))]
    runs = RUNS[0] if number == 0 else RUNS[2] if number == GENERATIONS else RUNS[1]
    plans = list(parents) if number == GENERATIONS else plans
    made = [(judge(plan, goal, worlds, runs, 1000 * number + SEED), plan) for plan in plans]
    return sorted(made, key=lambda each: each[0])[:KEPT]


def run_sweep(output: Path) -> None:
    """OUTPUT/GOAL-NUMBER.json for every generation of every goal, and the finalists in OUTPUT/best.json, dated."""
    best = {}
    for goal in GOALS:
        parents: list[Plan] = []
        for number in range(GENERATIONS + 1):
            path = output / f"{goal}-{number}.json"
            if not path.exists():
                found = _generation(goal, number, parents)
                atomic.write_json(path, [{"judged": value, **schedules.asdict(plan)} for value, plan in found])
            rows = json.loads(path.read_text(encoding="utf-8"))
            parents = [Plan(**{name: value for name, value in row.items() if name != "judged"}) for row in rows]
            print(f"{goal} {number}: {rows[0]['judged']:.3f}", flush=True)
        best[goal] = list(itertools.islice(rows, 3))
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    atomic.write_json(output / "best.json", {"date": date, "epsilon": EPSILON, **best})
