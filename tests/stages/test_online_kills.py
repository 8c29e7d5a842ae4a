"""A kill before any durable step of the online stage: it goes on to the bytes of a run that nobody killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from private_rlhf import runner
from private_rlhf.core.documents import read_json
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.release import read_release
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages import online  # noqa: F401  imported here, so that children need not
from support.kills import Work, contents, kill_everywhere
from support.pipeline_runs import TINY, Workspace

ROUNDS = (
    *("data.limit=null", "data.public_labels=true", "model.dtype=float32", "sft.max_steps=1"),
    *("online.questions=4", "online.evaluation_questions=4", "online.candidates=3", "online.max_prompts=6"),
)
PARTS = ("release", "evaluation", "rounds")


@pytest.mark.parametrize(
    ("rounds", "stride"),
    [
        pytest.param(1, 45, id="core"),
        pytest.param(2, 41, id="sample", marks=pytest.mark.slow),
        pytest.param(2, 1, id="every", marks=pytest.mark.slow),
    ],
)
def test_rounds_go_on_after_any_kill(workspace: Workspace, tmp_path: Path, rounds: int, stride: int) -> None:
    folder = tmp_path / "run"
    own = (f"model.cache_dir={workspace.root / 'cache'}", f"online.rounds={rounds}")
    recipe = load_recipe(Recipe, TINY, [*own, *ROUNDS])
    runner.execute(recipe, RunDir(folder), runner.Selection(only="sft"))

    def act(at: Path) -> None:
        torch.set_num_threads(1)  # the pool of threads did not come along
        runner.execute(recipe, RunDir(at), runner.Selection(only="online"))

    def look(at: Path) -> None:
        for name in PARTS[:2]:
            if (at / "online" / name).exists():
                read_release(at / "online" / name).check_rows()
        for path in (at / "online" / "rounds").glob("[!.]*"):
            assert {"questions", "answers", "labeller", "levels", "seed"} == read_json(path).keys()

    def result(at: Path) -> object:
        # Resume state without its fingerprint is kept aside and said: nothing there is deleted unasked.
        shutil.rmtree(at / "checkpoints" / "online-aside-1", ignore_errors=True)
        parts = {name: contents(at / "online" / name) for name in PARTS}
        return parts, (at / "online" / "history.json").read_bytes()

    found = kill_everywhere(Work(act, look, result), folder, stride, start=0 if stride == 1 else 30)
    print(f"| online round | {found.steps} | {found.kills} | {len(found.faults)} |")
    assert not found.faults, found.faults
    assert found.steps >= 60 * rounds
    assert found.kills >= 2
