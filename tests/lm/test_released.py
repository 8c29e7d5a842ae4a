"""What lies beside a released checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.model_card import Provenance, Rendering, policy_text, read_rendering, write_beside
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import parse


def card_of(folder: Path, renderer: Renderer, **data: Any) -> str:
    """The card of stage sft, which reads no label."""
    tree = {"name": "one", "evaluation_labels": "private", "model": {"source": "tiny"}, "privatize": {"epsilon": 1.0}}
    recipe = parse(Recipe, {**tree, "data": data}, "r")
    origin = Provenance("sft", recipe.name, recipe.model, recipe.data, recipe.override)
    write_beside(folder, origin, renderer, None, policy_text("texts", renderer, recipe.ppo))
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_rendering_survives(tmp_path: Path) -> None:
    assert "No preference label was read" in card_of(tmp_path, Renderer(None, 10, 7, "", {"think": False}))
    assert read_rendering(tmp_path) == Rendering("", 7, {"think": False})


def test_an_overruled_guard_is_on_the_card(tmp_path: Path) -> None:
    assert "**NOT PRIVATE**" in card_of(tmp_path, Renderer(None, 10, 7), allow_label_overlap=True)


def test_a_foreign_checkpoint_has_the_defaults(tmp_path: Path) -> None:
    assert read_rendering(tmp_path) == Rendering()


@pytest.mark.parametrize("content", ["", "[1]", '{"cap": 3}'])
def test_a_damaged_rendering_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rendering.json").write_text(content)
    with pytest.raises(UserError, match=r"rendering\.json is damaged"):
        read_rendering(tmp_path)
