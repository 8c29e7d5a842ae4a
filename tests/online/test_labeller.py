"""The labeller that a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.labelling.labellers import Crowd, Labeller, Simulated
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.online.pool import noise_at
from private_rlhf.online.rounds import ask_round, make_labeller
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "online_demo.yaml"


def made(folder: Path, epsilon: float) -> Labeller:
    options = ["online.labeller=page", f"online.folder={folder}", f"privatize.epsilon={epsilon}"]
    recipe = load_recipe(Recipe, CONFIG, options)
    assert recipe.online is not None
    return make_labeller(recipe.online, recipe.privatize, recipe.seed, folder / "own")


def test_a_page_s_store_is_begun_by_its_server_and_has_the_recipe_s_epsilon(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="label serve"):
        made(tmp_path / "s", 1.0)
    AnswerStore(tmp_path / "s", 1.0, 8.0)
    assert made(tmp_path / "s", 1.0).epsilon == 1.0
    with pytest.raises(UserError, match="other --store"):
        made(tmp_path / "s", 2.0)


def test_a_store_of_levels_has_the_recipe_s_epsilon_as_its_largest(tmp_path: Path) -> None:
    AnswerStore(tmp_path / "s", (0.5, 4.0), 8.0)
    assert noise_at(made(tmp_path / "s", 4.0).mechanism, [4.0, 0.5]).flip_prob.tolist() == [
        LabelNoise.of(epsilon).flip_prob for epsilon in (4.0, 0.5)]  # fmt: skip
    with pytest.raises(UserError, match="other --store"):
        made(tmp_path / "s", 0.5)


def test_answers_of_other_terms_are_asked_anew(tmp_path: Path) -> None:
    """Of another ε, labeller or crowd: an answer that was drawn at ε = 9 would be released as one at ε = 0.1."""
    questions = [make_question(f"q{i}", "p", f"yes {i}", f"no {i}") for i in range(40)]
    turns = iter(range(9))

    def ask(kind: Callable[..., Labeller], epsilon: float, **terms: Any) -> dict[str, Any]:
        labeller = kind(tmp_path / str(next(turns)), epsilon, lambda _: 3.0, **terms)
        return dict(ask_round(tmp_path / "000.json", questions, labeller)["answers"])

    first = ask(Simulated, 9.0)
    assert ask(Simulated, 9.0) == first
    kept = (tmp_path / "000.json").stat().st_ino
    assert ask(Simulated, 9.0) == first
    assert (tmp_path / "000.json").stat().st_ino == kept
    assert ask(Simulated, 0.1) != first
    assert ask(Simulated, 9.0) == first
    assert ask(Crowd, 9.0, persons=8, most=9, laziness=1.0) != first
