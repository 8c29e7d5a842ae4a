"""Rules across the keys of a recipe, checked before any work starts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.config import parse
from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe


def build(**sections: Any) -> Recipe:
    smallest = {
        "name": "x",
        "evaluation_labels": "private",
        "model": {"source": "tiny"},
        "privatize": {"epsilon": 1.0},
    }
    return parse(Recipe, {**smallest, **sections}, "r")


def test_a_minibatch_divides_the_rollouts() -> None:
    with pytest.raises(UserError, match="r: ppo: minibatch_size 5 must divide rollouts 16"):
        build(ppo={"minibatch_size": 5})
    assert build(ppo={"minibatch_size": 8}).ppo.rollouts == 16


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_trained_backbone_needs_the_ridge_of_its_bonus(mode: str) -> None:
    with pytest.raises(UserError, match="r: reward: ridge must be given"):
        build(reward={"mode": mode})
    assert build(reward={"mode": mode, "ridge": 1.0}).reward.mode == mode


def test_raw_evaluation_labels_need_the_declaration_that_they_are_public() -> None:
    with pytest.raises(UserError, match=r"evaluation_labels: public needs data\.public_labels: true"):
        build(evaluation_labels="public")
    assert build(evaluation_labels="public", data={"public_labels": True}).evaluation_labels == "public"
    with pytest.raises(UserError, match="evaluation_labels"):
        build(evaluation_labels="raw")


def test_only_a_finite_epsilon_under_a_key_is_private() -> None:
    assert build().private
    assert not build(privatize={"epsilon": 1.0, "insecure_seed": 0}).private
    assert not build(privatize={"epsilon": float("inf")}, data={"public_labels": True}).private


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        build().ppo.rollouts = 3  # type: ignore[misc]
