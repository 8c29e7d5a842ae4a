"""`private-rlhf validate dptd --sweep`: from which (n, ε) on is DPTD's value function of use, and which clip is best?

Every method gets the same number of tries: GAINS steps for each of CLIPS (SGD, which clips nothing, as many rates).
They are chosen on seeds 0 … TUNE − 1 by the value error, and reported on other seeds, other networks and other data.
"noise alone" has DPTD's chosen settings and reads no data.
Work is kept task by task and n by n: what a file holds is not done again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from pipeline.accounting.dptd import joint_sensitivity
from pipeline.accounting.subset_sampling import least_noise_multiplier
from pipeline.core import atomic
from pipeline.validation.dptd.algorithms import (
    Recursion,
    langevin_runs,
    momentum_runs,
    recursive_runs,
    sampled_rows,
    sgd_runs,
)
from pipeline.validation.dptd.environments import TASKS, Array, Task
from pipeline.validation.dptd.metrics import value_error
from pipeline.validation.dptd.network import initial
from pipeline.validation.dptd.noise import MOMENTUM, step_sizes
from pipeline.validation.dptd.policies import load
from pipeline.validation.dptd.trajectories import Transitions, collect

NAMES, ROWS = ("cartpole", "acrobot"), (500, 2000, 8000)
EPSILONS, DELTA = (1.0, 4.0, 16.0), 1e-5
CLIPS = (0.03, 0.1, 0.3, 1.0)
STEPS, FULL_STEPS = 16_000, 20  # of one-record methods, and of DPGLD; DPSRM: as many gradients as the former
BATCH, DECAY = 25, 0.1
# Step sizes in units of 1/G: gradients shortened to G move the iterate by them, whatever G is. SGD's are plain.
GAINS = {"DPTD": (0.6, 2.0), "DPGLD": (1.0, 4.0), "DPSRM": (0.03, 0.12)}
RATES = (1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
TUNE, REPORT = 2, 6


@dataclass(frozen=True)
class Try:
    """A setting of one method. clip: G; infinite for SGD. gain: its step times G (SGD: its step). noise: the noise
    multiplier; 0 for SGD. None stands for infinity, so that JSON can hold it.
    """

    method: str
    epsilon: float | None
    clip: float | None
    gain: float
    noise: float


def tries(rows: int) -> list[Try]:
    """Every setting on n = `rows` records."""
    found = [Try("SGD", None, None, rate, 0.0) for rate in RATES]
    batches = STEPS // (2 * BATCH)
    plans = {"DPTD": (STEPS, 1), "DPGLD": (FULL_STEPS, rows), "DPSRM": (batches, BATCH)}
    known: dict[tuple[float, int, int], float] = {}
    for epsilon in EPSILONS:
        for method, (steps, size) in plans.items():
            if (epsilon, steps, size) not in known:
                known[epsilon, steps, size] = least_noise_multiplier(epsilon, rows, steps, DELTA, size)
            noise = known[epsilon, steps, size]
            found += [Try(method, epsilon, clip, gain, noise) for clip in CLIPS for gain in GAINS[method]]
    return found


def errors(data: Transitions, held_out: Transitions, chosen: Sequence[Try], seeds: Sequence[int]) -> Array:
    """Root mean square error (tries, seeds) against returns of `held_out`; all of one method, all seeds at once."""
    size, dtype = data.state.shape[1], data.state.dtype
    generator = np.random.default_rng([7, *seeds])
    pairs = [[initial(1, size, np.random.default_rng([9, seed, player]))[0] for seed in seeds] for player in (0, 1)]
    start = (np.tile(np.array(pairs[0], dtype), (len(chosen), 1)), np.tile(np.array(pairs[1], dtype), (len(chosen), 1)))
    clip, gain, noise = (
        np.repeat(np.array(values, dtype), len(seeds))[:, None]
        for values in zip(*((each.clip or 1.0, each.gain, each.noise) for each in chosen), strict=True)
    )
    method, runs, rate = chosen[0].method, len(start[0]), gain / clip
    if method in ("DPTD", "noise alone"):
        scales = np.concatenate([[1.0], MOMENTUM * step_sizes(STEPS - 1)])[:, None]
        sigma = noise * joint_sensitivity(1.0) * clip
        read = clip[:, 0] if method == "DPTD" else np.zeros(runs)
        rows = sampled_rows(data, STEPS, runs, "transition", generator)
        path = momentum_runs(data, start, rows, scales * sigma[:, 0], read, [STEPS - 1], generator, rate)
    elif method == "SGD":
        path = sgd_runs(data, start, sampled_rows(data, STEPS, runs, "transition", generator), rate, [STEPS])
    elif method == "DPGLD":
        sigma = noise * joint_sensitivity(1.0) * clip / len(data)
        path = langevin_runs(data, start, FULL_STEPS, rate, sigma, clip, generator)
    else:
        settings = Recursion(BATCH, DECAY, rate)
        sigma = noise * settings.sensitivity(1.0) * clip
        path = recursive_runs(data, start, max(1, STEPS // len(data)), settings, sigma, clip, generator)
    return value_error(path.theta[-1].astype(np.float64), held_out).reshape(len(chosen), len(seeds))


def _data(task: Task, rows: int, seed: int) -> Transitions:
    """The first `rows` transitions of whole episodes, in the float type of the runs."""
    found, episodes = collect(load(task), 8, seed), 8
    while len(found) < rows:
        episodes *= 2
        found = collect(load(task), episodes, seed)
    return found.take(np.arange(rows)).cast(np.float32)


def _cell(task: Task, rows: int) -> list[dict[str, object]]:
    """All methods on one task and n: rows with `errors` of the chosen tries, rows without of all tries."""
    held_out = collect(load(task), 40, 50_000)
    constant = float(held_out.returns().std())
    everything, found = tries(rows), []
    first, second = _data(task, rows, 10_000), _data(task, rows, 20_000)
    seeds = range(TUNE, TUNE + REPORT)

    def row(one: Try, score: float | None, values: Sequence[float]) -> dict[str, object]:
        return {"task": task.name, "rows": rows, **asdict(one), "tuning_error": score, "constant_error": constant,
                "errors": list(values)}  # fmt: skip

    for method in ("SGD", *GAINS):
        mine = [each for each in everything if each.method == method]
        tuned = errors(first, held_out, mine, range(TUNE)).mean(axis=1).tolist()
        best = []
        for epsilon in dict.fromkeys(each.epsilon for each in mine):
            best.append(min(zip(tuned, mine, strict=True), key=lambda pair: (pair[1].epsilon != epsilon, pair[0]))[1])
        for name in (method, "noise alone") if method == "DPTD" else (method,):
            named = [replace(each, method=name) for each in best]
            reported = errors(second, held_out, named, seeds).tolist()
            found += [row(one, None, values) for one, values in zip(named, reported, strict=True)]
        found += [row(one, score, []) for one, score in zip(mine, tuned, strict=True)]
        print(f"{task.name}, n = {rows}: {method} done", flush=True)
    start = np.concatenate([initial(1, task.size, np.random.default_rng([9, seed, 0])) for seed in seeds])
    untrained = value_error(start, held_out.cast(np.float64)).tolist()
    return [*found, row(Try("untrained", None, None, 0.0, 0.0), None, untrained)]


def run_sweep(output: Path) -> None:
    """Writes OUTPUT/TASK-n.json per cell, sweep.csv and region.png; skips cells that are there. About 10 minutes."""
    output.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, object]] = []
    for rows in ROWS:
        for name in NAMES:
            place = output / f"{name}-{rows}.json"
            if not place.is_file():
                date = datetime.now(UTC).strftime("%Y-%m-%d")
                atomic.write_json(place, {"date": date, "results": _cell(TASKS[name], rows)})
            cells += json.loads(place.read_text(encoding="utf-8"))["results"]
    from pipeline.validation.dptd.region import draw, table
    from pipeline.validation.panels import save

    listed = [{**row, "errors": " ".join(f"{each:.4f}" for each in row["errors"])} for row in cells]  # type: ignore[attr-defined]
    with atomic.new_file(output / "sweep.csv") as new, new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    print(table(cells))
    save(draw(cells), output, "region")
