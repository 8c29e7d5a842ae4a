"""What `sweep` found, as a table and a drawing: value errors of the chosen settings against n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.accounting.dptd import joint_sensitivity
from pipeline.core.stats import Estimate
from pipeline.validation.dptd.environments import TASKS
from pipeline.validation.dptd.network import dimension
from pipeline.validation.dptd.outcomes import paired
from pipeline.validation.dptd.sweep import FULL_STEPS, STEPS
from pipeline.validation.panels import COLOURS, new_figure

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


def gain(cells: Sequence[dict[str, Any]], task: str, rows: int, epsilon: float, rival: str) -> Estimate:
    """Paired difference in mean squared value error, DPTD − rival: of the MSVE, as the returns' noise cancels."""
    own, other = (reported(cells, task, rows, method, epsilon) for method in ("DPTD", rival))
    return paired(own**2 - other**2)


def signal_to_noise(cell: dict[str, Any]) -> float:
    """At most what all steps' gradients (each of norm ≤ G, all in one direction) add up to, over the norm of all their
    noise: √T/(2√2·m·√d) for one record a step at noise multiplier m, √T·n/(2√2·m·√d) for all n.
    """
    steps, shrink = {"DPTD": (STEPS, 1), "DPGLD": (FULL_STEPS, cell["rows"])}[cell["method"]]
    size = dimension(TASKS[cell["task"]].size)
    return float(math.sqrt(steps / size) * shrink / (joint_sensitivity(1.0) * cell["noise"]))


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: median root mean square value errors; − where DPTD is better than the rival (95 %), + where worse; and
    `signal_to_noise` of DPTD and DPGLD.
    """
    head = "| task | n | ε | G | κG | DPTD | " + " | ".join(RIVALS) + " | constant | signal/noise: DPTD, DPGLD |"
    lines = [head, "|---" * (len(RIVALS) + 8) + "|"]
    for task, rows, epsilon in settings(cells):
        (best,) = (each for each in cells if each["method"] == "DPTD" and each["errors"]
                   and (each["task"], each["rows"], each["epsilon"]) == (task, rows, epsilon))  # fmt: skip
        shown = [f"{np.median(best['errors']):.2f}"]
        for rival in RIVALS:
            found = gain(cells, task, rows, epsilon, rival)
            sign = "−" if found.ci_high < 0.0 else "+" if found.ci_low > 0.0 else "±"
            shown.append(f"{np.median(reported(cells, task, rows, rival, epsilon)):.2f} {sign}")
        row = [TASKS[task].title, str(rows), f"{epsilon:g}", f"{best['clip']:g}", f"{best['gain']:g}"]
        full = next(each for each in cells if (each["task"], each["rows"], each["epsilon"], each["method"])
                     == (task, rows, epsilon, "DPGLD"))  # fmt: skip
        ratios = f"{signal_to_noise(best):.1f}, {signal_to_noise(full):.1f}"
        lines.append("| " + " | ".join([*row, *shown, f"{best['constant_error']:.2f}", ratios]) + " |")
    return "\n".join(lines)


def draw(cells: Sequence[dict[str, Any]]) -> Figure:
    """A panel per task and ε: runs as points, medians as lines, against n."""
    kinds = list(dict.fromkeys((task, epsilon) for task, _, epsilon in settings(cells)))
    figure, panels = new_figure(len(kinds), (2.6 * len(kinds), 2.8))
    for axes, (task, epsilon) in zip(panels, kinds, strict=True):
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
