"""The costs in a plan: memory as `plan` has it, time as it was measured, and nothing else."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from private_rlhf.commands import costs
from private_rlhf.commands.memory import GIB, estimate, this_machine
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from support.pipeline_runs import TINY

ONE = World(0, 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    base_checkpoint(recipe(folder).model)
    return folder


def recipe(cache: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, TINY, [f"model.cache_dir={cache}", "model.dtype=float32", *overrides])


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], 12),
        (["sft.micro_batch_size=2"], 48),
        (["sft.max_steps=-1", "sft.epochs=2"], 2 * (534 // 8)),
    ],
)
def test_sft_takes_as_many_measured_passes_as_it_has_batches(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], passes: int
) -> None:
    """On a clock that is read twice a pass and ticks once between; other threads read the usual one."""
    ticks = count()
    monkeypatch.setattr(costs, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    assert costs.sft_seconds(recipe(cache, *overrides), tmp_path) == passes


def test_only_what_was_measured_is_a_number(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "sft_seconds", lambda *_: 100.0)
    run, plain, names = RunDir(tmp_path), recipe(cache), ["privatize", "sft", "ppo"]
    (tmp_path / "ppo").mkdir()
    run.complete("ppo", {"seconds": 41.3})
    new = costs.stage_costs(plain, run, names, ONE)
    assert new["privatize"] == "memory not known, time not known"
    assert re.fullmatch(r"up to \d\.\d GiB, 100 to 170 s \(all steps at the pace of .*\)", new["sft"])
    size = sum(estimate(plain, this_machine()).peaks["ppo"].values()) / GIB
    assert new["ppo"] == f"up to {size:.1f} GiB, its last run here took 41 s"
    shared = costs.stage_costs(plain, run, ["sft"], World(0, 2))
    assert shared["sft"].endswith(" GiB, time not known")  # one process here says little of two
    for unknown in (recipe(tmp_path / "empty"), recipe(cache, "data.demonstrations=release")):
        assert costs.stage_costs(unknown, run, ["sft"], ONE)["sft"].endswith("time not known")
    monkeypatch.setattr(costs, "SMALL", 1000)
    assert costs.stage_costs(plain, run, ["sft"], ONE)["sft"].endswith("time not known")
    absent = recipe(cache, "model.source=nobody/at-all")
    assert costs.stage_costs(absent, run, ["sft"], ONE) == {"sft": "memory not known, time not known"}
