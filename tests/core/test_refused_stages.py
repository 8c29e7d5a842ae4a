"""A refusal leaves nothing behind, whether `run` or a stage alone was started; what was there before stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe.recipe import shareable_yaml
from private_rlhf.stages.context import StageContext
from support.recipes import recipe_of
from support.stub_stages import stub_stages

RECIPE = recipe_of(data={"preferences": "embedded"})
Start = Callable[[RunDir], None]
STARTS: dict[str, Start] = {
    "run": lambda run: runner.execute(RECIPE, run, runner.Selection()),
    "stage": lambda run: runner.execute_one("privatize", RECIPE, run),
}


def refuse(context: StageContext) -> dict[str, Any]:
    """A stage that rejects its input."""
    assert context.run.root.is_dir()
    raise UserError("row 3 has no label")


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Either way to start the first stage, which then refuses."""
    stub_stages(monkeypatch, refuse)
    monkeypatch.setattr(runner, "source_files", lambda *_: {})
    return STARTS[request.param]


def test_a_new_run_directory_goes(start: Start, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 3"):
        start(RunDir(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_a_run_directory_that_was_there_stays(start: Start, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.claim(RECIPE.name, shareable_yaml(RECIPE), {})
    with pytest.raises(UserError, match="row 3"):
        start(run)
    assert (run.root / "recipe.yaml").is_file()
