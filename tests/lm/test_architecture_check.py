"""Architectures that cannot be trained here are refused in one line, before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.lm.base_models import base_config, check_architecture, tiny_config
from private_rlhf.recipe import LoraSettings, Recipe
from private_rlhf.stages.declarations import preflight
from support.families import FAMILIES, family_checkpoint
from support.recipes import recipe_of

TEXTS = ["the quick brown fox"]
OTHER_MODULES = {"lora": {"target_modules": ["c_attn"]}}
REFUSED = {
    "Falcon-H1": r"\(falcon_h1\) under sft\.lora: .*incompatible with Mamba-based models.*: name other target_modules",
    "Gemma-3 multimodal": r"\(gemma3\) must be text-only, got several modalities: give",
    "Mamba": r"\(mamba\) must keep keys and values",
}


def recipe(source: Path, **sections: Any) -> Recipe:
    model = {"source": str(source), "max_prompt_tokens": 96, "max_response_tokens": 12, **sections.pop("model", {})}
    return recipe_of(model=model, **sections)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken_or_refused_in_one_line(family: str, tmp_path: Path) -> None:
    checked = recipe(family_checkpoint(family, tmp_path, TEXTS))
    if family not in REFUSED:
        check_architecture("x", base_config(checked.model), checked.adapters, None, checked.four_bit)
        return
    with pytest.raises(UserError, match=REFUSED[family]) as caught:
        preflight(checked, ["sft"], World(0, 1))
    assert "\n" not in str(caught.value)


def test_falcon_h1_is_taken_with_modules_that_peft_takes(tmp_path: Path) -> None:
    source = family_checkpoint("Falcon-H1", tmp_path, TEXTS)
    lora = {"lora": {"target_modules": ["q_proj", "v_proj"]}}
    checked = recipe(source, sft=lora, ppo=lora)
    check_architecture("x", base_config(checked.model), checked.adapters, None, checked.four_bit)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tied_embeddings_take_no_adapter(name: str) -> None:
    config, adapter = tiny_config(512, 2, 0), LoraSettings(target_modules=["q_proj", name])
    rule = rf"^sft\.lora\.target_modules must have no embeddings or output layer, .* got \['q_proj', '{name}'\]: leave"
    with pytest.raises(UserError, match=rule):
        check_architecture("x", config, {"sft.lora": adapter})
    check_architecture("x", config, {"reward.lora": LoraSettings(target_modules=["embed_tokens"])})
    config.tie_word_embeddings = False
    check_architecture("x", config, {"sft.lora": adapter})


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    source = family_checkpoint("Mixtral", tmp_path, TEXTS)
    checked = recipe(source, ppo={"quantize": "4bit"})
    with pytest.raises(UserError, match="has experts, which 4 bits are not for"):
        check_architecture("x", base_config(checked.model), checked.adapters, None, checked.four_bit)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"reward": {"num_layers": 3}}, r"reward\.num_layers must be at most 2, the layers of .*, got 3: lower it"),
        ({"sft": OTHER_MODULES}, r"sft\.lora\.target_modules must be .*'c_attn'"),
        ({"ppo": OTHER_MODULES}, r"ppo\.lora\.target_modules must be .*'c_attn'"),
        ({"reward": {"mode": "lora", **OTHER_MODULES}}, r"reward\.lora\.target_modules must be .*'c_attn'"),
        ({"reward": {"uncertainty": {"kind": "mc_dropout"}}}, r"reward\.uncertainty\.kind mc_dropout: .* no active"),
        ({"model": {"max_prompt_tokens": 501}}, r"make 513 tokens, and .* has 512 positions: lower one of them"),
    ],
)
@pytest.mark.parametrize("built_in", [True, False])
def test_what_the_config_tells_is_checked_before_any_stage(
    checkpoint: Path, sections: dict[str, Any], said: str, built_in: bool
) -> None:
    model = {**sections.get("model", {}), **({"source": "tiny"} if built_in else {})}
    checked = recipe(checkpoint, **{**sections, "model": model})
    with pytest.raises(UserError, match=said) as caught:
        preflight(checked, ["sft", "reward", "ppo"], World(0, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 3}, r"key-value heads that divide 4, got 3: give another checkpoint"),
        ({"vocab_size": 2}, r"its tokenizer has .* at id \d+, and its model has 2 ids: give a checkpoint whose"),
        ({"vocab_size": 2, "pad_token_id": 7}, "Padding_idx must be within num_embeddings: correct its config"),
    ],
)
def test_a_config_that_contradicts_itself(
    checkpoint: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": None} | changed
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said) as caught:
        preflight(recipe(folder), ["sft"], World(0, 1))
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_is_not_here_is_left_to_its_stage(checkpoint: Path) -> None:
    preflight(recipe(checkpoint, model={"source": "nobody/has-this"}), ["sft", "reward"], World(0, 1))


def test_a_revision_is_for_hub_ids(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"model\.revision is for hub ids, and model\.source .* is a folder"):
        preflight(recipe(checkpoint, model={"revision": "main"}), ["sft"], World(0, 1))
    with pytest.raises(UserError, match="revision is for hub ids, and source is tiny"):
        recipe(checkpoint, model={"source": "tiny", "revision": "main"})


def test_what_the_stages_set_is_no_variable_of_the_template(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="chat_template_kwargs must not hold tokenize, which the stages set"):
        recipe(checkpoint, model={"chat_template_kwargs": {"tokenize": False}})
