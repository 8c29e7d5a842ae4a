"""Which files count as the code of a stage."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from private_rlhf.core import code
from private_rlhf.stages.declarations import STAGES, Stage

LEARN = ("sft", "reward", "ppo", "dpo", "rloo", "gvpo")
ON_PROMPTS = ("ppo", "gvpo", "rloo", "grpo")


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_a_stage_is_made_of_what_it_imports(stage: str) -> None:
    """Not of the commands, the validation studies and the attacks; a report's plots train nothing again."""
    files = code.source_files(f"private_rlhf.stages.{stage}")
    assert f"pipeline/stages/{stage}.py" in files
    assert {"pipeline/recipe/recipe.py", "pipeline/core/__init__.py", "pipeline/__init__.py"} <= set(files)
    rooms = {Path(name).parts[1] for name in files}
    assert not rooms & {"cli.py", "runner.py", "commands", "validation", "audit"}
    assert ("report" in rooms) == (stage == "report")
    others = {Path(name).name for name in files if Path(name).parent.name == "stages"}
    shared = {"on_prompts.py"} if stage in (*ON_PROMPTS, "online") else set()
    assert others == {"__init__.py", "context.py", f"{stage}.py"} | shared | ({"rloo.py"} if stage == "grpo" else set())


def test_code_that_only_some_stages_use() -> None:
    files = {stage.name: set(code.source_files(stage.module_name)) for stage in STAGES}

    def users(name: str) -> set[str]:
        return {stage for stage, found in files.items() if name in found}

    assert users("pipeline/rl/ppo_trainer.py") == {"ppo", "gvpo"} | {"rloo", "grpo", "online"}
    assert users("pipeline/report/report.html.j2") == {"report"}
    assert users("pipeline/lm/rows.py") >= set(LEARN) - {"sft"}
    assert users("reward_models/linear.py") & {"reward", "sft", "privatize"} == {"reward"}
    assert "grpo" in users("pipeline/rl/group.py")  # it is the program of rloo


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.launched], ids=lambda stage: stage.name)
def test_the_module_that_a_launcher_starts_is_that_stage(stage: Stage) -> None:
    """`accelerate launch -m` with the module of another stage would run, or refuse, that one."""
    assert f'main_for("{stage.name}")' in inspect.getsource(importlib.import_module(stage.module_name))


def test_a_change_is_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code.source_files("private_rlhf.stages.sft")
    digest = code._digest

    def other(path: Path) -> str:
        return "other" if path.name == "hf_trainer.py" else digest(path)

    monkeypatch.setattr(code, "_digest", other)
    after = code.source_files("private_rlhf.stages.sft")
    assert [name for name in after if after[name] != before.get(name)] == ["pipeline/lm/hf_trainer.py"]
    assert code.digest_of(after) != code.digest_of(before)


def test_all_files_are_those_of_both_packages() -> None:
    names = {Path(name).name for name in code.all_files()}
    assert {"runner.py", "losses.py", "bonus_fit.py", "report.html.j2"} <= names
