"""The figures of the study offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from private_rlhf.core.stats import standard_error
from private_rlhf.validation import offline as rates
from private_rlhf.validation.bandits import Array
from private_rlhf.validation.lab import COLOURS, new_figure

from private_rlhf_lab.studies.offline import hard
from private_rlhf_lab.studies.offline.finite import NETS, Nets, Whole
from private_rlhf_lab.studies.offline.pessimism import KAPPAS, Outcome


def losses(found: rates.Arms) -> Figure:
    """SubOpt against n for every loss, a panel an ε; dotted: where it stops; grey: π_ref."""
    epsilons = sorted({epsilon for _, epsilon in found.subopt})
    figure, axes = new_figure(len(epsilons))
    for axis, epsilon in zip(axes, epsilons, strict=True):
        for place, arm in enumerate(rates.ARMS):
            values = found.subopt[arm, epsilon].mean(axis=1)
            axis.plot(found.comparisons, values, "o-", color=COLOURS[place], label=arm)
            if found.limit[arm, epsilon] > 1e-6:
                axis.axhline(found.limit[arm, epsilon], linestyle=":", linewidth=0.8, color=COLOURS[place])
        axis.axhline(found.ref, color=COLOURS[5], linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="comparisons n", title=f"SubOpt, ε = {epsilon:g}")
    axes[0].legend()
    return figure


def finite(whole: Sequence[Whole], found: Nets) -> Figure:
    """Algorithm 1 on a finite class with its bound; nets of a one-parameter class."""
    figure, axes = new_figure(2)
    for place, one in enumerate(whole):
        label = f"ε = {one.epsilon:g}"
        axes[0].plot(one.comparisons, one.subopt.mean(axis=1), "o-", color=COLOURS[place], label=label)
        axes[0].plot(one.comparisons, one.plain.mean(axis=1), "--", linewidth=0.8, color=COLOURS[place])
        axes[0].plot(one.comparisons, one.promised.mean(axis=1), ":", linewidth=0.8, color=COLOURS[place])
    axes[0].set(xscale="log", yscale="log", xlabel="comparisons n", title="Algorithm 1 (dashed: Γ = 0; dotted: bound)")
    for place, (tau, members) in enumerate(zip(NETS, found.cover, strict=True)):
        label = f"τ = {tau:g}: {members:g} members"
        axes[1].plot(found.sizes, found.fixed[place].mean(axis=1), "o-", color=COLOURS[place], label=label)
        axes[1].axhline(found.limit[place].mean(), linestyle=":", linewidth=0.8, color=COLOURS[place])
    axes[1].plot(found.sizes, found.growing.mean(axis=1), "s--", color=COLOURS[4], label="τ = 1/√n'")
    axes[1].plot(found.sizes, found.exact.mean(axis=1), color=COLOURS[5], label="whole class")
    axes[1].set(xscale="log", yscale="log", xlabel="n' = (2α−1)² n", title="SubOpt of the MLE on τ-nets")
    for axis in axes:
        axis.legend()
    return figure


def pessimism(outcomes: Sequence[Outcome]) -> Figure:
    """SubOpt relative to no pessimism against κ; Eq. 10 with c = 1 as a cross at the right."""
    figure, (axes,) = new_figure(1, (7.0, 3.4))
    for place, one in enumerate(outcomes):
        base = one.subopt["kappa 0"].mean()
        colour, style = COLOURS[place % len(COLOURS)], "-" if place < len(COLOURS) else "--"
        values = [one.subopt[f"kappa {kappa:g}"].mean() / base for kappa in KAPPAS]
        axes.plot(KAPPAS, values, marker="o", color=colour, linestyle=style, label=one.case.name)
        axes.plot(4.6, one.subopt["Eq. 10, c = 1"].mean() / base, "x", markersize=6, color=colour)
    axes.axhline(1.0, color=COLOURS[5], linewidth=0.8)
    axes.set(yscale="log", xlabel="κ (cross: Eq. 10 with c = 1)", title="SubOpt with / without pessimism")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def lower_bound(bound: Sequence[hard.Risks], rate_risks: Sequence[hard.Risks], risks: Sequence[hard.Risks]) -> Figure:
    """Eq. 12 under the policies' SubOpt against n; what happens as ε grows; what C* costs. C = 4 in the first two.
    Bars: 95 % over repetitions.
    """
    figure, axes = new_figure(3, (12.2, 3.2))
    for marker, line, epsilon in (("o", "-", 0.5), ("s", ":", 2.0)):
        chosen = [one for one in bound if one.setting.coverage == 4.0 and one.setting.epsilon == epsilon]
        n = [one.setting.comparisons for one in chosen]
        axes[0].plot(n, [one.setting.lower_bound for one in chosen], line, color="black")
        for policy in (hard.POLICIES[0], hard.POLICIES[2]):
            _bars(axes[0], n, [one.mean(policy) for one in chosen], policy, marker + line)
    axes[0].set(xscale="log", yscale="log", xlabel="comparisons n",
                title="SubOpt at the theorem's distance: ε = 0.5 (dotted: 2)")  # fmt: skip
    size = [one for one in rate_risks if one.setting.coverage == 4.0]
    epsilons = sorted({one.setting.epsilon for one in size})
    for policy in hard.POLICIES:
        units = [np.stack([one.mean(policy) / one.setting.unit for one in size if one.setting.epsilon == epsilon])
                 for epsilon in epsilons]  # fmt: skip
        _bars(axes[1], epsilons, [each.mean(axis=0) for each in units], policy, "o-")
    ratio = {one.setting.epsilon: one.setting.lower_bound / one.setting.unit for one in size}
    axes[1].plot(epsilons, [ratio[epsilon] for epsilon in epsilons], "-", color="black", label="Eq. 12")
    axes[1].set(xscale="log", yscale="log", xlabel="ε", title="SubOpt · (2α−1)² n / (βCS), hardest distance")
    coverage = [one.setting.coverage for one in risks]
    for policy in hard.POLICIES[:3]:
        _bars(axes[2], coverage, [one.mean(policy) for one in risks], policy, "o-")
    axes[2].set(xscale="log", yscale="log", xlabel="C*", title="SubOpt against C*")
    axes[2].minorticks_off()
    axes[2].set_xticks(coverage, [f"{each:g}" for each in coverage])
    axes[2].set_yticks([1e-4, 1e-3])
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _bars(axes: Axes, x: Sequence[float], samples: Sequence[Array], policy: str, style: str) -> None:
    """Means over repetitions, each (R,), with 95 % bars, in the colour of the policy."""
    half = [1.96 * standard_error(each) for each in samples]
    colour = COLOURS[hard.POLICIES.index(policy)]
    axes.errorbar(x, [each.mean() for each in samples], half, fmt=style, linewidth=1.0, color=colour, label=policy)


def efficiency(found: Mapping[float, Array]) -> Figure:
    """Variance over the Cramér–Rao bound per coordinate of the whitened error, with the 5 % band."""
    figure, (axes,) = new_figure(1)
    axes.axhspan(0.95, 1.05, color=COLOURS[5], alpha=0.15, linewidth=0)
    for place, (epsilon, whitened) in enumerate(found.items()):
        ratio = whitened.var(axis=0, ddof=1)
        axes.plot(np.full(len(ratio), place), ratio, "o", alpha=0.6, color=COLOURS[0])
        axes.plot(place, ratio.mean(), "_", markersize=16, color=COLOURS[1])
        axes.annotate(f"{epsilon:g}", (place, 0.87), fontsize=8, ha="center")
    axes.set(ylim=(0.85, 1.15), xticks=[], xlabel="ε", title="variance / Cramér–Rao bound")
    return figure
