"""Recipes: strict keys, typed values, overrides, and errors that name the culprit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import (
    NO_EFFECT,
    apply_overrides,
    dump_yaml,
    effective,
    load_recipe,
    nearest,
    parse,
    to_tree,
)
from support.recipes import SMALLEST


def tree(**sections: Any) -> dict[str, Any]:
    return {**SMALLEST, **sections}


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse(Recipe, given, "r.yaml")
    message = str(caught.value)
    assert message.startswith("r.yaml: ")
    assert "\n" not in message
    return message


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "path", "meant"),
    [
        ({"rewards": {}}, "rewards", "reward"),
        ({"reward": {"ridgee": 1.0}}, "reward.ridgee", "ridge"),
        ({"ppo": {"lora": {"rnak": 4}}}, "ppo.lora.rnak", "rank"),  # behind `LoraSettings | None`
        ({"reward": {"lora": {"droput": 0.1}}}, "reward.lora.droput", "dropout"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_key(
    sections: dict[str, Any], path: str, meant: str
) -> None:
    message = refusal(tree(**sections))
    assert f"unknown key '{path}'" in message
    assert f"did you mean '{meant}'?" in message


@pytest.mark.parametrize("bad", [{"privatize": {"epsilon": True}}, {"ppo": {"rollouts": False}}, {"name": True}])
def test_true_and_false_are_no_numbers(bad: dict[str, Any]) -> None:
    assert "must be a number or a text, got " in refusal(tree(**bad))


def test_a_key_like_no_other_gets_the_list_of_keys() -> None:
    assert nearest("zzz", ["beta", "alpha"]) == "; valid keys here: alpha, beta"
    keys = "valid keys here: dropout, last_layers, rank, scale, target_modules"
    assert keys in refusal(tree(sft={"lora": {"zzzz": 1}}))


def test_a_missing_required_key_is_named() -> None:
    assert "key 'privatize' is required" in refusal({k: v for k, v in tree().items() if k != "privatize"})
    assert "key 'privatize.epsilon' is required" in refusal(tree(privatize={}))
    assert "key 'evaluation_labels' is required" in refusal(
        {k: v for k, v in tree().items() if k != "evaluation_labels"}
    )


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "path", "shown"),
    [
        ({"reward": {"epochs": "three"}}, "reward.epochs", "'three'"),
        ({"ppo": {"rollouts": 2.5}}, "ppo.rollouts", "2.5"),
        ({"ppo": {"rollouts": 0}}, "ppo.rollouts", "0"),
        ({"ppo": {"top_p": 1.5}}, "ppo.top_p", "1.5"),
        ({"ppo": {"kl_coef": math.nan}}, "ppo.kl_coef", "nan"),
        ({"reward": {"loss": "hinge"}}, "reward.loss", "'hinge'"),
        ({"name": "a/b"}, "name", "'a/b'"),
        ({"sft": [1, 2]}, "sft", "[1, 2]"),
    ],
)
def test_an_ill_typed_value_is_named_with_its_key(sections: dict[str, Any], path: str, shown: str) -> None:
    message = refusal(tree(**sections))
    assert message.startswith(f"r.yaml: {path}: ")
    assert f"(given {shown})" in message


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("5E-7", 5e-7), ("1", 1.0)])
def test_scientific_notation_is_a_number(text: str, value: float, tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-6 as a string; a recipe must not."""
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(tree()) + f"ppo: {{learning_rate: {text}}}\n")
    assert load_recipe(Recipe, path).ppo.learning_rate == value
    assert load_recipe(Recipe, path, ["ppo.learning_rate=" + text]).ppo.learning_rate == value


def test_infinity_is_a_number_and_needs_public_labels() -> None:
    privatize = yaml.safe_load("{epsilon: .inf}")
    assert parse(Recipe, tree(privatize=privatize, data={"public_labels": True}), "r").privatize.epsilon == math.inf
    assert "data.public_labels must be true" in refusal(tree(privatize=privatize))


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_reach_any_depth_and_leave_the_tree_alone() -> None:
    before = tree(sft=None)
    after = apply_overrides(before, ["reward.lora.rank=3", "sft.epochs=2", "name=y", "ppo.lora=null"])
    assert after["reward"] == {"lora": {"rank": 3}}
    assert after["sft"] == {"epochs": 2}
    assert after["name"] == "y"
    assert after["ppo"] == {"lora": None}
    assert before == tree(sft=None)


def test_the_last_override_wins() -> None:
    assert apply_overrides({}, ["a.b=1", "a.b=2"]) == {"a": {"b": 2}}
    assert apply_overrides({}, ["a=x=y"]) == {"a": "x=y"}


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("reward.epochs", "is not of the form section.key=value"),
        ("=3", "is not of the form section.key=value"),
        ("name.first=3", "'name' is a value, not a section"),
        ("name=[1", "the value is not valid YAML"),
    ],
)
def test_a_bad_override_is_quoted(override: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides(tree(), [override])
    assert f"'{override}'" in str(caught.value)
    assert complaint in str(caught.value)


# --- files ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    epsilon=st.floats(1e-3, 50),
    rate=st.floats(1e-9, 1),
    rank=st.integers(1, 64) | st.none(),
    prompt=st.none() | st.text(max_size=20),
    extra=st.dictionaries(st.text("abc", min_size=1), st.integers() | st.text() | st.booleans(), max_size=3),
)
def test_a_dumped_recipe_loads_to_itself(
    epsilon: float, rate: float, rank: int | None, prompt: str | None, extra: dict[str, Any]
) -> None:
    recipe = parse(
        Recipe,
        tree(
            model={"source": "tiny", "system_prompt": prompt},
            privatize={"epsilon": epsilon},
            ppo={"learning_rate": rate, "lora": None if rank is None else {"rank": rank}},
            sft={"trainer_args": extra},
        ),
        "given",
    )
    assert parse(Recipe, yaml.safe_load(dump_yaml(recipe)), "dumped") == recipe


def test_central_label_dp_is_refused_and_recipes_that_go_without_it_load() -> None:
    """Saved recipes of earlier versions state both keys."""
    for trust in (None, "labeller"):
        assert parse(Recipe, tree(privatize={"epsilon": 1.0, "trust": trust, "delta": None}), "saved").private
    summed = {"epsilon": 1.0, "trust": "holder", "delta": 1e-6}
    for wanted in (tree(privatize=summed), apply_overrides(tree(), ["privatize.trust=holder"])):
        assert refusal(wanted) == (
            "r.yaml: privatize.trust: must be labeller or left out, since one noisy sum of the labels is a study of"
            " lab/ (private_rlhf_lab.benches.central_against_local): remove it (given 'holder')"
        )


def test_infinity_survives_the_dump() -> None:
    recipe = parse(Recipe, tree(privatize={"epsilon": math.inf}, data={"public_labels": True}), "given")
    assert parse(Recipe, yaml.safe_load(dump_yaml(recipe)), "dumped") == recipe


def test_the_dump_writes_every_key_out() -> None:
    dumped = to_tree(parse(Recipe, tree(), "given"))
    assert dumped["model"]["cache_dir"] == "runs/cache"
    assert dumped["ppo"]["lora"] == {
        "rank": 16, "scale": 2.0, "dropout": 0.0, "target_modules": "all-linear", "last_layers": None,
    }  # fmt: skip
    assert set(dumped) == {
        "name", "seed", "effort", "evaluation_labels", "model", "data", "privatize", "online", "sft", "reward",
        "aligner", "rollout", "ppo", "dpo", "rloo", "grpo", "gvpo", "evaluate",
    }  # fmt: skip


# --- keys without an effect -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    seen: Annotated[int, NO_EFFECT]
    used: int


@dataclass(frozen=True)
class Outer:
    one: Inner | None
    many: list[Inner]
    shown: Annotated[list[str], "something else", NO_EFFECT]
    kept: Annotated[str, "something else"]


def test_marked_keys_are_left_out_at_any_depth() -> None:
    inner = {"seen": 1, "used": 2}
    whole = {"one": inner, "many": [inner, inner], "shown": ["a"], "kept": "b", "unknown": {"seen": 1}}
    left = {"used": 2}
    assert effective(Outer, whole) == {"one": left, "many": [left, left], "kept": "b", "unknown": {"seen": 1}}
    assert effective(Outer, {"one": None}) == {"one": None}
    assert inner == {"seen": 1, "used": 2}


def test_what_a_recipe_may_change_without_effect() -> None:
    """No other key may: every one of them is part of what a stage computes, or of what it costs and where."""
    whole = to_tree(parse(Recipe, tree(), "r"))
    left = effective(Recipe, whole)
    gone = {f"{section}.{key}" for section, keys in whole.items() if isinstance(keys, dict) for key in keys}
    gone -= {f"{section}.{key}" for section, keys in left.items() if isinstance(keys, dict) for key in keys}
    accepted = {"privatize.corrects_column", "privatize.add_up_renamed"}  # what is accepted, not what is drawn
    accepted |= {f"privatize.{name}" for name in ("max_events_per_person", "person_budget", "person_questions")}
    accepted |= {"privatize.trust", "privatize.delta"}
    accepted |= {"data.signer", "data.split", "evaluate.truth", "reward.pooling"}  # these while they are null
    accepted |= {"ppo.warm_start", "ppo.polish", "sft.max_demonstrations", "dpo.max_pairs", "reward.max_pairs"}
    accepted |= {f"privatize.{name}" for name in ("epsilon_column", "epsilon_levels", "levels_before_labels")}
    accepted |= {f"data.{name}" for name in ("format", "label_column", "labels", "ties", "pairs", "special_tokens")}
    accepted |= {"data.message_keys", "reward.accept_coin", "data.accept_odd", "privatize.add_up_keys"}
    assert gone == {"ppo.sample_every", "ppo.sample_count", "ppo.report_to", "ppo.report_samples"} | accepted
    assert whole.keys() - left.keys() == {"effort", "online", "rollout"}  # while they are null, or in other keys
