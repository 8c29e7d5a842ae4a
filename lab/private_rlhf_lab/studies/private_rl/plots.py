"""The figures of the study private_rl. Regret curves read the true rewards: diagnostics, no releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from private_rlhf.core.stats import standard_error
from private_rlhf.validation.lab import COLOURS, band, new_figure

from private_rlhf_lab.studies.private_rl import covers, design, honest, outcome, rates, reports
from private_rlhf_lab.studies.private_rl.plateaus import EPISODES, EXPONENTS, PRIVATE, Cell, TableOne

EPISODE_TICKS = (20, 50, 100, 200, 500)


def figure_one(table: TableOne, cells: honest.Cells, reported: reports.Cells) -> Figure:
    """PRL Figure 1 with an honest total ε: mean cumulative expected regret, 95 % bands of the mean, two instances."""
    figure, axes = new_figure(2, (9.6, 3.6))
    for each, world in zip(axes, outcome.PUBLISHED, strict=True):
        _curve(each, table.non_private[world, 0], "non-private, no batch", 5, "-")
        _curve(each, table.non_private[world, 1], "non-private, B = 5", 4, "-")
        for epsilon, line in ((honest.LARGE, "-"), (honest.SMALL, "--")):
            for place, arm in enumerate((honest.PAPERS, honest.GROWING, honest.FORGETFUL)):
                _curve(each, cells[world, arm, epsilon], f"{arm}, ε = {epsilon:g}", place, line)
            _curve(each, reported[world, epsilon], f"randomised reports, ε = {epsilon:g}", 3, line)
        each.set(title=world, xlabel="episode", ylabel="cumulative regret (simulated)")
    axes[1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _curve(axes: Axes, made: Cell, label: str, place: int, line: str) -> None:
    runs = made.cumulative.T
    style = {"color": COLOURS[place], "linewidth": 1.1, "label": label}
    band(axes, np.arange(1, len(runs) + 1), runs.mean(axis=1), 1.96 * standard_error(runs), line, **style)


def temperature(table: TableOne) -> Figure:
    """Plateau against the exponent of the softmax at B = 5, and where Table 1's private cells lie."""
    figure, axes = new_figure(2)
    for each, world in zip(axes, outcome.PUBLISHED, strict=True):
        cells = [table.swept[world, x] for x in EXPONENTS]
        middle = np.array([made.plateau for made in cells])
        spread = np.array([(made.estimate.ci_low, made.estimate.ci_high) for made in cells]).T
        each.errorbar(
            EXPONENTS, middle, [middle - spread[0], spread[1] - middle], fmt="o-", linewidth=0.9
        )
        for place, (epsilon, column) in enumerate(PRIVATE.items(), start=1):
            published = outcome.PUBLISHED[world][column]
            label = f"published, ε = {epsilon:g}: {published}"
            each.axhline(published, color=COLOURS[place], linewidth=0.9, linestyle="--", label=label)
        each.set(xscale="log", yscale="log", xlabel="exponent of the softmax", ylabel="plateau episode")
        each.set_yticks(EPISODE_TICKS, [str(tick) for tick in EPISODE_TICKS])
        each.minorticks_off()
        each.set_title(f"{world}, B = 5, K = {EPISODES}")
        each.legend()
    return figure


def growth(grown: Sequence[rates.Growth]) -> Figure:
    """Regret of Algorithm 1 against K, four arms, with K^{1/2} and K^{3/5} as guides."""
    figure, (axes,) = new_figure(1, (5.4, 3.6))
    for each in grown:
        error = 1.96 * standard_error(each.regret)
        axes.errorbar(each.episodes, each.regret.mean(axis=1), error, fmt="o-", linewidth=0.9, label=each.arm)
    ends = np.array([grown[-1].episodes[0], grown[-1].episodes[-1]], dtype=float)
    for power, label in ((0.5, "K^(1/2)"), (0.6, "K^(3/5)")):
        axes.plot(ends, 3.0 * (ends / ends[0]) ** power, ":", color="black", linewidth=0.8 + 4 * (power - 0.5))
        axes.annotate(label, (ends[1], 3.0 * (ends[1] / ends[0]) ** power), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="episodes K", ylabel="regret")
    axes.legend(fontsize=6)
    return figure


def cover(found: covers.Covers) -> Figure:
    """Regret against the number of parameter values a stage, at the smallest and the largest K."""
    figure, axes = new_figure(2)
    for each, place in zip(axes, (0, -1), strict=True):
        for label, arms in (("joint DP, ε = 8", found.private), ("non-private", found.plain)):
            mean = [arm.regret[place].mean() for arm in arms.values()]
            error = [1.96 * standard_error(arm.regret[place]) for arm in arms.values()]
            each.errorbar(list(arms), mean, error, fmt="o-", linewidth=0.9, label=label)
        each.set(xscale="log", yscale="log", xlabel="parameter values a stage, N = 1/(2β)", ylabel="regret")
        each.set_xticks(list(found.private), [str(members) for members in found.private])
        each.minorticks_off()
        each.set_title(f"K = {found.matched.episodes[place]}")
        each.legend()
    return figure


def matrices(found: Mapping[str, design.Switches]) -> Figure:
    """The norm ratio that Eq. 20 of Ngo et al. bounds by 2, episode by episode."""
    figure, (axes,) = new_figure(1)
    for label, each in found.items():
        shown = each.ratios[each.ratios.max(axis=1).argmax()]  # the run that goes furthest
        axes.plot(np.arange(1, len(shown) + 1), shown, linewidth=0.7, label=label)
    axes.axhline(2.0, color=COLOURS[5], linewidth=0.8, linestyle="--")
    axes.set(xlabel="episode", ylabel="largest ratio of squared norms")
    axes.set_title("Since the last switch: claimed at most 2")
    axes.legend()
    return figure
