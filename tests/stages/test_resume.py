"""Killed at any moment and started again, a run ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from support.pipeline_runs import Workspace, history, read_json, stages_started, timeless, trained, tree

PROMPTS = 10  # fewer than PPO draws, so that prompts come again after the resumption
WEIGHTS = ("sft/model", "reward/model", "ppo/model")


@pytest.fixture(scope="module")
def lora(workspace: Workspace) -> list[str]:
    """Overrides: a LoRA reward model with checkpoints, prompts from a file."""
    prompts = workspace.root / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Write a sentence about topic number {i}."}) for i in range(PROMPTS)]
    prompts.write_text("\n".join(lines) + "\n")
    reward = ["reward.mode=lora", "reward.ridge=1.0", "reward.max_steps=12", "reward.save_steps=3"]
    return [*reward, "reward.batch_size=8", "reward.lora.rank=4", f"data.prompts={prompts}"]


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace, lora: list[str]) -> Path:
    run = workspace.root / "undisturbed"
    workspace.run(run, *lora)
    return run


def leave_half_a_checkpoint(folder: Path, whole: str, name: str, marker: str | None) -> Path:
    """What a kill while writing leaves: a folder without its marker, one file cut short."""
    copy = folder / name
    shutil.copytree(folder / whole, copy)
    if marker:
        (copy / marker).unlink()
    victim = max((path for path in copy.iterdir() if path.suffix == ".safetensors"), key=lambda path: path.name)
    victim.write_bytes(victim.read_bytes()[:100])
    return copy


def assert_same(run: Path, other: Path) -> None:
    """Weights, statistics of Γ, histories, evaluation and metrics, bit for bit."""
    for folder in WEIGHTS:
        assert tree(run / folder) == tree(other / folder)
    assert history(run) == history(other)
    for name in ("sft/history.json", "reward/fit.json", "evaluate/evaluation.json", "evaluate/samples.json"):
        assert read_json(run / name) == read_json(other / name), name
    assert timeless(read_json(run / "metrics.json")) == timeless(read_json(other / "metrics.json"))
    leftovers = [path for path in run.rglob("*") if path.name.startswith(".") or path.suffix in {".tmp", ".old"}]
    assert not leftovers
    assert tree(run).keys() == tree(other).keys()


def test_killed_in_sft_in_reward_and_in_ppo(
    workspace: Workspace, lora: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    state = run / "checkpoints"

    killed = workspace.signal_when(state / "sft" / "checkpoint-4" / "COMPLETE", run, *lora)
    assert killed == -signal.SIGKILL
    assert not (run / "sft" / "manifest.json").exists()
    whole = max(path.parent.name for path in (state / "sft").glob("*/COMPLETE"))
    half = leave_half_a_checkpoint(state / "sft", whole, "checkpoint-11", "COMPLETE")

    workspace.signal_when(state / "reward" / "checkpoint-3" / "COMPLETE", run, *lora)
    assert (run / "sft" / "manifest.json").exists()
    assert not half.exists()
    assert not (run / "reward" / "manifest.json").exists()
    whole = max(path.parent.name for path in (state / "reward").glob("*/COMPLETE"))
    leave_half_a_checkpoint(state / "reward", whole, "checkpoint-11", "COMPLETE")
    (run / "reward").mkdir(exist_ok=True)
    (run / "reward" / ".model.0123.tmp").mkdir()
    (run / "reward" / ".model.0123.tmp" / "model.safetensors").write_bytes(b"half")

    workspace.signal_when(state / "ppo" / "step-2", run, *lora)
    assert (run / "reward" / "manifest.json").exists()
    assert not (run / "ppo" / "manifest.json").exists()
    whole = max(path.name for path in (state / "ppo").glob("step-*"))
    leave_half_a_checkpoint(state / "ppo", whole, ".step-5.tmp", None)

    done = workspace.run(run, *lora)
    assert stages_started(done) == ["ppo", "evaluate", "report"]
    assert_same(run, undisturbed)


def test_killed_during_feature_extraction(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "reward")
    part = run / "checkpoints" / "reward" / "frozen-0-of-1" / "features-00000.safetensors"
    workspace.signal_when(part, run, "--only", "reward")
    assert not (run / "reward" / "manifest.json").exists()
    workspace.run(run, "--only", "reward")
    assert tree(run / "reward" / "model") == tree(finished_run / "reward" / "model")
    assert read_json(run / "reward" / "fit.json") == read_json(finished_run / "reward" / "fit.json")


def test_interrupted_by_the_user_in_ppo(
    workspace: Workspace, lora: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    shutil.rmtree(run / "ppo")
    state = run / "checkpoints" / "ppo"
    code = workspace.signal_when(state / "step-2", run, "--only", "ppo", *lora, number=signal.SIGINT)
    assert code == 130
    assert list(state.glob("step-*"))
    assert "ppo        run   resumes" in workspace.run(run, "--dry-run", *lora).stdout
    workspace.run(run, "--only", "ppo", *lora)
    assert trained(run / "ppo" / "model") == trained(undisturbed / "ppo" / "model")
    assert history(run) == history(undisturbed)
