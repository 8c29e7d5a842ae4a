"""A stage that one process began is finished by two, and the other way round: losses as of an undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.pipeline_runs import Workspace, history, read_json

TOLERANCE = 1e-4
REWARD = ("mode=lora", "ridge=1.0", "max_steps=6", "save_steps=3", "batch_size=8", "lora.rank=4")
DPO = ("max_steps=6", "save_steps=3", "batch_size=8", "lora.rank=4")
SMALL = (*(f"reward.{key}" for key in REWARD), *(f"dpo.{key}" for key in DPO))
STATE = {
    "sft": "checkpoint-4/COMPLETE",
    "reward": "checkpoint-3/COMPLETE",
    "dpo": "checkpoint-3/COMPLETE",
    "ppo": "step-2",
}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace, finished_run: Path) -> Callable[[str], Path]:
    """The run of one process whose stage is expected; each is made once."""

    @cache
    def make(stage: str) -> Path:
        if stage == "sft":
            return finished_run
        run = workspace.root / f"undisturbed-world-{stage}"
        shutil.copytree(make("reward") if stage == "ppo" else finished_run, run)
        workspace.run(run, "--only", stage, *SMALL, f"aligner={'dpo' if stage == 'dpo' else 'ppo'}")
        return run

    return make


def losses(run: Path, stage: str) -> list[float]:
    if stage == "ppo":
        return [row[name] for row in history(run) for name in ("policy_loss", "value_loss")]
    if stage == "reward":
        fit = read_json(run / "reward" / "fit.json")
        return [fit["validation_log_likelihood"], *(loss for _, loss in fit["training_loss"])]
    return list(read_json(run / stage / "manifest.json")["report"]["loss"])


@pytest.mark.parametrize(
    ("stage", "first", "then"),
    [
        ("sft", 1, 2),
        pytest.param("sft", 2, 1, marks=slow),
        pytest.param("reward", 1, 2, marks=slow),
        ("reward", 2, 1),
        pytest.param("dpo", 1, 2, marks=slow),
        pytest.param("dpo", 2, 1, marks=slow),
        pytest.param("ppo", 1, 2, marks=slow),
        pytest.param("ppo", 2, 1, marks=slow),
    ],
)
def test_another_number_of_processes_goes_on(
    workspace: Workspace, undisturbed: Callable[[str], Path], tmp_path: Path, stage: str, first: int, then: int
) -> None:
    aligner = "dpo" if stage == "dpo" else "ppo"
    given, run = (*SMALL, f"aligner={aligner}"), tmp_path / "run"
    shutil.copytree(undisturbed(stage), run)
    shutil.rmtree(run / stage)
    state = run / "checkpoints" / stage / STATE[stage]
    workspace.signal_stage_when(state, stage, run, *given, processes=first)
    assert not (run / stage / "manifest.json").exists()
    done = workspace.launch(stage, run, *given, processes=then)
    assert "resume state here is of another" not in done.stderr
    assert read_json(run / stage / "manifest.json")["world_size"] == then
    assert not list((run / "checkpoints").glob("*-aside-*"))
    expected = losses(undisturbed(stage), stage)
    assert len(expected) >= 6
    assert losses(run, stage) == pytest.approx(expected, abs=TOLERANCE)
