"""The validation modules by name, imported when they run."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import MappingProxyType

from pipeline.core.errors import UserError
from pipeline.validation.results import Report

# Each module offers `run(quick: bool) -> Report`, deterministic.
MODULES = MappingProxyType(
    {
        "kl_dp": "pipeline.validation.kl_dp.run",
        "private_rl": "pipeline.validation.private_rl.run",
    }
)


def validate(name: str, *, quick: bool, output: Path) -> list[Report]:
    """Runs one module or `all`, writes OUTPUT/NAME and prints each table. UserError for an unknown name.

    A refuted claim is a result: only what could not be measured raises.
    """
    if name != "all" and name not in MODULES:
        raise UserError(f"there is no validation module {name!r}: choose {', '.join(MODULES)} or all")
    reports = []
    for chosen in MODULES if name == "all" else (name,):
        started = time.monotonic()
        report: Report = importlib.import_module(MODULES[chosen]).run(quick)
        report.write(output / chosen, quick=quick, started=started)
        report.print_table()
        print(f"{chosen}: {time.monotonic() - started:.1f} s, {output / chosen}")
        reports.append(report)
    return reports
