"""What Figures 1 and 2 say about each task, decided on the runs; the tables and drawings behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import Estimate
from private_rlhf.validation.lab import COLOURS, Claim, new_figure, within
from private_rlhf.validation.lab import Kind as ClaimKind
from scipy import stats

from private_rlhf_lab.studies.dptd import inside
from private_rlhf_lab.studies.dptd.algorithms import Path
from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.metrics import SAMPLE, mspbe, objective, subset, value_error
from private_rlhf_lab.studies.dptd.network import dimension
from private_rlhf_lab.studies.dptd.noise import Kind
from private_rlhf_lab.studies.dptd.scaling import Point
from private_rlhf_lab.studies.dptd.study import EPSILON, FIGURE_1, Arm, Problem, baselines, family

LAST = 5  # recorded moments that count as the end of a run
PUBLISHED = ("SGD", "DPGLD", "DPSRM")
CAVEAT = "step sizes and nu_0 break the conditions of Theorem 5.2 and Lemma C.6"


@dataclass(frozen=True)
class Outcome:
    """One arm on one task. epochs (C,); objective (C, R): L; mspbe (R,) of the last iterate; value_errors (C, R);
    clipped (2,) the share of shortened gradients.
    """

    epochs: Array
    objective: Array
    mspbe: Array
    value_errors: Array
    clipped: Array

    @property
    def end(self) -> Array:
        """Mean |L| over the last moments, (R,)."""
        return np.abs(self.objective[-LAST:]).mean(axis=0)

    @property
    def squared_error(self) -> Array:
        """Mean squared value error over the last moments, plus the returns' variance, (R,)."""
        return np.asarray((self.value_errors[-LAST:] ** 2).mean(axis=0))


Outcomes = Mapping[str, Outcome]


def second_figure(kind: str, epsilon: float) -> str:
    """Name of an arm of Figure 2."""
    return f"epsilon {epsilon:g}, {kind}"


def measure(problem: Problem, epsilons: Sequence[float]) -> tuple[dict[str, Outcome], Array]:
    """Every arm, Figure 2's at `epsilons` (EPSILON is one of them), and the MSPBE of the common starts, (R,)."""
    kinds: tuple[Kind, ...] = ("accountant", "paper")
    others = [each for each in epsilons if each != EPSILON]
    arms = {second_figure(kind, each): Arm(kind, each) for kind in kinds for each in others}
    judged = subset(problem.data).cast(np.float64)
    found: dict[str, Outcome] = {}
    for paths in (family(problem, FIGURE_1), baselines(problem), family(problem, arms)):
        found |= {name: _outcome(path, problem) for name, path in paths.items()}
    for kind, name in (("accountant", "DPTD"), ("paper", "DPTD, noise of the paper")):
        found[second_figure(kind, EPSILON)] = found[name]
    return found, mspbe(problem.start()[0].astype(np.float64), judged)


def _outcome(path: Path, problem: Problem) -> Outcome:
    data = subset(problem.data)
    last = path.theta[-1].astype(np.float64)
    return Outcome(
        path.steps / len(problem.data),
        objective(path, data),
        mspbe(last, data.cast(np.float64)),
        np.array([value_error(theta, problem.data, SAMPLE) for theta in path.theta], dtype=np.float64),
        path.clipped.mean(axis=0),
    )


def paired(values: Array) -> Estimate:
    """Mean of (R,) paired differences with the 95 % t interval."""
    mean = float(values.mean())
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Estimate(mean, mean - half, mean + half, len(values))


def claims(problem: Problem, found: Outcomes, start: Array, epsilons: Sequence[float]) -> Iterator[Claim]:
    """Figures 1 and 2 on one task, after `measure`; `start` (R,) is the MSPBE of the untrained networks."""
    title = problem.task.title

    def smaller(claim: str, source: str, values: Array, what: str, kind: ClaimKind | None = None) -> Claim:
        difference = f"paired difference of {what}"
        return within(f"{title}: {claim}", source, paired(values), high=0.0, what=difference, kind=kind)

    last = "|L| at the end"
    error, strongest = "MSVE at the end", second_figure("accountant", epsilons[-1])
    others = ("DPTD", *PUBLISHED)
    near = min(others, key=lambda name: float(found[name].end.mean()))
    yield smaller("TD, without noise, ends with a smaller |L| than all others", "DPTD Section 6.3",
                  found["TD"].end - found[near].end, f"{last} (the best other: {near})", "statement")
    near = min(others, key=lambda name: float(found[name].squared_error.mean()))
    yield smaller("TD, without noise, ends with a smaller value error than all others", "DPTD Section 6.3",
                  found["TD"].squared_error - found[near].squared_error, f"{error} (the best other: {near})", "reading")
    yield smaller("TD's L goes to 0: to less than a tenth of the start's", "DPTD Section 6.3",
                  found["TD"].end - 0.1 * np.abs(found["TD"].objective[0]), "|L| at the end and a tenth of the start's")
    for other in PUBLISHED:
        yield smaller(f"DPTD ends with a smaller |L| than {other}, epsilon {EPSILON:g}", "DPTD Figure 1",
                      found["DPTD"].end - found[other].end, last)
        yield smaller(f"DPTD ends with a smaller value error than {other}, epsilon {EPSILON:g}", "DPTD Figure 1",
                      found["DPTD"].squared_error - found[other].squared_error, error, "reading")
    yield smaller(f"DPTD ends with a smaller value error than SGD, at epsilon {epsilons[-1]:g}", "DPTD Figure 1",
                  found[strongest].squared_error - found["SGD"].squared_error, error, "reading")
    for kind in ("accountant", "paper"):
        weak, strong = (found[second_figure(kind, each)].squared_error for each in (epsilons[-1], epsilons[0]))
        yield smaller(f"DPTD is better at epsilon {epsilons[-1]:g} than at {epsilons[0]:g}, calibration {kind}",
                      "DPTD Figure 2", weak - strong, error, "reading")
    yield smaller(f"DPTD's value function is better than one made of noise alone, epsilon {EPSILON:g}", "this project",
                  found["DPTD"].squared_error - found["DPTD, reading no data"].squared_error, error)
    yield smaller("L = 0 means a value function as good as TD's, whose L goes to 0 (start with omega = 0: L = 0)",
                  "DPTD Section 6.3", start - found["TD"].mspbe, "MSPBE, untrained networks less TD's")


def summary(problem: Problem, found: Outcomes) -> list[dict[str, object]]:
    """Rows of outcomes.csv: means and standard deviations over runs."""
    return [
        {"task": problem.task.name, "arm": name, "runs": len(one.end), "objective_end": one.objective[-1].mean(),
         "objective_sd": one.objective[-1].std(ddof=1), "absolute_objective_end": one.end.mean(),
         "mspbe": one.mspbe.mean(), "mspbe_sd": one.mspbe.std(ddof=1), "value_error": np.median(one.value_errors[-1]),
         "clipped_primal": one.clipped[0], "clipped_dual": one.clipped[1]}
        for name, one in found.items()
    ]


def curves(problem: Problem, found: Outcomes) -> list[dict[str, object]]:
    """Rows of curves.csv: the points of both figures."""
    return [
        {"task": problem.task.name, "arm": name, "epoch": epoch, "objective": one.objective[place].mean(),
         "objective_sd": one.objective[place].std(ddof=1), "value_error": np.median(one.value_errors[place])}
        for name, one in found.items()
        for place, epoch in enumerate(one.epochs)
    ]


def draw(problems: Sequence[Problem], outcomes: Sequence[Outcomes], arms: Mapping[str, str], title: str) -> Figure:
    """Value errors against epochs, a panel a task: medians, and quartiles as a band; `arms` name to label."""
    figure, axes = new_figure(len(problems), (4.2 * len(problems), 3.4))
    for each, problem, found in zip(axes, problems, outcomes, strict=True):
        for place, (name, label) in enumerate(arms.items()):
            line, colour = "-" if place < len(COLOURS) else "--", COLOURS[place % len(COLOURS)]
            low, median, high = np.quantile(found[name].value_errors, (0.25, 0.5, 0.75), axis=1)
            each.plot(found[name].epochs, median, line, label=label, linewidth=1.2, color=colour)
            each.fill_between(found[name].epochs, low, high, color=colour, alpha=0.08, linewidth=0)
        shape = f"n = {len(problem.data)}, d = {dimension(problem.task.size)}"
        each.set(xlabel="epoch", title=f"{problem.task.title}: {shape}, G = {problem.settings.clip:g}")
        each.set_ylim(bottom=0.0)
    axes[0].set_ylabel("root mean square value error")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    figure.suptitle(f"{title}; {CAVEAT}", fontsize=8)
    return figure


def draw_scaling(
    outside: Mapping[Kind, Sequence[Point]], within_theorem: Mapping[Kind, Sequence[inside.Point]]
) -> Figure:
    """Eq. 4 against nε with the theorem's slope: at the experiments' settings, and where its conditions are met."""
    figure, panels = new_figure(2)
    for place, kind in enumerate(outside):
        here, there = outside[kind], within_theorem[kind]
        totals = (np.array([point.utility.total for point in here]), np.array([point.totals for point in there]))
        across = np.array([point.product for point in here])
        for axes, total in zip(panels, totals, strict=True):
            fit = np.polyfit(np.log(across), np.log(total.mean(1)), 1)[0]
            label = f"noise: {kind}, slope {fit:.2f}"
            axes.errorbar(across, total.mean(1), total.std(1, ddof=1), fmt="o-", color=COLOURS[place], label=label)
            guide = total.mean(1)[0] * (across / across[0]) ** -0.25
            axes.plot(across, guide, "--", color="#555555", label=None if place else "slope −1/4")
    for axes, title in zip(panels, ("the experiments' settings", "inside Theorem 5.2, linear values"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="n ε", title=title)
        axes.legend()
    panels[0].set_ylabel("Eq. 4, mean over iterates")
    return figure
