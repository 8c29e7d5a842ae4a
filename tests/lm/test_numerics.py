"""Which dtype a run gets: the hardware's, the recipe's or its own; what is said about it, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.lm import numerics
from private_rlhf.lm.kernels import Processor
from private_rlhf.lm.numerics import affordable, fast_dtype, numeric_facts, resolve_dtype
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import dump_yaml, load_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ONE = World(0, 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether this CPU multiplies bfloat16 in hardware."""

    def become(bfloat16: bool) -> None:
        made = Processor(bfloat16, "in hardware" if bfloat16 else "it would emulate it")
        monkeypatch.setattr(numerics, "processor", lambda: made)
        monkeypatch.setattr(numerics, "device_type", lambda: "cpu")

    return become


def recipe(*overrides: str) -> Recipe:
    return load_recipe(Recipe, CONFIGS / "tiny.yaml", overrides)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_leaves_the_dtype_to_the_machine(path: Path) -> None:
    assert load_recipe(Recipe, path).model.dtype == "auto"


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_what_the_hardware_multiplies_fast_and_says_why(
    machine: Callable[[bool], None], capsys: pytest.CaptureFixture[str], tmp_path: Path, fast: bool, dtype: str
) -> None:
    machine(fast)
    assert resolve_dtype(recipe().model, None, tmp_path / "run", ONE).dtype == dtype
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"model.dtype auto: {dtype}; {'in hardware' if fast else 'it would emulate it'}" in said
    resolve_dtype(recipe().model, None, tmp_path / "run", World(1, 1))
    assert not capsys.readouterr().err  # only the main process says it


@pytest.mark.parametrize("began", ["float32", "bfloat16"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_run_keeps_the_dtype_it_began_with(
    machine: Callable[[bool], None], capsys: pytest.CaptureFixture[str], tmp_path: Path, began: str, fast: bool
) -> None:
    machine(fast)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe(f"model.dtype={began}")))
    begun = RunDir(tmp_path).saved("model", "dtype")
    assert resolve_dtype(recipe().model, begun, tmp_path, ONE).dtype == began
    said = capsys.readouterr().err
    if fast == (began == "bfloat16"):
        assert not said
    elif fast:
        assert f"auto: float32, with which {tmp_path} began" in said
    else:
        assert "bfloat16 is slow here (it would emulate it)" in said
        assert "which starts the run anew" in said


def test_a_stated_dtype_is_obeyed_and_an_emulated_one_gets_a_line_with_the_remedy(
    machine: Callable[[bool], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for fast in (True, False):
        machine(fast)
        for dtype in ("float32", "bfloat16"):
            model = recipe(f"model.dtype={dtype}").model
            assert resolve_dtype(model, None, tmp_path, ONE).dtype == dtype
            said = capsys.readouterr().err
            assert bool(said) == (dtype == "bfloat16" and not fast)
            assert not said or (said.count("\n") == 1 and "model.dtype=float32" in said)


@pytest.mark.thorough
def test_the_resolved_dtype_is_in_the_fingerprint_the_saved_recipe_and_the_environment(
    workspace: Any, finished_run: Path
) -> None:
    import json

    import yaml

    saved = yaml.safe_load((finished_run / "recipe.yaml").read_text())
    environment = json.loads((finished_run / "environment.json").read_text())
    assert saved["model"]["dtype"] == environment["dtype"] == "float32"
    assert environment["device"] == "cpu" or torch.accelerator.is_available()
    assert set(environment) > {"dtype_reason", "threads", "kernels", "cpu_capability"}
    assert "Dtype of frozen weights" in (finished_run / "report" / "report.html").read_text()
    from private_rlhf.runner import settings_fingerprint
    from private_rlhf.stages.declarations import stage_of

    sft = stage_of("sft")
    prints = {settings_fingerprint(sft, recipe(f"model.dtype={dtype}")) for dtype in ("float32", "bfloat16")}
    assert len(prints) == 2


def test_gpus_have_it_by_their_own_word_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(1) or True)
    assert fast_dtype("cuda")[0] == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert fast_dtype("cuda")[0] == "float32"
    assert asked
    with pytest.raises(UserError, match="device mps is untested: set ACCELERATE_USE_CPU=true"):
        fast_dtype("mps")


def test_checkpoints_in_an_emulated_dtype_are_read_in_float32(machine: Callable[[bool], None]) -> None:
    machine(False)
    assert affordable(torch.bfloat16, "cpu") == affordable(torch.float32, "cpu") == torch.float32
    machine(True)
    assert affordable(torch.bfloat16, "cpu") == torch.bfloat16
    assert affordable(torch.float32, "cpu") == torch.float32


def test_the_environment_says_how_this_machine_computes() -> None:
    facts = numeric_facts("float32")
    assert facts["dtype"] == "float32"
    assert facts["kernels"] == "plain" or "rows" in facts["kernels"]
    assert facts["threads"] >= 1
