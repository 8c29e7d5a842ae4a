"""The laboratory: a claim is a published or derived sentence with the number that decides it, a report is what a study
found, `validate` runs the studies. Verdicts follow from the criterion, never by hand.
"""

from __future__ import annotations

import csv
import importlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core import atomic
from pipeline.core.errors import UserError
from pipeline.core.rundir import environment
from pipeline.core.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each is a module NAME/run.py beside this file that offers `run(quick: bool) -> Report`, deterministic.
STUDIES = ("offline", "online", "kl_dp", "dptd", "private_rl")
Verdict = Literal["holds", "refuted", "undecided"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """claim: one sentence. source: paper and theorem, or note. criterion: what `measured` must satisfy, in words and
    numbers. interval: uncertainty of `measured` where it is a random estimate; None for an exact enumeration or a
    search. verdict: made by `within`.
    """

    claim: str
    source: str
    criterion: str
    measured: float
    interval: tuple[float, float] | None
    verdict: Verdict


def within(
    claim: str, source: str, measured: float | Estimate, *, low: float = -math.inf, high: float = math.inf, what: str
) -> Claim:
    """The claim that a number lies in [low, high].

    what: names the number, for the criterion. The claim of an estimate holds if all of its 95 % interval lies inside,
    is refuted if all of it lies outside on one side, and is undecided otherwise; a float decides alone.
    ValueError for a NaN or infinite value, or an interval that does not contain it.
    """
    interval = (measured.ci_low, measured.ci_high) if isinstance(measured, Estimate) else None
    value = measured.value if isinstance(measured, Estimate) else float(measured)
    floor, ceiling = interval or (value, value)
    if not (math.isfinite(value) and floor <= value <= ceiling):
        raise ValueError(f"measured {value} with interval {interval} is no finite value inside it, for: {claim}")
    verdict: Verdict = "undecided"
    if low <= floor and ceiling <= high:
        verdict = "holds"
    elif ceiling < low or floor > high:
        verdict = "refuted"
    bounds = [f">= {low:.10g}"] * math.isfinite(low) + [f"<= {high:.10g}"] * math.isfinite(high)
    subject = f"95 % interval of {what}" if interval else what
    return Claim(claim, source, f"{subject} {' and '.join(bounds)}", value, interval, verdict)


@dataclass(frozen=True)
class Report:
    """name: of the study. claims: in the order of the table. tables: file stem to rows with equal keys. figures: file
    stem to a drawing (`pipeline.validation.panels`).
    """

    name: str
    claims: Sequence[Claim]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def write(self, folder: Path, *, quick: bool, started: float) -> None:
        """Replaces `folder` by claims.json (the list of claims), run.json, a CSV per table, PNG and SVG per figure.

        started: `time.monotonic()` when the study began. All or nothing: a failure leaves the old folder.
        """
        from pipeline.validation.panels import save

        with atomic.new_folder(folder) as new:
            atomic.write_json(new / "claims.json", [asdict(claim) for claim in self.claims])
            for stem, rows in self.tables.items():
                with (new / f"{stem}.csv").open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
                    writer.writeheader()
                    writer.writerows(rows)
            for stem, figure in self.figures.items():
                save(figure, new, stem)
            seconds = round(time.monotonic() - started, 1)
            run = {"name": self.name, "quick": quick, "seconds": seconds, "environment": environment()}
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
            spread = f" [{claim.interval[0]:.4g}, {claim.interval[1]:.4g}]" if claim.interval else ""
            table.add_row(f"{claim.claim} [{claim.source}]", f"{claim.measured:.4g}{spread}", claim.verdict)
        Console(markup=False).print(table)


def validate(name: str, *, quick: bool, output: Path) -> list[Report]:
    """Runs one study or `all`, writes OUTPUT/NAME and prints each table. UserError for an unknown name.

    A refuted claim is a result: only what could not be measured raises.
    """
    if name != "all" and name not in STUDIES:
        raise UserError(f"there is no validation module {name!r}: choose {', '.join(STUDIES)} or all")
    from pipeline.validation.panels import style

    reports = []
    for chosen in STUDIES if name == "all" else (name,):
        started = time.monotonic()
        with style():
            report: Report = importlib.import_module(f"pipeline.validation.{chosen}.run").run(quick)
        report.write(output / chosen, quick=quick, started=started)
        report.print_table()
        print(f"{chosen}: {time.monotonic() - started:.1f} s, {output / chosen}")
        reports.append(report)
    return reports
