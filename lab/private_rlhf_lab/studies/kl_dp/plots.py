"""The figures of the study kl_dp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from private_rlhf.validation.kl_dp import proposition as proposition
from private_rlhf.validation.lab import COLOURS, new_figure

from private_rlhf_lab.accounting.draws import bandit_approximate, bandit_epsilon, rlhf_epsilon
from private_rlhf_lab.studies.kl_dp import bandit, equal_utility, rlhf
from private_rlhf_lab.studies.kl_dp.search import Search

POINTS = (8, 30, 100, 300, 1000, 3000)
RADIUS = 1.0
Row = Mapping[str, object]
Curve = Mapping[Any, float]


def parameters() -> tuple[Figure, list[Row]]:
    """ε against coverage, kl_coef and pessimism: bounds as lines, exact losses of the extremal pairs as points."""
    figure, axes = new_figure(4)
    rows: list[Row] = []
    _coverage(axes[0], rows)
    _strength(axes[1], rows)
    _pessimism(axes[2], rows)
    _tail(axes[3], rows)
    for each in axes[:3]:
        each.set(xscale="log", yscale="log", ylabel="ε of one draw")
        each.legend()
    return figure, rows


def _curve(axes: Axes, rows: list[Row], label: str, place: int, x: str, found: Curve, kind: str = "bound") -> None:
    line, name = ("-", f"{label}, bound") if kind == "bound" else ("o", kind)
    axes.plot(list(found), list(found.values()), line, color=COLOURS[place], markersize=4, label=name)
    rows += [{"curve": label, "kind": kind, "x": x, "value": each, "epsilon": found[each]} for each in found]


def _points(axes: Axes, rows: list[Row], label: str, place: int, x: str, found: Curve) -> None:
    _curve(axes, rows, label, place, x, found, "measured")


def _coverage(axes: Axes, rows: list[Row]) -> None:
    name = "records per arm; pairs"
    _curve(axes, rows, "bandit", 0, name, {n: bandit_epsilon(1.0, 1.0, 1.0, n) for n in POINTS})
    _points(axes, rows, "bandit", 0, name, {n: bandit.worst_loss(1.0, 1.0, n) for n in POINTS})
    for place, notion in enumerate(("label", "add-remove"), start=1):
        bound = {n: rlhf_epsilon(1.0, 1.0 + 4.0 * n, RADIUS, notion) for n in POINTS}
        _curve(axes, rows, f"RLHF {notion}", place, name, bound)
        measured = {n: rlhf.extremal_loss(RADIUS, n, 1.0, notion) for n in POINTS}
        _points(axes, rows, f"RLHF {notion}", place, name, measured)
    axes.set(xlabel=name, title="coverage (kl_coef 1)")


def _strength(axes: Axes, rows: list[Row]) -> None:
    etas = [float(eta) for eta in np.geomspace(0.05, 5.0, 7)]
    _curve(axes, rows, "bandit, 100 records", 0, "kl_coef", {e: bandit_epsilon(e, 1.0, 1.0, 100) for e in etas})
    _points(axes, rows, "bandit, 100 records", 0, "kl_coef", {e: bandit.worst_loss(e, 1.0, 100) for e in etas})
    bound = {e: rlhf_epsilon(e, 4001.0, RADIUS, "label") for e in etas}
    _curve(axes, rows, "RLHF label, 1000 pairs", 1, "kl_coef", bound)
    measured = {e: rlhf.extremal_loss(RADIUS, 1000, e, "label") for e in etas}
    _points(axes, rows, "RLHF label, 1000 pairs", 1, "kl_coef", measured)
    axes.set(xlabel="kl_coef η", title="KL strength")


def _pessimism(axes: Axes, rows: list[Row]) -> None:
    levels = [float(level) for level in np.geomspace(0.1, 100.0, 7)]
    name = "pessimism"
    _curve(axes, rows, "bandit, 10 records", 0, name, {b: bandit_epsilon(1.0, b, 1.0, 10) for b in levels})
    _points(axes, rows, "bandit, 10 records", 0, name, {b: bandit.worst_loss(1.0, b, 10) for b in levels})
    for place, notion in enumerate(("label", "add-remove"), start=1):
        bound = {b: rlhf_epsilon(1.0, 101.0, RADIUS, notion, pessimism=b) for b in levels}
        _curve(axes, rows, f"RLHF {notion}, 25 pairs", place, name, bound)
    axes.set(xlabel="pessimism β", title="pessimism: ε")


def _tail(axes: Axes, rows: list[Row]) -> None:
    levels = np.linspace(5.0, 60.0, 23)
    for place, ratio in enumerate((0.025, 0.05, 0.1)):
        found = [bandit_approximate(0.3, float(level), 1.0, 400, ratio, 0.1) for level in levels]
        axes.plot(levels, [each.delta for each in found], color=COLOURS[place], label=f"c = {ratio:g}")
        label = f"bandit delta, c = {ratio:g}"
        rows += [
            {"curve": label, "kind": "delta", "x": "pessimism", "value": float(level), "epsilon": each.epsilon}
            | {"delta": each.delta}
            for level, each in zip(levels, found, strict=True)
        ]
    axes.set(yscale="log", ylabel="δ (1 = vacuous)", xlabel="pessimism β", title="pessimism: δ, any coverage")
    axes.set_ylim(1e-12, 2.0)
    axes.legend(title="η 0.3, R 1, N 400, p 0.1", title_fontsize=7)


def tightness(searches: Sequence[Search]) -> Figure:
    """Largest and median measured/bound of every statement that no pair violates."""
    kept = [each for each in searches if each.verdict().verdict == "holds"]
    figure, (axes,) = new_figure(1, (8.0, 0.6 + 0.27 * len(kept)))
    places = np.arange(len(kept))
    axes.barh(places, [each.ratios.max() for each in kept], color=COLOURS[0], alpha=0.35, label="largest")
    axes.plot([np.median(each.ratios) for each in kept], places, "|", color=COLOURS[1], markersize=9, label="median")
    axes.axvline(1.0, color=COLOURS[5], linewidth=0.8)
    axes.set_yticks(places, [each.claim for each in kept], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="measured / bound (1 = attained)", xlim=(0.0, 1.08))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return figure


def utility(curves: equal_utility.Curves) -> Figure:
    """ε against the share of the gain: KL draws (trusted curator) and randomised response (no trust)."""
    figure, (axes,) = new_figure(1, (6.4, 3.6))
    for place, draws in enumerate(equal_utility.DRAWS):
        cost = equal_utility.kl_cost(curves, draws)
        label = f"KL, {draws} draw{'s' * (draws > 1)}"
        axes.plot(curves.kl_share.mean(axis=0), cost, "o-", color=COLOURS[place], label=label)
    exact = curves.kl_loss.max(axis=0)
    axes.plot(curves.kl_share.mean(axis=0), exact, ":", color=COLOURS[0], label="KL, 1 draw, largest exact loss")
    mean = curves.rr_share.mean(axis=0)
    axes.plot(mean, equal_utility.EPSILONS, "s-", color="black", label="randomised response, any use")
    axes.axvline(equal_utility.TARGET, color=COLOURS[5], linewidth=0.8, dashes=(4, 2))
    axes.set(
        yscale="log", xlabel="share of the gain over π0", ylabel=f"ε of one label (KL: δ = {equal_utility.DELTA:g})"
    )
    axes.set_title(
        "KL: a trusted curator releases the draws alone. Randomised response: no trust, all released", fontsize=8
    )
    axes.legend()
    return figure
