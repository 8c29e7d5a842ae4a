"""What a validation module hands back, and how it is written: one folder, replaced whole; a table on the terminal."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import atomic
from pipeline.core.rundir import environment
from pipeline.validation.claims import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """name: of the module. claims: in the order of the table. tables: file stem to rows with equal keys. figures: file
    stem to a drawing (`pipeline.validation.figures.new_figure`).
    """

    name: str
    claims: Sequence[Claim]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def write(self, folder: Path, *, quick: bool, started: float) -> None:
        """Replaces `folder` by claims.json (the list of claims), run.json, a CSV per table, PNG and SVG per figure.

        started: `time.monotonic()` when the module began. All or nothing: a failure leaves the old folder.
        """
        from pipeline.validation.figures import save

        with atomic.new_folder(folder) as new:
            atomic.write_json(new / "claims.json", [claim.as_dict() for claim in self.claims])
            for stem, rows in self.tables.items():
                _write_csv(new / f"{stem}.csv", rows)
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
            table.add_row(f"{claim.claim} [{claim.source}]".replace("[", r"\["), _measured(claim), claim.verdict)
        Console().print(table)


def _measured(claim: Claim) -> str:
    if claim.interval is None:
        return f"{claim.measured:.4g}"
    return f"{claim.measured:.4g} [{claim.interval[0]:.4g}, {claim.interval[1]:.4g}]".replace("[", r"\[")


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
