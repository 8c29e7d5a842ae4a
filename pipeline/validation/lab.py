"""Claims, reports and the runner of the studies. A claim is a sentence with the number that decides it."""

from __future__ import annotations

import csv
import importlib
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from private_rlhf.core import atomic
from private_rlhf.core.environment import environment
from private_rlhf.core.errors import RunStopped, UserError, print_lines
from private_rlhf.core.outputs import output_folder
from private_rlhf.core.stats import Estimate, wilson
from scipy import stats

# Study to its module, which offers `run(quick: bool) -> Report`, deterministic.
STUDIES: Mapping[str, str] = MappingProxyType(
    {
        "offline": "private_rlhf.validation.offline",
        "online": "private_rlhf.validation.regret",
        "kl_dp": "private_rlhf.validation.kl_dp",
        "dptd": "private_rlhf.validation.temporal_differences",
        "private_rl": "private_rlhf.validation.outcome_rewards",
    }
)
MOST_LINES = 30  # of the summary
Verdict = Literal["holds", "refuted", "undecided"]
# Whose sentence it is, and so whom a refutation concerns:
#   statement   the paper says it                   reading   one way to read the paper, or its text made precise
#   assumption  the paper's theorem takes it for granted, and its experiment should meet it
#   critique    an error that the paper says it found in works before it: "refuted" confirms the paper
#   corrected   the paper's statement as repaired here        ours   a conjecture or result of this project
#   control     a result of others that the experiment must reproduce
Kind = Literal["statement", "reading", "assumption", "critique", "corrected", "ours", "control"]
Row = Mapping[str, Any]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Bounds:
    """A number known to lie in [low, high] without chance: proved bounds from both sides."""

    low: float
    high: float


@dataclass(frozen=True)
class Claim:
    """claim: one sentence. source: paper and theorem, or note. paper: the paper's own value, in words. criterion: what
    `measured` must satisfy; low, high: its bounds. interval: 95 % of an estimate from `units` independent units; joint:
    the interval that decides, wide enough for all claims of the study together (`jointly`), or the two ends of
    `Bounds`; None for an exact enumeration or a search. verdict: made by `within`."""

    claim: str
    source: str
    kind: Kind
    paper: str
    criterion: str
    measured: float
    interval: tuple[float, float] | None
    joint: tuple[float, float] | None
    verdict: Verdict
    low: float | None
    high: float | None
    units: int | None


def within(
    claim: str,
    source: str,
    measured: float | Estimate | Bounds,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    what: str,
    kind: Kind | None = None,
    paper: str = "",
) -> Claim:
    """The claim that a number lies in [low, high]. what: names the number, for the criterion.

    An estimate or bounds hold if all of the interval lies inside, are refuted if all of it lies outside on one side,
    and otherwise undecided; a float just decides. An infinite number and NaN, the `worst` of nothing, lie outside.
    ValueError for an interval that does not contain its value.
    """
    interval = (measured.ci_low, measured.ci_high) if isinstance(measured, Estimate) else None
    between = (measured.low, measured.high) if isinstance(measured, Bounds) else interval
    point = measured.low if isinstance(measured, Bounds) else measured
    value = point.value if isinstance(point, Estimate) else float(point)
    if interval and (value < interval[0] or value > interval[1]):
        raise ValueError(f"measured {value} lies outside its interval {interval}, for: {claim}")
    bounds = [f">= {low:.10g}"] * math.isfinite(low) + [f"<= {high:.10g}"] * math.isfinite(high)
    return Claim(
        claim=claim,
        source=source,
        kind=kind or ("ours" if source.startswith("this project") else "statement"),
        paper=paper,
        criterion=f"{'95 % interval of ' * bool(interval)}{what} {' and '.join(bounds)}",
        measured=value,
        interval=interval,
        joint=between,
        verdict=_verdict(value, between, low, high),
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        units=measured.n if isinstance(measured, Estimate) else None,
    )


def _verdict(value: float, interval: tuple[float, float] | None, low: float, high: float) -> Verdict:
    floor, ceiling = interval or (value, value)
    if not math.isfinite(value) or math.isnan(floor) or math.isnan(ceiling) or ceiling < low or floor > high:
        return "refuted"
    return "holds" if low <= floor and ceiling <= high else "undecided"


def worst(ratios: Iterable[float]) -> float:
    """The largest, or NaN if there is none or one is NaN: what `within` refutes."""
    values = [float(each) for each in ratios]
    return math.nan if not values or any(map(math.isnan, values)) else max(values)


def jointly(claims: Sequence[Claim]) -> list[Claim]:
    """The claims of one study with verdicts that hold together: Bonferroni over its m random estimates. Each 95 %
    interval is stretched about its value by t(1 − .025/m) / t(.975), Student's t with units − 1 degrees of freedom.
    That of a share, which beside 0 and 1 grows faster than t, is Clopper and Pearson's at 1 − .05/m."""
    random = sum(claim.interval is not None for claim in claims)
    return [_stretched(claim, random) if claim.interval else claim for claim in claims]


def _stretched(claim: Claim, number: int) -> Claim:
    assert claim.interval is not None
    assert claim.units is not None
    value, units, missed = claim.measured, claim.units, 1.0 - CONFIDENCE
    wide, plain = stats.t(max(units - 1, 1)).ppf([1.0 - missed / 2.0 / number, 1.0 - missed / 2.0])
    floor, ceiling = (value + float(wide / plain) * (end - value) for end in claim.interval)
    if number > 1 and 0.0 <= claim.interval[0] <= claim.interval[1] <= 1.0:
        share = wilson(value * units, units)
        if np.allclose(claim.interval, (share.ci_low, share.ci_high), rtol=1e-9, atol=0.0):
            floor, ceiling = stats.binomtest(round(value * units), units).proportion_ci(1.0 - missed / number)
    ends = -math.inf if claim.low is None else claim.low, math.inf if claim.high is None else claim.high
    return replace(claim, joint=(floor, ceiling), verdict=_verdict(value, (floor, ceiling), *ends))


@dataclass(frozen=True)
class Report:
    """name: of the study. claims: in the order of the table. tables: file stem to rows with equal keys. figures: by
    file stem."""

    name: str
    claims: Sequence[Claim]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def write(self, folder: Path, *, quick: bool, started: float) -> None:
        """Replaces `folder` by claims.json ("inf" and "nan" as words), run.json, a CSV per table, PNG and SVG per
        figure. started: `time.monotonic()` at the beginning. A failure leaves the old folder."""
        with atomic.new_folder(output_folder(folder, "--output", rewrites=("claims.json",))) as new:
            atomic.write_json(new / "claims.json", atomic.spell_nonfinite([asdict(claim) for claim in self.claims]))
            for stem, rows in self.tables.items():
                with (new / f"{stem}.csv").open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
                    writer.writeheader()
                    writer.writerows(rows)
            for stem, figure in self.figures.items():
                save(figure, new, stem)
            seconds = round(time.monotonic() - started, 1)
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            run = {"name": self.name, "quick": quick, "date": date, "seconds": seconds, "environment": environment()}
            atomic.write_json(new / "run.json", run)

    def print_table(self) -> None:
        """Claim, measured, verdict on stdout."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"validate {self.name}", title_justify="left", pad_edge=False)
        table.add_column("claim", ratio=1)
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for claim in self.claims:
            table.add_row(f"{claim.claim} [{claim.source}]", figure_of(claim), claim.verdict)
        Console(markup=False).print(table)


def figure_of(claim: Claim) -> str:
    """The measured number with the interval that decided."""
    return f"{claim.measured:.4g}" + (f" [{claim.joint[0]:.4g}, {claim.joint[1]:.4g}]" if claim.joint else "")


def counted(claims: Sequence[Claim]) -> str:
    """One line: the number of claims by verdict."""
    number = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{number[verdict]} {verdict}" for verdict in get_args(Verdict))


def summary(claims_by_study: Mapping[str, Sequence[Claim]]) -> str:
    """At most 30 lines: verdicts by study and by kind, then the papers' statements that are refuted."""
    every = [claim for claims in claims_by_study.values() for claim in claims]
    lines = ["", f"{len(every)} claims: {counted(every)}"]
    lines += [f"  {name:<12}{len(claims):>4}: {counted(claims)}" for name, claims in claims_by_study.items()]
    kinds = {kind: [claim for claim in every if claim.kind == kind] for kind in get_args(Kind)}
    lines += [f"  {kind:<12}{len(claims):>4}: {counted(claims)}" for kind, claims in kinds.items() if claims]
    refuted = [claim for claim in kinds["statement"] if claim.verdict == "refuted"]
    lines += [f"{len(refuted)} statements of the papers are refuted" + (":" if refuted else "")]
    lines += [f"  {figure_of(claim).split(' ')[0]:>10}  {claim.claim} [{claim.source}]"[:118] for claim in refuted]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "  … and more in claims.json"])


IN_THE_LAB = "deeper studies are in lab/, `python -m private_rlhf_lab.studies --help`"


def validate(name: str, *, quick: bool, output: Path, studies: Mapping[str, str] = STUDIES) -> list[Report]:
    """Run one of `studies` or `all`, print each table and last a summary, write OUTPUT/full/NAME or OUTPUT/quick/NAME.
    A refuted claim is a result. UserError for an unknown name. RunStopped names the studies that failed."""
    if name != "all" and name not in studies:
        raise UserError(f"the study must be {', '.join(studies)} or all, got {name!r}: {IN_THE_LAB}")
    reports, failed = [], []
    results = output / ("quick" if quick else "full")
    for study in studies if name == "all" else (name,):
        started = time.monotonic()
        try:
            with style():
                report: Report = importlib.import_module(studies[study]).run(quick)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{study} ({type(error).__name__}: {error})")
            continue
        report = replace(report, claims=jointly(report.claims))
        report.write(results / study, quick=quick, started=started)
        report.print_table()
        print_lines(f"{study}: {time.monotonic() - started:.1f} s, {results / study}")
        reports.append(report)
    print_lines(summary({report.name: report.claims for report in reports}))
    if failed:
        raise RunStopped(f"failed, the others are done: {'; '.join(failed)}")
    return reports


Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_ARMIJO = 1e-4
_MAX_HALVINGS = 30


class Objectives(Protocol):
    """R convex functions of d parameters each; `rows` (r,) chooses some of them, theta (r, d)."""

    def value(self, theta: Array, rows: Integers) -> Array:
        """(r,)."""

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        """Gradient (r, d) and positive definite curvature (r, d, d)."""


def minimise(
    problem: Objectives, start: Array, *, steps: int = 60, tolerance: float = 1e-8
) -> tuple[Array, NDArray[np.bool_]]:
    """Minimisers from `start` (R, d), and whether each converged, (R,): a Newton decrement gᵀH⁻¹g/2 of at most
    `tolerance`."""
    theta, active = start.copy(), np.arange(len(start))
    converged = np.zeros(len(start), dtype=np.bool_)
    for _ in range(steps):
        gradient, curvature = problem.derivatives(theta[active], active)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        decrement = 0.5 * (gradient * step).sum(axis=1)
        unfinished = decrement > tolerance
        converged[active] = ~unfinished
        active = active[unfinished]
        if not len(active):
            break
        theta[active] = _backtrack(problem, theta[active], active, step[unfinished], decrement[unfinished])
    return theta, converged


def _backtrack(problem: Objectives, theta: Array, rows: Integers, step: Array, decrement: Array) -> Array:
    """θ − 2^−j step with the smallest j that satisfies Armijo's condition; θ itself where none does."""
    best, value = theta.copy(), problem.value(theta, rows)
    waiting, size = np.arange(len(theta)), 1.0
    for _ in range(_MAX_HALVINGS):
        candidate = theta[waiting] - size * step[waiting]
        rounding = 1e-13 * np.abs(value[waiting])
        enough = value[waiting] - 2.0 * _ARMIJO * size * decrement[waiting] + rounding
        good = problem.value(candidate, rows[waiting]) <= enough
        best[waiting[good]] = candidate[good]
        waiting, size = waiting[~good], 0.5 * size
        if not len(waiting):
            break
    return best


PANEL = (3.6, 3.0)  # inches
COLOURS = ("#1f5fa8", "#c8553d", "#3b8f5a", "#8a5fb0", "#b8860b", "#555555")


def style() -> AbstractContextManager[None]:
    """The settings of every drawing: `lab.validate` runs a study under them, so that a plot says what differs."""
    return matplotlib.rc_context(
        {
            "axes.grid": True,
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 9,
            "grid.alpha": 0.5,
            "grid.linewidth": 0.4,
            "legend.fontsize": 7,
            "legend.frameon": False,
            "lines.markersize": 3,
            "svg.fonttype": "path",
            "svg.hashsalt": "private-rlhf",
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
        }
    )


def new_figure(panels: int = 1, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes side by side; size (width, height) in inches, PANEL each by default."""
    figure = Figure(figsize=size or (PANEL[0] * panels, PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def band(axes: Axes, x: np.ndarray, mean: np.ndarray, half: np.ndarray, line: str = "-", **style: Any) -> None:
    """The curve `mean` (K,) in a band of ± half (K,)."""
    axes.plot(x, mean, line, **style)
    axes.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)


def save(figure: Figure, folder: Path, stem: str) -> None:
    """Writes folder/stem.png and folder/stem.svg; the bytes of the SVG depend only on the drawing."""
    with style():
        figure.savefig(folder / f"{stem}.png", dpi=130)
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None, "Creator": None})
