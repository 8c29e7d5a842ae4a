"""Stages that do nothing, in place of all that the runner would load."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core.atomic import write_json
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import Stage

Body = Callable[[StageContext], dict[str, Any]]


def stub_stages(monkeypatch: pytest.MonkeyPatch, body: Body = lambda _: {}) -> list[str]:
    """Replace the work of every stage by `body`, its data by one that never changes, and the checks by none. Returns
    the names of the stages that run from now on, in order."""
    names: list[str] = []

    def run(context: StageContext) -> dict[str, Any]:
        names.append(context.name)
        report = body(context)
        context.folder.mkdir(parents=True, exist_ok=True)
        if context.name == "evaluate":
            write_json(context.folder / "evaluation.json", {})
        return report

    raw_source = types.SimpleNamespace(in_files=False, input_unchanged=lambda: True, check_input=lambda _: None)
    module = types.SimpleNamespace(run=run, RawSource=lambda *_: raw_source)
    monkeypatch.setattr(Stage, "load", lambda _: module)
    monkeypatch.setattr(runner, "preflight", lambda *_: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return names
