"""The figures of the study online."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import standard_error
from private_rlhf.validation import growth
from private_rlhf.validation.bandits import factor
from private_rlhf.validation.lab import COLOURS, band, new_figure
from private_rlhf.validation.regret import EPSILONS, NONE, OPTIMISM

from private_rlhf_lab.studies.online.study import (
    ARMS,
    LIKELIHOOD,
    MIXTURE,
    MLE,
    REFERENCE,
    Study,
)


def regret(found: Study) -> Figure:
    """Regret of π² against T, a panel an ε, private least squares; dashed: private MLE; band: 95 % over worlds."""
    figure, axes = new_figure(len(EPSILONS))
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        place = 0
        for arm in ARMS:
            trace = found.traces[arm.name, epsilon]
            if arm.estimator == LIKELIHOOD:
                continue
            if arm.name != REFERENCE:
                half = 1.96 * standard_error(trace.regret)
                band(axis, trace.rounds, trace.regret.mean(axis=1), half, color=COLOURS[place], label=arm.name)
            place += 1
        for name, colour in ((OPTIMISM, COLOURS[0]), (NONE, COLOURS[2]), (MIXTURE, COLOURS[4])):
            trace = found.traces[f"{name} (MLE)", epsilon]
            axis.plot(trace.rounds, trace.regret.mean(axis=1), "--", linewidth=0.8, color=colour)
        axis.set(xscale="log", xlabel="rounds T", title=f"regret of π², ε = {epsilon:g}", xlim=(100, None))
    axes[0].legend(fontsize=6)
    return figure


def fits(found: Study) -> Figure:
    """The two laws fitted to optimism's regret over the last two decades; the realised Σ min(1, U²)."""
    figure, axes = new_figure(2)
    for place, epsilon in enumerate(EPSILONS):
        trace = found.traces[OPTIMISM, epsilon]
        chosen = growth.late(trace.rounds)
        at, mean = trace.rounds[chosen].astype(float), trace.regret[chosen].mean(axis=1)
        axes[0].plot(at, mean, color=COLOURS[place], linewidth=2.0, alpha=0.5, label=f"ε = {epsilon:g}")
        for basis, style in ((np.log(at), "-"), (np.sqrt(at), ":")):
            axes[0].plot(at, np.polyval(np.polyfit(basis, mean, 1), basis), style, color="black", linewidth=0.7)
        axes[1].plot(trace.rounds, trace.eluder.mean(axis=1), color=COLOURS[place], label=f"ε = {epsilon:g}")
    axes[0].set(xscale="log", xlabel="rounds T", title="regret of π² with a + b log T (dotted: a + b √T)")
    axes[1].set(xscale="log", xlabel="rounds T", title="realised Σ min(1, U²)")
    for axis in axes:
        axis.legend()
    return figure


def final(found: Study) -> Figure:
    """Regret at the horizon times (2α−1)² against ε for every arm, π² and π¹; squares: private MLE; bars: 95 % over
    worlds.
    """
    figure, panels = new_figure(2, (9.6, 3.4))
    places = np.arange(len(EPSILONS))
    scale = np.array([factor(epsilon) ** 2 for epsilon in EPSILONS])
    names = list(dict.fromkeys(arm.name.removesuffix(MLE) for arm in ARMS))
    for axes, policy in zip(panels, ("π², which explores", "π¹, which one would deploy"), strict=True):
        for place, arm in enumerate(ARMS):
            exploring = axes is panels[0]
            if exploring and arm.name == REFERENCE:
                continue  # its π² never learns
            traces = [found.traces[arm.name, epsilon] for epsilon in EPSILONS]
            values = np.stack([(trace.regret if exploring else trace.regret_exploiting)[-1] for trace in traces])
            half = 1.96 * standard_error(values)
            axes.errorbar(
                places + 0.07 * (place - len(ARMS) / 2), scale * values.mean(axis=1), scale * half,
                fmt="s" if arm.estimator == LIKELIHOOD else "o", markersize=4, linewidth=1.0,
                color=COLOURS[names.index(arm.name.removesuffix(MLE))], label=arm.name,
            )  # fmt: skip
        axes.set(xlabel="ε", yscale="log", title=policy)
        axes.set_xticks(places, [f"{epsilon:g}" for epsilon in EPSILONS])
    panels[0].set_ylabel("regret at the horizon · (2α−1)²")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right upper")
    return figure
