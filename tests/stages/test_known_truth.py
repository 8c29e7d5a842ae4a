"""The known reward that an evaluation measures J by: the embedded one, one that a package adds, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.embedded.truth import true_reward
from private_rlhf.evaluation import truths
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.declarations import preflight
from private_rlhf.stages.evaluate import judge_notes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class Lengths:
    """A truth that is the answer's length."""

    description = "a known reward r* by length"
    missing: str | None = None

    @classmethod
    def check(cls) -> None:
        if cls.missing:
            raise UserError(cls.missing)

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
        return torch.tensor([len(answer) for answer in answers], dtype=torch.float64)


def known_truth(recipe: Recipe) -> Callable[[str, str], float] | None:
    """r* of a recipe, as the stage takes it."""
    name = truths.truth_name(recipe.evaluate.truth, recipe.data.evaluation_prompts)
    return None if name is None else truths.reward_function(name)


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets exactly these truths be installed, all of them `Lengths`."""
    monkeypatch.setattr(EntryPoint, "load", lambda self: Lengths)

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [EntryPoint(name, "x:y", group)] if group == "private_rlhf.truths" and name in names else []

    monkeypatch.setattr(truths, "entry_points", entry_points)


@pytest.mark.parametrize(
    ("name", "truth", "note"),
    [
        ("demo", true_reward, "truth: the embedded task's known reward r*"),
        ("own_data", None, "no ground truth exists for this data"),
    ],
)
def test_the_truth_of_a_recipe(name: str, truth: object, note: str) -> None:
    recipe = load_recipe(Recipe, CONFIGS / f"{name}.yaml")
    assert known_truth(recipe) is truth
    assert note in judge_notes(recipe)


def test_a_truth_that_a_package_adds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "hh_truth")
    recipe = load_recipe(Recipe, CONFIGS / "hh_truth.yaml")
    reward = known_truth(recipe)
    assert reward is not None
    assert reward("p", "four") == 4.0
    assert "truth: hh_truth, a known reward r* by length" in judge_notes(recipe)


@pytest.mark.parametrize(
    ("names", "missing", "message"),
    [
        ((), None, r"^evaluate\.truth must be .* installed truth, got hh_truth: install .*private-rlhf-lab"),
        (("hh_truth",), "its model is not installed", r"^its model is not installed$"),
    ],
)
def test_what_is_not_installed_stops_before_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], missing: str | None, message: str
) -> None:
    install(monkeypatch, *names)
    monkeypatch.setattr(Lengths, "missing", missing)
    recipe = load_recipe(Recipe, CONFIGS / "hh_truth.yaml")
    with pytest.raises(UserError, match=message):
        preflight(recipe, ["evaluate"], World(0, 1))


def test_a_truth_whose_package_is_broken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truths, "entry_points", lambda group, name: [EntryPoint(name, "no_such_package:Truth", group)])
    with pytest.raises(UserError, match=r"^evaluate\.truth x cannot be loaded \(No module named 'no_such_package'\)"):
        truths.load_truth("x")
