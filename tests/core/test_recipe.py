"""Rules across the keys of a recipe, checked before any work starts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.documents import read_mapping
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import DataConfig, Recipe, load
from private_rlhf.recipe.load import dump_yaml, load_recipe
from support.recipes import recipe_of

INF, NAN = float("inf"), float("nan")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ppo": {"minibatch_size": 5}}, "r: ppo: minibatch_size 5 must divide rollouts 16"),
    *(({aligner: {key: 5}}, f"r: {aligner}: {key} 5 must divide rollouts 16")
      for aligner in ("rloo", "grpo") for key in ("samples_per_prompt", "batch_size")),
    *(({aligner: {"samples_per_prompt": 1}}, "samples_per_prompt") for aligner in ("rloo", "grpo")),
    *(({"aligner": aligner, "ppo": ppo}, f"are for aligner ppo: remove them for {aligner}")
      for aligner in ("rloo", "grpo")
      for ppo in ({"extra_rewards": [{"weight": 1.0, "callable": "module:function"}]}, {"quantize": "4bit"})),
    ({"gvpo": {"samples_per_prompt": 5}}, "r: gvpo: samples_per_prompt 5 must divide batch_size 16"),
    ({"aligner": "gvpo", "ppo": {"quantize": "4bit"}}, r"ppo\.quantize is for aligner ppo: remove it for gvpo"),
    ({"ppo": {"warm_start": "regression", "reference_rollouts": True}}, "warm_start learns from the reference"),
    ({"reward": {"kappa": 0}, "ppo": {"warm_start": "regression", "baseline": False}},
     r"ppo\.warm_start requires ppo\.baseline or reward\.kappa > 0"),
    ({"ppo": {"quantize": "4bit", "lora": None}}, "r: ppo: lora must not be null with quantize"),
    ({"ppo": {"optimizer": "lion"}}, r"ppo\.optimizer"),
    *(({"ppo": {"kl_coef": 0.1, "kl_target": 6.0, **bounds}}, r"r: ppo: kl_coef 0\.1 must lie between kl_coef_min")
      for bounds in ({"kl_coef_min": 0.2}, {"kl_coef_max": 0.05})),
    *(({"ppo": {"kl_coef_max": bad}}, "kl_coef_max") for bad in (0, -1, INF, NAN)),
    # labels and their noise
    ({"privatize": {"epsilon": 1.0, "budget": 9.0, "budget_per": "person"}},
     "labeler_column must be given for budget_per: person"),
    ({"privatize": {"epsilon": 1.0, "budget": 0.0}}, "budget"),
    # the reward
    ({"reward": {"refit_ridge": 2.0}}, "refit_ridge must go with mode lora or full"),
    ({"reward": {"optimizer": "adamw_8bit"}}, "optimizer must go with mode lora or full"),
    ({"reward": {"group_by_length": True}}, "group_by_length must go with mode lora or full"),
    ({"reward": {"early_stopping": {}}}, "early_stopping must go with mode lora or full"),
    ({"reward": {"mode": "lora", "pooling": "last_sum"}}, "pooling last_sum must go with mode head"),
    ({"reward": {"pooling": "last_sum", "uncertainty": {"kind": "mc_dropout"}}}, "pooling last_sum must go with"),
    ({"reward": {"quantize": "4bit"}}, "set mode lora, not head"),
    ({"reward": {"mode": "full", "ridge": 1.0, "quantize": "4bit"}}, "set mode lora, not full"),
    ({"reward": {"uncertainty": {"kind": "elliptical"}, "reward_bound": None}}, "reward_bound must be a number"),
    ({"reward": {"uncertainty": {"kind": "ensemble", "heads": 1}}}, r"reward\.uncertainty\.heads"),
    ({"reward": {"uncertainty": {"kind": "laplace"}}}, r"reward\.uncertainty\.kind"),
    ({"reward": {"external": {"public": True}}}, r"reward\.external\.path' is required"),
    ({"reward": {"mode": "lora", "ridge": 1.0, "optimizer": "sgd", "trainer_args": {"optim": "sgd"}}},
     r"trainer_args\.optim and a key of this section say the same thing"),
    # losses
    *(({"reward": {"loss": name}}, r"r: reward\.loss: smoothing labels that randomised response has already")
      for name in ("label_smoothing", "smoothed")),
    ({"reward": {"mode": "full", "ridge": 1.0, "trainer_args": {"label_smoothing_factor": 0.1}}},
     r"trainer_args\.label_smoothing_factor is refused: smoothing labels"),
    ({"reward": {"loss": "bt"}}, r"reward\.loss: Input should be 'private_likelihood'"),
    *(({"dpo": {"trainer_args": {name: 0.1}}}, rf"trainer_args\.{name} shapes a loss of TRL's that is not computed")
      for name in ("loss_type", "label_smoothing", "use_weighting", "beta")),
]  # fmt: skip
"""Sections of a recipe, and words of its refusal."""


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_keys_that_do_not_fit_together_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(**sections)


def test_raw_evaluation_labels_need_the_declaration_that_they_are_public() -> None:
    with pytest.raises(UserError, match=r"data\.public_labels must be true for evaluation_labels: public"):
        recipe_of(evaluation_labels="public")
    assert recipe_of(evaluation_labels="public", data={"public_labels": True}).evaluation_labels == "public"
    with pytest.raises(UserError, match="evaluation_labels"):
        recipe_of(evaluation_labels="raw")


def noisy_counts(**keys: Any) -> dict[str, Any]:
    privatize = {"epsilon": 1.0, "count_epsilon": 0.5, **keys}
    return {"evaluation_labels": "laplace", "privatize": privatize, "data": {"public_labels": True}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"count_epsilon": None}, r"privatize\.count_epsilon must be given"),
        ({"epsilon": INF}, "laplace without a finite epsilon and a key"),
        ({"insecure_seed": 3}, "laplace without a finite epsilon and a key"),
        ({"budget": 1.25}, r"must be at most privatize\.budget 1\.25, got 1\.5"),
        *(({"count_epsilon": bad}, "count_epsilon") for bad in (0, -1, NAN, INF)),
    ],
)
def test_noisy_counts_need_their_epsilon_a_key_and_room_in_the_budget(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(**noisy_counts(**keys))


def test_keys_that_fit_are_taken() -> None:
    """Each on the right side of a rule above."""
    assert recipe_of(**noisy_counts(budget=1.5)).privatize.count_epsilon == 0.5
    person = {"epsilon": 1.0, "budget": 9.0, "budget_per": "person", "labeler_column": "who"}
    assert recipe_of(privatize=person).privatize.budget == 9.0
    assert recipe_of(ppo={"minibatch_size": 8}).ppo.rollouts == 16
    assert recipe_of(ppo={"quantize": "4bit", "optimizer": "adamw_8bit"}).ppo.optimizer == "adamw_8bit"
    for bounds in ({"kl_coef_min": 0.2}, {"kl_coef_max": 0.05}):
        assert recipe_of(ppo={"kl_coef": 0.1, **bounds}).ppo.kl_target is None  # fixed: nothing to bound
    assert recipe_of(ppo={"kl_coef": 0.1, "kl_target": 6.0, "kl_coef_min": 0.1, "kl_coef_max": 0.1}).ppo.kl_coef == 0.1
    assert recipe_of(aligner="gvpo", reward={"kappa": 0}, ppo={"baseline": False}).draws_references
    trained = {"ridge": 1.0, "optimizer": "adamw_8bit", "group_by_length": True, "quantize": "4bit",
               "early_stopping": {"every": 5}, "uncertainty": {"kind": "ensemble", "heads": 4}}  # fmt: skip
    assert recipe_of(reward={"mode": "lora", **trained}).reward.early_stopping.patience == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_steps_of_a_group_are_counted_in_whole_iterations(aligner: str) -> None:
    section = {"iterations": 3, "batch_size": 4, "epochs": 2, "save_every": 2}
    settings = getattr(recipe_of(**{aligner: section}), aligner)
    assert (settings.max_steps, settings.save_steps) == (3 * 8, 2 * 8)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_trained_backbone_has_two_ridges_and_needs_neither(mode: str) -> None:
    assert recipe_of(reward={"mode": mode}).reward.refit_ridge is None
    given = recipe_of(reward={"mode": mode, "ridge": 1.0, "refit_ridge": 2.0}).reward
    assert (given.ridge, given.refit_ridge) == (1.0, 2.0)


def test_only_a_finite_epsilon_under_a_key_is_private() -> None:
    assert recipe_of().private
    assert not recipe_of(privatize={"epsilon": 1.0, "insecure_seed": 0}).private
    assert not recipe_of(privatize={"epsilon": INF}, data={"public_labels": True}).private


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        recipe_of().ppo.rollouts = 3  # type: ignore[misc]


def test_own_preferences_bring_their_own_prompts() -> None:
    """A recipe that names its preferences alone never trains or evaluates on the embedded task."""
    for preferences, expected in (
        ("embedded", ("embedded", "embedded", "embedded")),
        ("prefs.jsonl", ("release", "release", "evaluation")),
    ):
        data = DataConfig(preferences=preferences)
        assert (data.demonstrations, data.prompts, data.evaluation_prompts) == expected
    assert DataConfig(preferences="prefs.jsonl", prompts="mine.txt").prompts == "mine.txt"


def test_effort_gives_the_sizes_that_a_recipe_does_not_state(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "{name: r, effort: hours, evaluation_labels: private, model: {source: tiny}, data: {preferences: embedded},"
        " privatize: {epsilon: 1}, sft: {max_steps: 7}, ppo: {max_prompts: null, iterations: 9}}"
    )
    recipe = load_recipe(Recipe, path, ["ppo.iterations=11"])
    assert (recipe.sft.max_steps, recipe.ppo.iterations, recipe.ppo.max_prompts) == (7, 11, None)
    assert (recipe.ppo.rollouts, recipe.evaluate.num_prompts) == (64, 250)
    assert load_recipe(Recipe, path, ["effort=full"]).ppo.rollouts == 64
    path.write_text(dump_yaml(recipe))  # a saved recipe states every key
    assert load_recipe(Recipe, path, ["effort=minutes"]) == replace(recipe, effort="minutes")
    assert recipe.sft.max_demonstrations is None  # seven steps that the recipe states are of all rows
    assert (recipe.reward.max_pairs, recipe.dpo.max_pairs) == (40_000, 6400)
    with pytest.raises(UserError, match="effort: Input should be 'minutes', 'hours' or 'full'"):
        load_recipe(Recipe, path, ["effort=days"])


def test_more_effort_is_never_less_of_anything() -> None:
    devices = read_mapping(Path(load.__file__).with_name("efforts.yaml"))
    sizes: dict[str, dict[str, list[float]]] = {}
    for device, efforts in devices.items():
        assert list(efforts) == ["minutes", "hours", "full"]
        recipes = [recipe_of(**each) for each in efforts.values()]
        values = {f"{section}.{key}": [getattr(getattr(recipe, section), key) for recipe in recipes]
                  for section, keys in efforts["hours"].items() for key in keys}  # fmt: skip
        sizes[device] = {key: [math.inf if each is None else each for each in row] for key, row in values.items()}
        assert all(row == sorted(row) for row in sizes[device].values())
    assert sizes["cpu"].keys() == sizes["gpu"].keys()
    for key, row in sizes["cpu"].items():
        assert all(here <= there for here, there in zip(row, sizes["gpu"][key], strict=True)), key


def test_minutes_on_a_gpu_hold_as_much_as_hours_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "{name: r, effort: minutes, evaluation_labels: private, model: {source: tiny}, privatize: {epsilon: 1}}"
    )
    here = load_recipe(Recipe, path, ["effort=hours"])
    with monkeypatch.context() as patch:
        patch.setattr(load, "device_type", lambda: pytest.fail("a recipe without an effort looks for the device"))
        assert load_recipe(Recipe, path, ["effort=null"]).effort is None
    monkeypatch.setattr(load, "device_type", lambda: "cuda")
    assert load_recipe(Recipe, path) == replace(here, effort="minutes")
    assert load_recipe(Recipe, path, ["effort=hours"]).reward.max_pairs == 200_000
