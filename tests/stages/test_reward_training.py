"""The reward stage with everything a recipe may ask of a trained backbone, and PPO on what it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.pipeline_runs import Workspace, read_json

ASKED = (
    "reward.mode=lora",
    "reward.max_steps=8",
    "reward.batch_size=8",
    "reward.lora.rank=4",
    "reward.optimizer=adafactor",
    "reward.group_by_length=true",
    "reward.early_stopping.every=2",
    "reward.early_stopping.patience=2",
    "reward.uncertainty.kind=ensemble",
    "reward.uncertainty.heads=3",
)


@pytest.mark.slow
def test_lora_with_early_stopping_and_an_ensemble(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    workspace.run(run, "--only", "reward", *ASKED)
    fit = read_json(run / "reward" / "fit.json")
    assert fit["uncertainty"] == "ensemble"
    assert fit["validation_after_selection"] is True
    stopping = fit["early_stopping"]
    steps = [entry[0] for entry in stopping["evaluations"]]
    assert steps[:2] == [0, 2]
    assert stopping["kept_step"] in steps
    kept = next(entry for entry in stopping["evaluations"] if entry[0] == stopping["kept_step"])
    # The saved backbone is the kept one: with its trained head it had this held-out log-likelihood, through features.
    assert fit["trained_head_log_likelihood"] == pytest.approx(kept[1], abs=1e-4)
    assert not stopping["stopped"] or len(fit["training_loss"]) < 8
    metadata = read_json(run / "reward" / "model" / "reward_metadata.json")
    assert (metadata["uncertainty"], metadata["mode"]) == ("ensemble", "lora")
    workspace.run(run, "--only", "ppo", *ASKED)
    history = [json.loads(line) for line in (run / "ppo" / "history.jsonl").read_text().splitlines()]
    assert all(entry["bonus"] > 0 for entry in history)
