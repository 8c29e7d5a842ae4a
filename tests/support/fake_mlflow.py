"""A stand-in for the package mlflow, as accelerate calls it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import LoggerType

MODULE = """
import os
from types import SimpleNamespace
calls = []
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
def search_experiments(filter_string): return []
def create_experiment(name, **_): calls.extend([os.environ["MLFLOW_TRACKING_URI"],
                                                os.environ["MLFLOW_DISABLE_TELEMETRY"], name])
def start_run(**_): calls.append("start")
def log_params(values): calls.append(values)
def log_metrics(values, step): calls.append((step, values))
def log_artifact(local_path, artifact_path=None): calls.append(local_path)
def end_run(): calls.append("end")
"""


def pretend_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that it gets in this test: address, telemetry off or not, experiment, "start", parameters, (step, values)
    of each report, paths of artefacts, "end"."""
    (folder / "mlflow.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.MLFLOW])
    monkeypatch.setitem(sys.modules, "mlflow", None)  # so that it is as before afterwards
    monkeypatch.delitem(sys.modules, "mlflow")
    calls: list[Any] = importlib.import_module("mlflow").calls
    return calls
