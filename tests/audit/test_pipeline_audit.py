"""Canaries planted into a run of the tiny recipe: nothing in the run directory tells them better than alpha."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from private_rlhf.audit.canaries import plant, read_truth
from private_rlhf.audit.suite import Outcome, run_attacks
from private_rlhf.embedded import task
from support.pipeline_runs import Workspace

OWN = ("data.public_labels=false", "data.demonstrations=release", "evaluation_labels=private", "privatize.epsilon=0.5")


def planted(folder: Path, count: int) -> tuple[Path, Path]:
    """(planted data, truth): real pairs of the embedded task, which all become canaries."""
    pairs = list(dict.fromkeys(task.load_pairs("train")))[:count]
    source = folder / "source.jsonl"
    source.write_text(
        "".join(
            json.dumps({"prompt": p.prompt, "chosen": p.response_a, "rejected": p.response_b}) + "\n" for p in pairs
        )
    )
    key = folder / "canary.key"  # a key of its own: the workspace's has released other labels
    plant(str(source), folder / "planted.jsonl", folder / "truth.jsonl", len(pairs))
    return folder / "planted.jsonl", key


def attacked(workspace: Workspace, folder: Path, count: int, *arguments: str) -> Outcome:
    data, key = planted(folder, count)
    run = folder / "run"
    workspace.run_here(run, *arguments, f"data.preferences={data}", f"privatize.key_file={key}", *OWN)
    return run_attacks([run], read_truth(folder / "truth.jsonl"))


def test_the_privatise_stage_keeps_its_promise(workspace: Workspace, tmp_path: Path) -> None:
    """A sound run fails 1 time in 1,000."""
    outcome = attacked(workspace, tmp_path, 200, "--only", "privatize")
    assert outcome.events > 180  # a few pairs may hold an empty response, and are dropped
    assert outcome.alpha == pytest.approx(0.6225, abs=1e-4)
    assert not outcome.leak, [row for row in outcome.attacks if row.leak] + outcome.findings


@pytest.mark.slow
def test_the_whole_run_keeps_its_promise(workspace: Workspace, tmp_path: Path) -> None:
    """π_ref, reward model and policy included. A sound run fails 1 time in 1,000."""
    outcome = attacked(workspace, tmp_path, 600, "data.limit=600")
    assert outcome.events > 550
    variants = " ".join(row.variant for row in outcome.attacks if row.attack == "checkpoints")
    assert "sft/model" in variants
    assert "reward/model" in variants
    assert "ppo/model" in variants
    assert not outcome.leak, [row for row in outcome.attacks if row.leak] + outcome.findings
