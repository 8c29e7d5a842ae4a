"""Run directories made up for the report's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.rundir import RunDir
from support.report_runs import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(epsilon=…, …)` writes a run directory and returns it."""

    def make(**settings: Any) -> RunDir:
        return write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **settings)

    return make
