"""Resume state that another recipe, number of processes or version of the code left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.recipe import Recipe
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import stage_of
from support.recipes import recipe_of

ALONE, TWO = World(rank=0, size=1), World(rank=0, size=2)


def claim(stage: str, given: Recipe, run: RunDir, world: World) -> None:
    runner._claim_checkpoints(stage_of(stage), StageContext(given, run, world, stage))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(runner, "source_files", lambda *_: {"a.py": "code"})
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(
    ("stage", "later", "world", "code", "said"),
    [
        ("ppo", {}, ALONE, "code", ""),
        ("ppo", {}, TWO, "code", ""),
        ("ppo", {}, ALONE, "other code", "goes on from what another version of the code left in "),
        ("ppo", {"ppo": {"kl_coef": 0.2}}, ALONE, "code", "starts anew, as the resume state here is of another recipe"),
        ("reward", {}, TWO, "code", ""),
        ("rloo", {}, TWO, "code", "starts anew, as the resume state here is of another number of processes: "),
    ],
)
def test_resume_state_is_used_or_set_aside_and_never_deleted(
    stage: str, later: dict[str, Any], world: World, code: str, said: str, run: RunDir,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    claim(stage, recipe_of(), run, ALONE)
    (run.checkpoints(stage) / "step-3").mkdir()
    monkeypatch.setattr(runner, "source_files", lambda *_: {"a.py": code})
    claim(stage, recipe_of(**later), run, world)
    aside = run.checkpoints(f"{stage}-aside-1")
    assert (aside / "step-3").is_dir() == ("starts anew" in said)
    assert (run.checkpoints(stage) / "step-3").is_dir() == ("starts anew" not in said)
    assert (run.checkpoints(stage) / "fingerprint.json").is_file()
    err = capsys.readouterr().err
    assert err.startswith(f"[private-rlhf] {stage}: {said}") if said else not err
    assert (str(aside) in err) == aside.is_dir()


def test_resume_state_without_identity_is_set_aside(run: RunDir) -> None:
    for number in (1, 2):
        (run.checkpoints("ppo") / "step-3").mkdir(parents=True)
        (run.checkpoints("ppo") / "fingerprint.json").unlink(missing_ok=True)
        claim("ppo", recipe_of(), run, ALONE)
        assert (run.checkpoints(f"ppo-aside-{number}") / "step-3").is_dir()
