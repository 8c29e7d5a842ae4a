"""What `sweep` found, as a table and a drawing: value errors of the chosen settings against n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import holm, paired_p
from private_rlhf.validation.lab import COLOURS, new_figure

from private_rlhf_lab.accounting.dptd import joint_sensitivity
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.network import dimension

RIVALS = ("noise alone", "untrained", "SGD", "DPGLD", "DPSRM")


def reported(cells: Sequence[dict[str, Any]], task: str, rows: int, method: str, epsilon: float) -> np.ndarray:
    """Errors of the chosen setting on the seeds of the report (R,); SGD and untrained networks have no ε."""
    for cell in cells:
        here = (cell["task"], cell["rows"], cell["method"]) == (task, rows, method)
        if here and cell["errors"] and cell["epsilon"] in (None, epsilon):
            return np.array(cell["errors"])
    raise KeyError((task, rows, method, epsilon))


def settings(cells: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(task, n, ε) of DPTD's reports, in order."""
    mine = [each for each in cells if each["method"] == "DPTD" and each["errors"]]
    return [(each["task"], each["rows"], each["epsilon"]) for each in mine]


Key = tuple[str, int, float, str]  # task, n, ε, rival


def signs(cells: Sequence[dict[str, Any]]) -> dict[Key, str]:
    """−: DPTD has the smaller mean squared value error, +: the larger, ±: neither. Paired by seed (the returns' own
    noise cancels), Student's t, 5 % for the whole table by Holm.
    """
    differences: dict[Key, np.ndarray] = {}
    for task, rows, epsilon in settings(cells):
        own = reported(cells, task, rows, "DPTD", epsilon) ** 2
        for rival in RIVALS:
            differences[task, rows, epsilon, rival] = own - reported(cells, task, rows, rival, epsilon) ** 2
    clear = holm([paired_p(each) for each in differences.values()])
    return {key: ("−" if each.mean() < 0.0 else "+") if sure else "±"
            for (key, each), sure in zip(differences.items(), clear, strict=True)}  # fmt: skip


def signal_to_noise(cell: dict[str, Any]) -> float:
    """At most what all steps' gradients (each of norm ≤ G, all in one direction) add up to, over the norm of all their
    noise: √T/(2√2·m·√d) for one record a step at noise multiplier m, √T·n/(2√2·m·√d) for all n.
    """
    shrink = {"DPTD": 1, "DPGLD": cell["rows"]}[cell["method"]]
    size = dimension(TASKS[cell["task"]].size)
    return float(math.sqrt(cell["steps"] / size) * shrink / (joint_sensitivity(1.0) * cell["noise"]))


def chosen(cells: Sequence[dict[str, Any]], task: str, rows: int, method: str, epsilon: float) -> dict[str, Any]:
    """The row of a report."""
    return next(each for each in cells if each["errors"] and each["epsilon"] in (None, epsilon)
                and (each["task"], each["rows"], each["method"]) == (task, rows, method))  # fmt: skip


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: what was chosen for DPTD and DPGLD; median root mean square value errors with `signs`; and
    `signal_to_noise` of DPTD and DPGLD.
    """
    heads = ("task", "n", "ε", "DPTD: T, G, κG", "DPGLD: passes", "DPTD", *RIVALS, "constant",
             "signal/noise: DPTD, DPGLD")  # fmt: skip
    lines, found = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"], signs(cells)
    for task, rows, epsilon in settings(cells):
        best, full = (chosen(cells, task, rows, method, epsilon) for method in ("DPTD", "DPGLD"))
        shown = [f"{np.median(best['errors']):.2f}"]
        for rival in RIVALS:
            median = np.median(reported(cells, task, rows, rival, epsilon))
            shown.append(f"{median:.2f} {found[task, rows, epsilon, rival]}")
        row = [TASKS[task].title, str(rows), f"{epsilon:g}", f"{best['steps']}, {best['clip']:g}, {best['gain']:g}",
               str(full["steps"])]  # fmt: skip
        ratios = f"{signal_to_noise(best):.1f}, {signal_to_noise(full):.1f}"
        lines.append("| " + " | ".join([*row, *shown, f"{best['constant_error']:.2f}", ratios]) + " |")
    return "\n".join(lines)


def summary(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: where DPTD beats each rival, and where each beats it."""
    found, lines = signs(cells), []
    for rival in RIVALS:
        for sign, text in (("−", f"*DPTD beats {rival}*"), ("+", f"*{rival} beats DPTD*")):
            places = [f"{TASKS[task].title} n = {rows}, ε = {epsilon:g}" for (task, rows, epsilon, other), mark
                      in found.items() if (other, mark) == (rival, sign)]  # fmt: skip
            lines.append(f"- {text}: {'; '.join(places) or 'nowhere'}.")
    total = len(settings(cells))
    medians = [np.median(reported(cells, *each[:2], "DPTD", each[2])) < np.median(reported(cells, *each[:2], "DPGLD",
               each[2])) for each in settings(cells)]  # fmt: skip
    return "\n".join([*lines, f"- DPTD's median is below DPGLD's in {sum(medians)} of {total} rows."])


def draw(cells: Sequence[dict[str, Any]]) -> Figure:
    """A panel per task and ε: runs as points, medians as lines, against n."""
    kinds = list(dict.fromkeys((task, epsilon) for task, _, epsilon in settings(cells)))
    figure, panels = new_figure(len(kinds), (2.3 * len(kinds) + 1.2, 2.8))
    for axes, (task, epsilon) in zip(panels, sorted(kinds, key=lambda kind: kind[0], reverse=True), strict=True):
        sizes = [rows for one, rows, other in settings(cells) if (one, other) == (task, epsilon)]
        for place, method in enumerate(("DPTD", *RIVALS)):
            found = [reported(cells, task, rows, method, epsilon) for rows in sizes]
            axes.plot(sizes, [np.median(each) for each in found], "o-", color=COLOURS[place], label=method)
            for rows, each in zip(sizes, found, strict=True):
                axes.plot([rows] * len(each), each, ".", color=COLOURS[place], alpha=0.3, markersize=2)
        constant = next(each["constant_error"] for each in cells if each["task"] == task)
        axes.axhline(constant, color="#000000", linestyle=":", linewidth=0.8, label="best constant")
        axes.set(xscale="log", xlabel="n", ylim=(0.0, 25.0), title=f"{TASKS[task].title}, ε = {epsilon:g}")
        axes.set_xticks(sizes, [str(rows) for rows in sizes])
        axes.minorticks_off()
    panels[0].set_ylabel("root mean square value error")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    return figure
