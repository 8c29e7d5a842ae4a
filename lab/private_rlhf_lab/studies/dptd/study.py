"""The runs behind Figures 1 and 2: five trajectories a task, every algorithm from the same starts, equal gradients.

An epoch is as many single gradients of each player as there are transitions in the five trajectories. The paper leaves
open the ε of Figure 1 (here EPSILON), the bound G, the number of epochs, and the step sizes of the baselines. G and the
steps are those that `--sweep` chose most often on Cart Pole (docs/results/dptd.md), or near them; Pong's are not tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from private_rlhf.accounting.subset_sampling import least_noise_multiplier

from private_rlhf_lab.accounting.dptd import joint_sensitivity
from private_rlhf_lab.studies.dptd.algorithms import (
    STEP,
    Path,
    Recursion,
    langevin_runs,
    momentum_runs,
    recursive_runs,
    sampled_rows,
    sgd_runs,
)
from private_rlhf_lab.studies.dptd.environments import Array, Task
from private_rlhf_lab.studies.dptd.network import initial
from private_rlhf_lab.studies.dptd.noise import Budget, Kind, Neighbors, deviations
from private_rlhf_lab.studies.dptd.policies import load
from private_rlhf_lab.studies.dptd.trajectories import Transitions, collect

TRAJECTORIES = 5
EPSILON, DELTA = 1.0, 1e-5
EPSILONS = (0.1, 1.0, 10.0, 100.0)  # Figure 2
QUICK_EPSILONS = (1.0, 100.0)
MOMENTS = 20
SEED = 20


@dataclass(frozen=True)
class Settings:
    """clip: G of every private method. step: κ = η of DPTD. sgd, langevin, recursive: steps of the baselines."""

    clip: float
    step: float
    sgd: float
    langevin: float
    recursive: float


SETTINGS = MappingProxyType(
    {
        "cartpole": Settings(clip=0.1, step=6.0, sgd=5e-3, langevin=40.0, recursive=0.3),
        "acrobot": Settings(clip=0.1, step=6.0, sgd=5e-3, langevin=40.0, recursive=0.3),
        "pong": Settings(clip=0.1, step=6.0, sgd=5e-3, langevin=40.0, recursive=0.3),
    }
)


@dataclass(frozen=True)
class Problem:
    """A task with its data. data: in the float type of the runs, float32 where d is large."""

    task: Task
    data: Transitions
    epochs: float
    runs: int

    @property
    def settings(self) -> Settings:
        """G and the step sizes of the task."""
        return SETTINGS[self.task.name]

    @property
    def steps(self) -> int:
        """T of the algorithms that take one gradient a step."""
        return round(self.epochs * len(self.data))

    def budget(self, epsilon: float, neighbors: Neighbors = "transition") -> Budget:
        """(ε, DELTA) for this data and number of steps."""
        lengths = self.data.lengths()
        rows, longest = len(self.data), int(lengths.max())
        return Budget(epsilon, DELTA, self.steps, self.settings.clip, rows, len(lengths), longest, neighbors)

    def start(self) -> tuple[Array, Array]:
        """θ_0 and ω_0 of every run: the same for all algorithms."""
        generator = np.random.default_rng(SEED)
        found = (initial(self.runs, self.task.size, generator) for _ in range(2))
        first, second = (each.astype(self.data.state.dtype) for each in found)
        return first, second


def prepare(task: Task, epochs: float, runs: int, limit: int | None) -> Problem:
    """Five trajectories of the committed behaviour policy, each of at most `limit` transitions."""
    data = collect(load(task), TRAJECTORIES, SEED, limit)
    return Problem(task, data.cast(np.float32) if task.size > 100 else data, epochs, runs)


@dataclass(frozen=True)
class Arm:
    """A member of DPTD's family. kind None: no noise. reads False: gradients are clipped to 0, noise as it was."""

    kind: Kind | None
    epsilon: float = EPSILON
    neighbors: Neighbors = "transition"
    reads: bool = True

    def clip(self, bound: float) -> float:
        """G = `bound`; none for TD, which is not private."""
        if self.kind is None:
            return float("inf")
        return bound if self.reads else 0.0

    def step(self, private: float) -> float:
        """κ = η: `private`, and the paper's for TD, whose gradients are not shortened."""
        return STEP if self.kind is None else private


FIGURE_1: Mapping[str, Arm] = {"TD": Arm(None), "DPTD": Arm("accountant"), "DPTD, noise of the paper": Arm("paper"),
                               "DPTD, reading no data": Arm("accountant", reads=False),
                               "DPTD, whole trajectories": Arm("accountant", neighbors="trajectory")}


def family(problem: Problem, arms: Mapping[str, Arm]) -> dict[str, Path]:
    """Paths of `arms`, side by side."""
    generator, runs = np.random.default_rng(SEED + 1), problem.runs
    rows, noise = [], []
    known: dict[tuple[Kind | None, float, Neighbors], Array] = {(None, EPSILON, "transition"): np.zeros(problem.steps)}
    for arm in arms.values():
        rows.append(sampled_rows(problem.data, problem.steps, runs, arm.neighbors, generator))
        setting = (arm.kind, arm.epsilon, arm.neighbors)
        if arm.kind is not None and setting not in known:
            known[setting] = deviations(arm.kind, problem.budget(arm.epsilon, arm.neighbors))
        noise.append(np.repeat(known[setting][:, None], runs, axis=1))
    start = problem.start()
    path = momentum_runs(
        problem.data,
        (np.tile(start[0], (len(arms), 1)), np.tile(start[1], (len(arms), 1))),
        np.concatenate(rows, axis=1),
        np.concatenate(noise, axis=1),
        np.repeat([arm.clip(problem.settings.clip) for arm in arms.values()], runs),
        moments(problem).tolist(),
        generator,
        np.repeat([arm.step(problem.settings.step) for arm in arms.values()], runs)[:, None],
    )
    return {name: path.runs(slice(place * runs, (place + 1) * runs)) for place, name in enumerate(arms)}


def moments(problem: Problem) -> NDArray[np.int64]:
    """Recorded steps: MOMENTS of them, evenly spaced, the first and the last included."""
    return np.unique(np.linspace(0, problem.steps - 1, MOMENTS + 1).astype(np.int64))


def baselines(problem: Problem) -> dict[str, Path]:
    """SGD without noise; DPGLD and DPSRM at (EPSILON, DELTA) by the accountant, one event a step for both players."""
    data, start = problem.data, problem.start()
    generator = np.random.default_rng(SEED + 2)
    rows = sampled_rows(data, problem.steps, problem.runs, "transition", generator)
    epochs = max(1, round(problem.epochs))
    full = least_noise_multiplier(EPSILON, len(data), epochs, DELTA, len(data))
    chosen = problem.settings
    recursion = Recursion(batch=25, decay=0.1, rate=chosen.recursive)
    steps = recursion.steps(len(data), epochs)
    batch = least_noise_multiplier(EPSILON, len(data), steps, DELTA, recursion.batch)
    full_sigma = full * joint_sensitivity(chosen.clip) / len(data)
    batch_sigma = batch * recursion.sensitivity(chosen.clip)
    return {"SGD": sgd_runs(data, start, rows, chosen.sgd, moments(problem).tolist()),
            "DPGLD": langevin_runs(data, start, epochs, chosen.langevin, full_sigma, chosen.clip, generator),
            "DPSRM": recursive_runs(data, start, epochs, recursion, batch_sigma, chosen.clip, generator)}
