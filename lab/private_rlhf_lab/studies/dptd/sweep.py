"""`python -m private_rlhf_lab.studies dptd --sweep`: from which (n, ε) on is DPTD's value function of use?

Every method gets the same number of tries at each (task, n, ε): three numbers of steps, two step sizes for each of
CLIPS (SGD, which clips nothing, as many step sizes more). They are chosen by the value error on seeds 0 … TUNE − 1, and
reported on other seeds. Every seed has its own data and its own networks; the episodes that choose and those that are
reported on are others too. "noise alone" has DPTD's chosen settings and reads no data.
Work is kept by task, n and method: what a file holds is not done again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np
from private_rlhf.accounting.subset_sampling import least_noise_multiplier
from private_rlhf.core import atomic

from private_rlhf_lab.accounting.dptd import joint_sensitivity
from private_rlhf_lab.studies.dptd.algorithms import (
    Recursion,
    langevin_runs,
    momentum_runs,
    recursive_runs,
    sampled_rows,
    sgd_runs,
)
from private_rlhf_lab.studies.dptd.environments import TASKS, Array, Task
from private_rlhf_lab.studies.dptd.metrics import value_error
from private_rlhf_lab.studies.dptd.network import initial
from private_rlhf_lab.studies.dptd.noise import MOMENTUM, step_sizes
from private_rlhf_lab.studies.dptd.policies import load
from private_rlhf_lab.studies.dptd.trajectories import Transitions, collect

NAMES, ROWS = ("cartpole", "acrobot"), (500, 2000, 8000)
EPSILONS, DELTA = (1.0, 4.0, 16.0, 64.0), 1e-5
CLIPS = (0.1, 0.3)
STEPS = (2000, 8000, 32_000)  # of one-record methods; DPSRM makes as many gradients
PASSES = (4, 16, 64)  # of DPGLD, whose step reads all records
BATCH, DECAY = 25, 0.1
# Step sizes in units of 1/G: gradients shortened to G move the iterate by them, whatever G is. SGD's are plain.
GAINS = {"DPTD": (0.3, 1.0), "DPGLD": (1.0, 4.0), "DPSRM": (0.03, 0.12)}
RATES = (5e-3, 1e-2, 2e-2, 5e-2)
METHODS = ("SGD", *GAINS)
TUNE, REPORT = 2, 10
EPISODES, CHOOSING, REPORTING = 40, 2_000_000, 3_000_000  # held out, and the seeds of their first
WIDE = 16  # runs whose value errors are computed at once


@dataclass(frozen=True)
class Try:
    """A setting of one method. steps: T, of all n records each for DPGLD, of BATCH for DPSRM. clip: G; None, no clip,
    for SGD. gain: its step times G (SGD: its step). noise: the noise multiplier; 0 for SGD. epsilon: None for none.
    """

    method: str
    epsilon: float | None
    steps: int
    clip: float | None
    gain: float
    noise: float


@cache
def _multiplier(epsilon: float, rows: int, steps: int, size: int) -> float:
    return least_noise_multiplier(epsilon, rows, steps, DELTA, size)


def plan(method: str, rows: int) -> tuple[tuple[int, ...], int]:
    """The numbers of steps to try, and how many records a step reads."""
    if method == "DPGLD":
        return PASSES, rows
    return (tuple(each // (2 * BATCH) for each in STEPS), BATCH) if method == "DPSRM" else (STEPS, 1)


def tries(method: str, rows: int) -> list[Try]:
    """Every setting of `method` on n = `rows` records."""
    lengths, size = plan(method, rows)
    if method == "SGD":
        return [Try(method, None, steps, None, rate, 0.0) for steps in lengths for rate in RATES]
    return [
        Try(method, epsilon, steps, clip, gain, _multiplier(epsilon, rows, steps, size))
        for epsilon in EPSILONS
        for steps in lengths
        for clip in CLIPS
        for gain in GAINS[method]
    ]


@dataclass(frozen=True)
class Bed:
    """data: of each seed, n transitions; held_out: episodes that judge."""

    seeds: Sequence[int]
    data: Sequence[Transitions]
    held_out: Transitions


def errors(bed: Bed, chosen: Sequence[Try]) -> Array:
    """Root mean square error (tries, seeds) against the returns of the episodes held out; tries of one method."""
    found = np.empty((len(chosen), len(bed.seeds)))
    for steps in dict.fromkeys(each.steps for each in chosen):
        places = [place for place, each in enumerate(chosen) if each.steps == steps]
        theta = _last(bed, [chosen[place] for place in places]).astype(np.float64)
        parts = [value_error(theta[first : first + WIDE], bed.held_out) for first in range(0, len(theta), WIDE)]
        found[places] = np.concatenate(parts).reshape(len(places), -1)
    return found


def _last(bed: Bed, chosen: Sequence[Try]) -> Array:
    """The last θ of every try, with every seed in turn, (tries·seeds, d); tries of one method and one T."""
    method, steps, count, seeds = chosen[0].method, chosen[0].steps, len(chosen), len(bed.seeds)
    rows, size, dtype = len(bed.data[0]), bed.data[0].state.shape[1], bed.data[0].state.dtype
    generator = np.random.default_rng([7, steps, rows, *bed.seeds])
    start = [np.concatenate([initial(1, size, np.random.default_rng([9, seed, player])) for seed in bed.seeds])
             .astype(dtype) for player in (0, 1)]  # fmt: skip
    clip, gain, noise = (
        np.array(values, dtype)[:, None]
        for values in zip(*((each.clip or 1.0, each.gain, each.noise) for each in chosen), strict=True)
    )
    if method in ("DPTD", "noise alone", "SGD"):  # one record a step: all seeds side by side
        pool, runs = _joined(bed.data), count * seeds
        both = (np.tile(start[0], (count, 1)), np.tile(start[1], (count, 1)))
        drawn = sampled_rows(bed.data[0], steps, runs, "transition", generator)
        drawn += np.tile(rows * np.arange(seeds), count)
        clip, gain, noise = (np.repeat(each, seeds, axis=0) for each in (clip, gain, noise))
        if method == "SGD":
            return sgd_runs(pool, both, drawn, gain / clip, [steps]).theta[-1]
        scales = np.concatenate([[1.0], MOMENTUM * step_sizes(steps - 1)])[:, None]
        sigma = noise * joint_sensitivity(1.0) * clip
        read = clip[:, 0] if method == "DPTD" else np.zeros(runs)
        path = momentum_runs(pool, both, drawn, scales * sigma[:, 0], read, [steps - 1], generator, gain / clip)
        return path.theta[-1]
    ends = []
    for place, data in enumerate(bed.data):
        both = (np.tile(start[0][place], (count, 1)), np.tile(start[1][place], (count, 1)))
        if method == "DPGLD":
            sigma = noise * joint_sensitivity(1.0) * clip / rows
            path = langevin_runs(data, both, steps, gain / clip, sigma, clip, generator)
        else:
            settings = Recursion(BATCH, DECAY, gain / clip)
            sigma = noise * settings.sensitivity(1.0) * clip
            path = recursive_runs(data, both, steps * 2 * BATCH / rows, settings, sigma, clip, generator)
        ends.append(path.theta[-1])
    return np.stack(ends, axis=1).reshape(count * seeds, -1)


def _joined(parts: Sequence[Transitions]) -> Transitions:
    columns = ("state", "reward", "following", "discount", "trajectory")
    return Transitions(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def bed(task: Task, rows: int, seeds: Sequence[int], held_out: int) -> Bed:
    """For every seed the first `rows` transitions of its own episodes, in the float type of the runs."""
    data = []
    for seed in seeds:
        found, episodes = collect(load(task), 8, 10_000 * (seed + 1)), 8
        while len(found) < rows:
            episodes *= 2
            found = collect(load(task), episodes, 10_000 * (seed + 1))
        data.append(found.take(np.arange(rows)).cast(np.float32))
    return Bed(seeds, data, collect(load(task), EPISODES, held_out))


def _cell(task: Task, rows: int, method: str) -> list[dict[str, object]]:
    """A method on one task and n: rows with `errors` of the chosen tries, rows without of all tries."""
    choosing = bed(task, rows, range(TUNE), CHOOSING)
    reporting = bed(task, rows, range(TUNE, TUNE + REPORT), REPORTING)
    constant = float(reporting.held_out.returns().std())

    def row(one: Try, score: float | None, values: Sequence[float]) -> dict[str, object]:
        return {"task": task.name, "rows": rows, **asdict(one), "tuning_error": score, "constant_error": constant,
                "errors": list(values)}  # fmt: skip

    mine = tries(method, rows)
    tuned = errors(choosing, mine).mean(axis=1).tolist()
    best = []
    for epsilon in dict.fromkeys(each.epsilon for each in mine):
        best.append(min(zip(tuned, mine, strict=True), key=lambda pair: (pair[1].epsilon != epsilon, pair[0]))[1])
    found = []
    for name in (method, "noise alone") if method == "DPTD" else (method,):
        named = [replace(each, method=name) for each in best]
        found += [row(one, None, values) for one, values in zip(named, errors(reporting, named).tolist(), strict=True)]
    if method == "SGD":
        start = np.concatenate([initial(1, task.size, np.random.default_rng([9, seed, 0])) for seed in reporting.seeds])
        untrained = Try("untrained", None, 0, None, 0.0, 0.0)
        found.append(row(untrained, None, value_error(start, reporting.held_out).tolist()))
    return [*found, *(row(one, score, []) for one, score in zip(mine, tuned, strict=True))]


def run_sweep(output: Path) -> None:
    """Writes OUTPUT/TASK-n-METHOD.json, sweep.csv, region.md and region.png; skips what is there. 15 CPU minutes."""
    output.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, object]] = []
    for rows in ROWS:
        for name in NAMES:
            for method in METHODS:
                place = output / f"{name}-{rows}-{method}.json"
                if not place.is_file():
                    date = datetime.now(UTC).strftime("%Y-%m-%d")
                    atomic.write_json(place, {"date": date, "results": _cell(TASKS[name], rows, method)})
                    print(f"{name}, n = {rows}: {method} done", flush=True)
                cells += json.loads(place.read_text(encoding="utf-8"))["results"]
    from private_rlhf.validation.lab import save

    from private_rlhf_lab.studies.dptd.region import draw, summary, table

    listed = [{**row, "errors": " ".join(f"{each:.4f}" for each in row["errors"])} for row in cells]  # type: ignore[attr-defined]
    with atomic.new_file(output / "sweep.csv") as new, new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    text = f"{table(cells)}\n\n{summary(cells)}\n"
    atomic.write_text(output / "region.md", text)
    print(text)
    save(draw(cells), output, "region")
