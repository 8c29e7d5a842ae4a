"""The bar over a whole run, and the minutes left, from the manifests of finished stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.atomic import write_json
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.pace import BLOCKS
from private_rlhf.stages.pace import rest_of as rest_of_stages

MEASURED = {  # seconds of `make demo` on two cores of an EPYC beside other work
    "privatize": (1.0, {"events": 4050}),
    "sft": (58.2, {"steps": 33}),
    "reward": (47.9, {}),
    "ppo": (232.4, {}),
    "evaluate": (171.8, {}),
}


def run_after(folder: Path, last: str, measured: dict[str, tuple[float, dict[str, Any]]] | None = None) -> RunDir:
    """A run directory whose stages up to `last` are finished."""
    run, finished = RunDir(folder), list(measured or MEASURED)
    for name in finished[: finished.index(last) + 1]:
        seconds, report = (measured or MEASURED)[name]
        write_json(run.stage(name) / "manifest.json", {"stage": name, "seconds": seconds, "report": report})
    return run


def rest_of(recipe: Recipe, run: RunDir, name: str) -> str:
    return rest_of_stages(recipe, run, (*MEASURED, "report"), name)


def demo(*overrides: str) -> Recipe:
    return load_recipe(Recipe, Path("demo"), list(overrides))


@pytest.mark.parametrize(("starts", "last"), [("reward", "sft"), ("ppo", "reward"), ("evaluate", "ppo")])
def test_the_guess_is_within_half_of_what_the_demo_took(tmp_path: Path, starts: str, last: str) -> None:
    names = list(MEASURED)
    minutes = sum(MEASURED[name][0] for name in names[names.index(starts) :]) / 60
    guess = rest_of(demo(), run_after(tmp_path, last), starts)
    assert minutes / 1.5 < float(guess.split("about ")[1].split()[0]) < minutes * 1.5


def test_the_bar_grows_and_the_time_follows_the_machine(tmp_path: Path) -> None:
    bars = [rest_of(demo(), run_after(tmp_path / starts, last), starts).count("#")
            for starts, last in (("reward", "sft"), ("ppo", "reward"), ("evaluate", "ppo"))]  # fmt: skip
    assert 0 < bars[0] < bars[1] < bars[2] < BLOCKS
    slow = {name: (10 * seconds, report) for name, (seconds, report) in MEASURED.items()}
    fast = rest_of(demo(), run_after(tmp_path / "fast", "reward"), "ppo")
    assert int(rest_of(demo(), run_after(tmp_path / "slow", "reward", slow), "ppo").split()[-3]) >= 9 * int(
        fast.split()[-3]
    )


def test_more_answers_take_longer(tmp_path: Path) -> None:
    run = run_after(tmp_path, "reward")
    few, many = (rest_of(demo(f"ppo.iterations={count}"), run, "ppo") for count in (14, 140))
    assert int(many.split()[-3]) > 3 * int(few.split()[-3])


def test_nothing_is_guessed_before_a_stage_was_timed_or_of_an_unknown_number_of_texts(tmp_path: Path) -> None:
    fresh, done = RunDir(tmp_path / "fresh"), run_after(tmp_path / "done", "evaluate")
    assert rest_of(demo(), fresh, "privatize") == rest_of(demo(), fresh, "sft") == ""
    assert rest_of(demo(), done, "report") == ""
    recipe = demo()
    backbone = replace(recipe, reward=replace(recipe.reward, mode="lora"))
    assert rest_of(backbone, run_after(tmp_path / "lora", "sft"), "reward") == ""
