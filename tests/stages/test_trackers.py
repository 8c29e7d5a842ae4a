"""Trackers get the numbers of each stage that trains with TRL, and the card; for PPO see tests/rl/test_tracking.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.fake_mlflow import pretend_mlflow
from support.pipeline_runs import Workspace

STAGES = {
    "sft": ["sft.max_steps=3"],
    "reward": ["reward.mode=lora", "reward.max_steps=3"],
    "dpo": ["aligner=dpo", "dpo.max_steps=3"],
    "rloo": ["aligner=rloo", "rloo.iterations=3"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_step_is_reported(
    workspace: Workspace, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    told = pretend_mlflow(tmp_path, monkeypatch)
    workspace.run_here(run, "--only", stage, "ppo.report_to=[mlflow]", *STAGES[stage])
    place, _, name, start, settings, *reports, end = told
    assert place == f"sqlite:///{run / stage / 'tracking'}/mlflow.db"
    assert (name, start, end) == ("tiny", "start", "end")
    assert settings["learning_rate"] > 0
    losses = {step: values["loss"] for step, values in reports if "loss" in values}
    assert list(losses) == [1, 2, 3]
    assert all(isinstance(value, int | float) for _, values in reports for value in values.values())


@pytest.mark.parametrize("samples", [False, True])
def test_the_report_is_an_artefact_where_texts_may_leave(
    workspace: Workspace, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    """The card always; the report, which shows prompts and responses, with ppo.report_samples only."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    told = pretend_mlflow(tmp_path, monkeypatch)
    texts = ["ppo.report_samples=true", "ppo.sample_every=1"] if samples else []
    workspace.run_here(run, "--only", "report", "ppo.report_to=[mlflow]", *texts)
    names = ["card.json", "card.md", *(["report.html", "report.md"] if samples else [])]
    assert [each for each in told if str(each).startswith(str(run))] == [str(run / "report" / name) for name in names]
    assert told[-1] == "end"
