"""Architectures that cannot be trained here are refused in one line, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, family_checkpoint

from pipeline.core.config import parse
from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.world import World
from pipeline.lm.architectures import check_architecture
from pipeline.stages.table import preflight

TEXTS = ["the quick brown fox"]
REFUSED = {
    "Falcon-H1": r"\(falcon_h1\) under sft\.lora: .*incompatible with Mamba-based models.*: name other target_modules",
    "Gemma-3 multimodal": r"\(gemma3\) has several modalities: give a text-only checkpoint",
    "Mamba": r"\(mamba\) keeps a state instead of keys and values",
}


def recipe(source: Path, **sections: Any) -> Recipe:
    model = {"source": str(source), "max_prompt_tokens": 96, "max_response_tokens": 12, **sections.pop("model", {})}
    tree = {"name": "x", "evaluation_labels": "private", "privatize": {"epsilon": 1.0}, "model": model, **sections}
    return parse(Recipe, tree, "r")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken_or_refused_in_one_line(family: str, tmp_path: Path) -> None:
    checked = recipe(family_checkpoint(family, tmp_path, TEXTS))
    if family not in REFUSED:
        check_architecture(checked, str(tmp_path))
        return
    with pytest.raises(UserError, match=REFUSED[family]) as caught:
        preflight(checked, ["sft"], World(0, 1))
    assert "\n" not in str(caught.value)


def test_falcon_h1_is_taken_with_modules_that_peft_takes(tmp_path: Path) -> None:
    source = family_checkpoint("Falcon-H1", tmp_path, TEXTS)
    lora = {"lora": {"target_modules": ["q_proj", "v_proj"]}}
    check_architecture(recipe(source, sft=lora, ppo=lora), str(source))


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    source = family_checkpoint("Mixtral", tmp_path, TEXTS)
    with pytest.raises(UserError, match="has experts, which 4 bits are not for"):
        check_architecture(recipe(source, ppo={"quantize": "4bit"}), str(source))


def test_a_revision_is_for_hub_ids(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"model\.revision is for hub ids, and model\.source .* is a folder"):
        preflight(recipe(checkpoint, model={"revision": "main"}), ["sft"], World(0, 1))
    with pytest.raises(UserError, match="revision is for hub ids, and source is tiny"):
        recipe(checkpoint, model={"source": "tiny", "revision": "main"})


def test_what_the_stages_set_is_no_variable_of_the_template(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="chat_template_kwargs: tokenize is set by the stages themselves"):
        recipe(checkpoint, model={"chat_template_kwargs": {"tokenize": False}})
