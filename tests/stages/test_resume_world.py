"""A stage that one process began is finished by two, and the other way round: losses as of an undisturbed run. Split
weights are finished by as many."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from private_rlhf.recipe import ALIGNERS
from support.pipeline_runs import Workspace, history, read_json
from support.two_processes import FSDP

TOLERANCE = 1e-4
REWARD = ("mode=lora", "ridge=1.0", "max_steps=6", "save_steps=3", "batch_size=8", "lora.rank=4")
DPO = ("max_steps=6", "save_steps=3", "batch_size=8", "lora.rank=4")
GROUP = ("iterations=6", "rollouts=8", "batch_size=8", "save_every=3", "learning_rate=1e-3", "lora.rank=4")
GVPO = ("rounds=1", "max_prompts=8", "held_out_prompts=2", "held_out_samples=2", "evaluate_every=2", "batch_size=8",
        "samples_per_prompt=4", "passes=1", "learning_rate=1e-3", "lora.rank=4")  # fmt: skip
SMALL = (
    *(f"reward.{key}" for key in REWARD), *(f"dpo.{key}" for key in DPO), *(f"gvpo.{key}" for key in GVPO),
    *(f"{name}.{key}" for name in ("rloo", "grpo") for key in GROUP),
)  # fmt: skip
STATE = {
    "sft": "checkpoint-4/COMPLETE",
    "reward": "checkpoint-3/COMPLETE",
    "dpo": "checkpoint-3/COMPLETE",
    "rloo": "checkpoint-3/COMPLETE",
    "grpo": "checkpoint-3/COMPLETE",
    "ppo": "step-2",
    "gvpo": "step-6",
}
ON_REWARD = {"ppo": 2, "rloo": 2, "grpo": 2, "gvpo": 1}
"""Stages that read a reward, and how many times each process had drawn of its policy when it was killed."""
slow = pytest.mark.slow


def aligner_of(stage: str) -> str:
    return stage if stage in ALIGNERS else "ppo"


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace, finished_run: Path) -> Callable[[str], Path]:
    """The run of one process whose stage is expected; each is made once."""

    @cache
    def make(stage: str) -> Path:
        if stage == "sft":
            return finished_run
        run = workspace.root / f"undisturbed-world-{stage}"
        shutil.copytree(make("reward") if stage in ON_REWARD else finished_run, run)
        workspace.run(run, "--only", stage, *SMALL, f"aligner={aligner_of(stage)}")
        return run

    return make


def losses(run: Path, stage: str) -> list[float]:
    if stage == "ppo":
        return [row[name] for row in history(run) for name in ("policy_loss", "value_loss")]
    if stage == "reward":
        fit = read_json(run / "reward" / "fit.json")
        return [fit["validation_log_likelihood"], *(loss for _, loss in fit["training_loss"])]
    report = read_json(run / stage / "manifest.json")["report"]
    return list(report["losses"] if stage in ON_REWARD else report["loss"])


@pytest.mark.parametrize(
    ("stage", "first", "then", "strategy"),
    [
        ("sft", 1, 2, {}),
        pytest.param("sft", 2, 1, {}, marks=slow),
        pytest.param("reward", 1, 2, {}, marks=slow),
        ("reward", 2, 1, {}),
        pytest.param("dpo", 1, 2, {}, marks=slow),
        pytest.param("dpo", 2, 1, {}, marks=slow),
        pytest.param("ppo", 1, 2, {}, marks=slow),
        pytest.param("ppo", 2, 1, {}, marks=slow),
        pytest.param("dpo", 2, 2, FSDP, marks=slow),
        pytest.param("rloo", 2, 2, FSDP, marks=slow),
        pytest.param("grpo", 2, 2, FSDP, marks=slow),
        pytest.param("gvpo", 1, 2, {}, marks=slow),
        pytest.param("gvpo", 2, 1, {}, marks=slow),
        pytest.param("gvpo", 2, 2, FSDP, marks=slow),
    ],
)
def test_another_number_of_processes_goes_on(
    workspace: Workspace, undisturbed: Callable[[str], Path], tmp_path: Path, stage: str, first: int, then: int,
    strategy: dict[str, str],
) -> None:  # fmt: skip
    given, run = (*SMALL, f"aligner={aligner_of(stage)}"), tmp_path / "run"
    shutil.copytree(undisturbed(stage), run)
    shutil.rmtree(run / stage)
    state = run / "checkpoints" / stage / STATE[stage]
    workspace.signal_stage_when(state, stage, run, *given, processes=first, **strategy)
    assert not (run / stage / "manifest.json").exists()
    shards = {tmp_path / path.name: path for path in (run / stage).glob(f"replay/{stage}-0000[01]-*")}
    for link, shard in shards.items():
        link.hardlink_to(shard)
    done = workspace.launch(stage, run, *given, processes=then, **strategy)
    assert "resume state here is of another" not in done.stderr
    assert read_json(run / stage / "manifest.json")["world_size"] == then
    assert not list((run / "checkpoints").glob("*-aside-*"))
    assert len(shards) == first * ON_REWARD.get(stage, 0)
    assert all(link.samefile(shard) for link, shard in shards.items())  # what was drawn is not drawn again
    expected = losses(undisturbed(stage), stage)
    assert len(expected) >= 6
    assert losses(run, stage) == pytest.approx(expected, abs=TOLERANCE)
