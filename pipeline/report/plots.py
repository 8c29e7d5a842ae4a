"""The pictures of the report. Each function takes plain numbers and returns an inline `<svg>`, or None without data."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from private_rlhf.core.noise import clipped
from private_rlhf.report.run_facts import GIBBS as GIBBS_METHOD
from private_rlhf.report.run_facts import REFERENCE as REFERENCE_METHOD
from private_rlhf.report.sections import drawable, duration, known, label_of, number, percent, significant, usable

History = Sequence[dict[str, Any]]
Series = tuple[str, str, str]
"""Key in a history object, label in the picture, colour."""

PANEL_HEIGHT = 2.5
_PI_REF = r"π$_\mathrm{ref}$"


def colour_of(method: str) -> str:
    """The colour that stands for a method in every picture."""
    return {REFERENCE_METHOD: REFERENCE, GIBBS_METHOD: GIBBS}.get(method, POLICY)


def win_rates(name: str, rows: Sequence[tuple[str, str, Any]], baseline: dict[str, Any] | None = None) -> Markup | None:
    """Horizontal bars of win rates with 95 % intervals.

    name: unique on the page. rows: (method, label, {"value", "ci_low", "ci_high", "n"}), from top to bottom. baseline:
    the longer-answer rule on the same pairs; a dashed line. All as the table shows them, within [0, 1].
    """
    rows = [(method, label, clipped(estimate)) for method, label, estimate in rows if drawable(estimate)]
    rule = clipped(baseline) if drawable(baseline) else None
    if not rows:
        return None

    def paint(axes: Axes) -> None:
        for place, (method, _, estimate) in enumerate(rows):
            value, low, high = (estimate[name] for name in ("value", "ci_low", "ci_high"))
            axes.barh(place, value, height=0.56, color=colour_of(method), alpha=0.85, linewidth=0)
            axes.plot([low, high], [place, place], color=INK, linewidth=1.3, solid_capstyle="butt")
            axes.plot([low, high], [place, place], "|", color=INK, markersize=6, markeredgewidth=1.3)
            _note(axes, percent(value), (high, place), va="center", fontsize=8.5, bbox=_plate(1))
        axes.axvline(0.5, color=MUTED, linewidth=1)
        if rule:
            axes.axvline(rule["value"], color=OTHER, linewidth=1.2, dashes=(4, 2))
            text, style = f"longer answer {percent(rule['value'])}", {"va": "center", "color": OTHER}
            _note(axes, text, (rule["value"], -0.62), (3, 0), fontsize=7.5, bbox=_plate(0.5), **style)
        axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.95 if rule else -0.5))
        labels = [label.replace("π_ref", _PI_REF) for _, label, _ in rows]
        axes.set_yticks(range(len(rows)), labels, color=INK, fontsize=8)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)

    summary = "; ".join(f"{label} {percent(estimate['value'])}" for _, label, estimate in rows)
    if rule:
        summary += f"; longer answer: {percent(rule['value'])}"
    return draw(name, f"Win rates: {summary}", 0.55 + 0.34 * len(rows) + (0.16 if rule else 0), paint)


def curves(
    name: str, history: History, series: Sequence[Series], unit: str, across: str = "iteration"
) -> Markup | None:
    """Lines over iterations, or what `across` names: raw values pale, a centred moving average on top when many."""
    drawn = [(_column(history, key, across), label, colour) for key, label, colour in series]
    drawn = [(points, label, colour) for points, label, colour in drawn if len(points)]
    if not drawn:
        return None

    def paint(axes: Axes) -> None:
        for points, label, colour in drawn:
            _smooth_line(axes, points, label, colour)
        _iterations(axes, unit, across)
        if len(drawn) > 1:
            axes.legend(loc="best", handlelength=1.4)

    summary = "; ".join(f"{label} from {number(points[0, 1])} to {number(points[-1, 1])}" for points, label, _ in drawn)
    return draw(name, f"By {across}: {summary}", PANEL_HEIGHT, paint)


def kl_curve(name: str, history: History) -> Markup | None:
    """KL(π‖π_ref) per response over iterations; its coefficient on a second axis when it moves."""
    points, coefficients = _column(history, "kl"), _column(history, "kl_coef")
    if not len(points):
        return None
    moves = len(coefficients) > 1 and float(np.ptp(coefficients[:, 1])) > 1e-12

    def paint(axes: Axes) -> None:
        _smooth_line(axes, points, "KL", POLICY)
        _iterations(axes, "KL, nats per response")
        if not moves:
            return
        beside = axes.twinx()
        beside.plot(*coefficients.T, color=OTHER, linewidth=1.2, drawstyle="steps-post", label="kl_coef")
        beside.grid(visible=False)
        beside.spines["left"].set_visible(False)
        beside.set_ylim(0, 1.15 * float(coefficients[:, 1].max()))
        beside.set_ylabel("kl_coef", color=OTHER)
        beside.tick_params(axis="y", labelcolor=OTHER)
        axes.set_ylim(bottom=min(0.0, float(points[:, 1].min())))
        both = zip(axes.get_legend_handles_labels(), beside.get_legend_handles_labels(), strict=True)
        axes.legend(*[mine + other for mine, other in both], loc="lower right", handlelength=1.4)

    summary = f"KL from {number(points[0, 1])} to {number(points[-1, 1])} nats per response"
    return draw(name, summary, PANEL_HEIGHT, paint)


def frontier(
    name: str, history: History, methods: dict[str, dict[str, Any]], gibbs: Sequence[dict[str, Any]], reward_key: str
) -> Markup | None:
    """Reward against KL: PPO iterations (paler = earlier), final policies with intervals, Gibbs as a line, π_ref at 0.

    methods: of the evaluation. gibbs: {"kl_coef", "kl", reward_key} for several kl_coef. reward_key: "true_reward" or
    "reward".
    """

    def measured(row: dict[str, Any]) -> bool:
        return known(row.get("kl")) and known(row.get(reward_key))

    path = np.array([(row["kl"], row[reward_key]) for row in history if measured(row)])
    ends = {key: m for key, m in methods.items() if measured(m | {"kl": 0.0} if key == REFERENCE_METHOD else m)}
    line = sorted((point["kl"], point[reward_key], point.get("kl_coef")) for point in gibbs if measured(point))
    if not ends and not len(path):
        return None

    def paint(axes: Axes) -> None:
        if line:
            places = [(result.get("kl") or 0.0, result[reward_key]) for result in ends.values()]
            seen = np.array([*path.reshape(-1, 2).tolist(), *[point[:2] for point in line], *places])
            _gibbs_line(axes, line, *np.maximum(np.ptp(seen, axis=0), 1e-9).tolist())
        if len(path):
            fade = to_rgba_array([POLICY] * len(path), np.linspace(0.12, 0.7, len(path)))
            axes.scatter(path[:, 0], path[:, 1], s=11, color=fade, linewidths=0, zorder=3)
        for method, result in ends.items():
            if method != GIBBS_METHOD or not line:
                _final_point(axes, method, result, reward_key)
        ylabel = "true reward" if reward_key == "true_reward" else "estimated reward r̄"
        axes.set(xlabel=f"KL(π‖{_PI_REF}), nats per response", ylabel=ylabel)
        axes.margins(0.1, 0.12)

    summary = [f"{key} at KL {number(m.get('kl') or 0.0)}, reward {number(m[reward_key])}" for key, m in ends.items()]
    return draw(name, f"Reward against KL: {'; '.join(summary)}", 3.2, paint)


def calibration(name: str, rows: Sequence[dict[str, Any]]) -> Markup | None:
    """Observed against predicted preference shares, from {"predicted", "observed", "ci_low", "ci_high", "n"}."""
    rows = [row for row in rows if known(row.get("predicted")) and known(row.get("observed"))]
    if not rows:
        return None

    def paint(axes: Axes) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=1, dashes=(4, 2))
        for row in rows:
            _dot(axes, row["predicted"], row["observed"], row, POLICY)
        axes.set(xlabel="predicted share of right preferences", ylabel="observed share, debiased")

    return draw(name, "Calibration of the reward model", PANEL_HEIGHT, paint)


def coverage(name: str, rows: Sequence[dict[str, Any]]) -> Markup | None:
    """Share of draws whose truth lies within κΓ of the estimate, against κ; rows: of `evaluation`'s `coverage`."""
    if not rows:
        return None
    kappa, share, low, high, nominal = (
        [row[key] for row in rows] for key in ("kappa", "coverage", "ci_low", "ci_high", "nominal")
    )

    def paint(axes: Axes) -> None:
        axes.plot(kappa, nominal, color=MUTED, linewidth=1, dashes=(4, 2))
        axes.fill_between(kappa, low, high, color=POLICY, alpha=0.15, linewidth=0)
        axes.plot(kappa, share, "o-", color=POLICY, markersize=3.5)
        axes.set(ylim=(0, 1.02), xlabel="κ", ylabel="share within r̄ ± κΓ")

    return draw(name, "Coverage of the true reward by the uncertainty", PANEL_HEIGHT, paint)


def ridge_path(name: str, path: Sequence[Sequence[float | None]], chosen: Any) -> Markup | None:
    """Held-out private log-likelihood per pair against the ridge λ, and the λ in use; band: third column."""
    points = np.array([[*row[:2], (*row, None)[2] or 0.0] for row in path if known(row[0]) and known(row[1])])
    if len(points) < 2:
        return None

    def paint(axes: Axes) -> None:
        order = points[points[:, 0].argsort()]
        ridge, mean, half = order.T
        axes.fill_between(ridge, mean - half, mean + half, color=POLICY, alpha=0.15, linewidth=0)
        axes.plot(ridge, mean, "o-", color=POLICY, markersize=3.5)
        axes.set_xscale("log")
        if known(chosen):
            axes.axvline(chosen, color=OTHER, linewidth=1.2, dashes=(4, 2))
        axes.set(xlabel="ridge λ", ylabel="held-out log-likelihood per pair")

    return draw(name, "Held-out private log-likelihood against the ridge", PANEL_HEIGHT, paint)


def stage_times(name: str, seconds: dict[str, float], ppo_parts: dict[str, float]) -> Markup | None:
    """Wall time per stage; PPO's bar is split into `ppo_parts`, darkest first."""
    if not seconds:
        return None

    def paint(axes: Axes) -> None:
        for place, (stage, spent) in enumerate(seconds.items()):
            parts = list(ppo_parts.values()) if stage == "ppo" and 0 < sum(ppo_parts.values()) <= 1.02 * spent else []
            axes.barh(place, spent, height=0.56, color=POLICY, alpha=0.25 if parts else 0.85, linewidth=0)
            start = 0.0
            for part, alpha in zip(parts, (1.0, 0.7, 0.45), strict=False):
                style: Any = {"color": POLICY, "alpha": alpha, "linewidth": 0.8, "edgecolor": PAPER}
                axes.barh(place, part, left=start, height=0.56, **style)
                start += part
            _note(axes, duration(spent), (spent, place), va="center", fontsize=8)
        axes.set(xlim=(0, 1.25 * max(*seconds.values(), 1e-9)), ylim=(len(seconds) - 0.5, -0.5))
        axes.set_yticks(range(len(seconds)), list(seconds), color=INK, fontsize=8)
        axes.xaxis.set_visible(False)
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)

    summary = "; ".join(f"{stage} {duration(spent)}" for stage, spent in seconds.items())
    return draw(name, f"Wall time: {summary}", 0.3 + 0.32 * len(seconds), paint)


def utility_curve(name: str, rows: Sequence[dict[str, Any]]) -> Markup | None:
    """J gain (left) and win rate (right) of runs against ε, with their intervals and lines through the means.

    rows: {"epsilon", "J", "win rate"}; ε = ∞ stands at the right end. None for fewer than two ε, or without estimates.
    """
    finite = [row["epsilon"] for row in rows if known(row["epsilon"])]
    right = 4 * max(finite, default=1.0)
    placed = [(row["epsilon"] if known(row["epsilon"]) else right, row) for row in rows]
    ticks = sorted({place for place, _ in placed})
    if len(ticks) < 2 or not any(usable(row["J"]) or drawable(row["win rate"]) for row in rows):
        return None

    def paint(axes: Axes) -> None:
        axes.set(xscale="log", xlabel="ε of a label")
        axes.set_xticks(ticks, ["∞" if place not in finite else significant(place) for place in ticks])
        axes.minorticks_off()
        beside = axes.twinx()
        beside.grid(visible=False)
        gains = [(0.97 * place, row["J"]) for place, row in placed if usable(row["J"])]
        rates = [(1.03 * place, row["win rate"]) for place, row in placed if drawable(row["win rate"])]
        sides = ((axes, gains, POLICY, "J gain"), (beside, rates, GIBBS, f"win rate against {_PI_REF}"))
        for side, points, colour, label in sides:  # moved apart, so that neither hides the other
            for place, estimate in points:
                _dot(side, place, estimate["value"], estimate, colour)
            across = sorted({place for place, _ in points})
            means = [np.mean([estimate["value"] for place, estimate in points if place == each]) for each in across]
            side.plot(across, means, color=colour)
            side.set_ylabel(label, color=colour)
            side.tick_params(axis="y", labelcolor=colour)

    return draw(name, f"Utility by ε of {len(rows)} runs: J gain and win rate", 3.2, paint)


def retained_curve(name: str, levels: Sequence[float], retained: Sequence[np.ndarray]) -> Markup:
    """The share of the gain that simulated rewards retain, (R,) at each ε: median, in a band of 5 % to 95 %."""
    low, centre, high = np.quantile(np.array(retained), [0.05, 0.5, 0.95], axis=1)

    def paint(axes: Axes) -> None:
        axes.set(xscale="log", xlabel="ε of a label", ylabel="retained gain", ylim=(min(0.0, float(low.min())), 1.05))
        axes.set_xticks(list(levels), [significant(level) for level in levels])
        axes.minorticks_off()
        axes.fill_between(levels, low, high, color=POLICY, alpha=0.15, linewidth=0)
        axes.plot(levels, centre, color=POLICY, marker="o", markersize=3)

    return draw(name, f"Retained gain from {number(centre[0])} to {number(centre[-1])} by ε", 3.2, paint)


def svg_file(drawing: Markup) -> str:
    """A drawing as a file of its own, in the light colours of the page."""
    style = (Path(__file__).parent / "style.css.j2").read_text(encoding="utf-8").partition("@media")[0]
    paper = f'><style>{style}</style><rect width="100%" height="100%" style="fill: var(--paper)"/>'
    return str(drawing).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", paper, 1)


def _column(history: History, key: str, across: str = "iteration") -> np.ndarray:
    """(n, 2): iteration (or what `across` names) and value, where the value is known."""
    rows = [(row.get(across, place), row[key]) for place, row in enumerate(history) if known(row.get(key))]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _smooth_line(axes: Axes, points: np.ndarray, label: str, colour: str) -> None:
    window = len(points) // 12
    if window < 2:
        axes.plot(points[:, 0], points[:, 1], color=colour, label=label, marker="o", markersize=2.5)
        return
    axes.plot(points[:, 0], points[:, 1], color=colour, alpha=0.25, linewidth=0.8)
    average = [points[max(0, i - window) : i + window + 1, 1].mean() for i in range(len(points))]
    axes.plot(points[:, 0], average, color=colour, label=label)


def _iterations(axes: Axes, unit: str, label: str = "iteration") -> None:
    axes.set(xlabel=label, ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", visible=False)


def _gibbs_line(axes: Axes, line: Sequence[tuple[float, float, Any]], wide: float, high: float) -> None:
    """`line` in rising KL; coefficients stand where they do not crowd on axes `wide` by `high`, the last one always."""
    axes.plot([p[0] for p in line], [p[1] for p in line], "o-", color=GIBBS, markersize=3.5, zorder=2)
    labelled: tuple[float, float] | None = None
    for kl, reward, coefficient in reversed(line):
        if labelled and abs(kl - labelled[0]) / wide < 0.12 and abs(reward - labelled[1]) / high < 0.14:
            continue
        text = significant(coefficient) if labelled else f"Gibbs, kl_coef {significant(coefficient)}"
        shift = (-3, 5) if labelled else (2, 7)
        _note(axes, text, (kl, reward), shift, ha="right", fontsize=7, color=GIBBS)
        labelled = (kl, reward)


def _dot(axes: Axes, across: float, value: float, interval: dict[str, Any], colour: str) -> None:
    axes.plot([across] * 2, [interval["ci_low"], interval["ci_high"]], color=colour, alpha=0.6, linewidth=1.2)
    axes.plot(across, value, "o", color=colour, markersize=4)


def _final_point(axes: Axes, method: str, result: dict[str, Any], reward_key: str) -> None:
    kl, reward, colour = result.get("kl") or 0.0, result[reward_key], colour_of(method)
    across, up = result.get("kl_ci"), result.get(f"{reward_key}_ci")
    if across and method != REFERENCE_METHOD:
        axes.plot(across, [reward, reward], color=INK, linewidth=1.1, zorder=4)
    if up:
        axes.plot([kl, kl], up, color=INK, linewidth=1.1, zorder=4)
    marker, label = ("s", _PI_REF) if method == REFERENCE_METHOD else ("D", label_of(method, result))
    edge: Any = {"markeredgecolor": PAPER, "markeredgewidth": 0.8}
    axes.plot(kl, reward, marker, color=colour, markersize=6.5, zorder=5, **edge)
    _note(axes, label, (kl, reward), (7, -11), fontsize=8, color=INK, zorder=6)


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (5, 0), **style: Any) -> None:
    """A text beside a point; shift: in printer's points."""
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **style)


def _plate(pad: float) -> dict[str, Any]:
    return {"facecolor": PAPER, "edgecolor": "none", "pad": pad}


# Matplotlib draws in these stand-ins; `_themed` turns each into var(--NAME), which style.css.j2 defines.
INK, MUTED, RULE = "#a10001", "#a10002", "#a10003"
POLICY, REFERENCE, GIBBS, OTHER = "#a10004", "#a10005", "#a10006", "#a10007"
PAPER = "#a10008"
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", POLICY: "policy", REFERENCE: "reference", GIBBS: "gibbs",
             OTHER: "other", PAPER: "paper"}  # fmt: skip
WIDTH = 4.3  # inches; at 72 points an inch a phone's column shows the text at about its nominal size

_SETTINGS: Any = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), RULE),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "axes.labelsize", "legend.fontsize"), 7.5),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow", "axes.unicode_minus"), True),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "svg.fonttype": "path",
    "svg.hashsalt": "private-rlhf",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def draw(name: str, description: str, height: float, paint: Callable[[Axes], None]) -> Markup:
    """One panel, `WIDTH` by `height` inches, as an inline `<svg>`. name: unique on the page; prefixes the ids.
    description: for readers who cannot see it. paint: draws into the axes."""
    with matplotlib.rc_context():
        matplotlib.style.use("default")
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(buffer.getvalue(), name, description)


def _inline(document: str, name: str, description: str) -> Markup:
    """The bare `<svg>` element: no prologue, metadata, namespaces or fixed size; ids made unique on the page."""
    body = document[document.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->"):
        body = re.sub(pattern, "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    rest = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", rest)
    rest = re.sub(r"\n\s*", "\n", rest)
    opening = f'<svg {box.group() if box else ""} role="img" aria-label="{escape(description)}"'
    return Markup(_themed(f"{opening}>{rest}".strip()))


def _themed(text: str) -> str:
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text
