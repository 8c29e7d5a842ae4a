"""Rules across the keys of a recipe, checked before any work starts."""

from __future__ import annotations

from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import DataConfig, Recipe
from support.recipes import recipe_of


def test_a_minibatch_divides_the_rollouts() -> None:
    with pytest.raises(UserError, match="r: ppo: minibatch_size 5 must divide rollouts 16"):
        recipe_of(ppo={"minibatch_size": 5})
    assert recipe_of(ppo={"minibatch_size": 8}).ppo.rollouts == 16


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_groups_and_batches_divide_the_rollouts(aligner: str) -> None:
    with pytest.raises(UserError, match=f"r: {aligner}: samples_per_prompt 5 must divide rollouts 16"):
        recipe_of(**{aligner: {"samples_per_prompt": 5}})
    with pytest.raises(UserError, match=f"r: {aligner}: batch_size 5 must divide rollouts 16"):
        recipe_of(**{aligner: {"batch_size": 5}})
    with pytest.raises(UserError, match=r"samples_per_prompt"):
        recipe_of(**{aligner: {"samples_per_prompt": 1}})
    section = {"iterations": 3, "batch_size": 4, "epochs": 2, "save_every": 2}
    settings = getattr(recipe_of(**{aligner: section}), aligner)
    assert (settings.max_steps, settings.save_steps) == (3 * 8, 2 * 8)


def test_what_only_ppo_can_do_is_refused_for_rloo_and_grpo() -> None:
    reward = {"weight": 1.0, "callable": "module:function"}
    for aligner in ("rloo", "grpo"):
        for ppo in ({"extra_rewards": [reward]}, {"quantize": "4bit"}):
            with pytest.raises(UserError, match=f"are for aligner ppo: remove them for {aligner}"):
                recipe_of(aligner=aligner, ppo=ppo)


def test_groups_fill_a_step_of_gvpo_and_ppo_takes_it_with_references() -> None:
    with pytest.raises(UserError, match="r: gvpo: samples_per_prompt 5 must divide batch_size 16"):
        recipe_of(gvpo={"samples_per_prompt": 5})
    with pytest.raises(UserError, match=r"ppo\.quantize is for aligner ppo: remove it for gvpo"):
        recipe_of(aligner="gvpo", ppo={"quantize": "4bit"})
    with pytest.raises(UserError, match="warm_start learns from the reference completions"):
        recipe_of(ppo={"warm_start": "regression", "reference_rollouts": True})
    with pytest.raises(UserError, match=r"ppo\.warm_start requires ppo\.baseline or reward\.kappa > 0"):
        recipe_of(reward={"kappa": 0}, ppo={"warm_start": "regression", "baseline": False})
    assert recipe_of(aligner="gvpo", reward={"kappa": 0}, ppo={"baseline": False}).draws_references


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_trained_backbone_has_two_ridges_and_needs_neither(mode: str) -> None:
    assert recipe_of(reward={"mode": mode}).reward.refit_ridge is None
    given = recipe_of(reward={"mode": mode, "ridge": 1.0, "refit_ridge": 2.0}).reward
    assert (given.ridge, given.refit_ridge) == (1.0, 2.0)
    with pytest.raises(UserError, match="refit_ridge must go with mode lora or full"):
        recipe_of(reward={"refit_ridge": 2.0})


def test_raw_evaluation_labels_need_the_declaration_that_they_are_public() -> None:
    with pytest.raises(UserError, match=r"data\.public_labels must be true for evaluation_labels: public"):
        recipe_of(evaluation_labels="public")
    assert recipe_of(evaluation_labels="public", data={"public_labels": True}).evaluation_labels == "public"
    with pytest.raises(UserError, match="evaluation_labels"):
        recipe_of(evaluation_labels="raw")


def test_noisy_counts_need_their_epsilon_a_key_and_room_in_the_budget() -> None:
    def laplace(**own: Any) -> Recipe:
        return recipe_of(evaluation_labels="laplace", privatize={"epsilon": 1.0, **own}, data={"public_labels": True})

    assert laplace(count_epsilon=0.5, budget=1.5).privatize.count_epsilon == 0.5
    with pytest.raises(UserError, match=r"privatize\.count_epsilon must be given"):
        laplace()
    for own in ({"epsilon": float("inf")}, {"insecure_seed": 3}):
        with pytest.raises(UserError, match="laplace without a finite epsilon and a key"):
            laplace(count_epsilon=0.5, **own)
    with pytest.raises(UserError, match=r"must be at most privatize\.budget 1\.25, got 1\.5"):
        laplace(count_epsilon=0.5, budget=1.25)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="count_epsilon"):
            laplace(count_epsilon=bad)


def test_a_budget_per_person_needs_the_column_that_names_people() -> None:
    with pytest.raises(UserError, match="labeler_column must be given for budget_per: person"):
        recipe_of(privatize={"epsilon": 1.0, "budget": 9.0, "budget_per": "person"})
    own = {"epsilon": 1.0, "budget": 9.0, "budget_per": "person", "labeler_column": "who"}
    assert recipe_of(privatize=own).privatize.budget == 9.0
    with pytest.raises(UserError, match="budget"):
        recipe_of(privatize={"epsilon": 1.0, "budget": 0.0})


def test_only_a_finite_epsilon_under_a_key_is_private() -> None:
    assert recipe_of().private
    assert not recipe_of(privatize={"epsilon": 1.0, "insecure_seed": 0}).private
    assert not recipe_of(privatize={"epsilon": float("inf")}, data={"public_labels": True}).private


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        recipe_of().ppo.rollouts = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["label_smoothing", "smoothed"])
def test_label_smoothing_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=r"r: reward\.loss: smoothing labels that randomised response has already"):
        recipe_of(reward={"loss": name})
    with pytest.raises(UserError, match=r"trainer_args\.label_smoothing_factor is refused: smoothing labels"):
        recipe_of(reward={"mode": "full", "ridge": 1.0, "trainer_args": {"label_smoothing_factor": 0.1}})
    with pytest.raises(UserError, match=r"reward\.loss: Input should be 'private_likelihood'"):
        recipe_of(reward={"loss": "bt"})


@pytest.mark.parametrize("name", ["loss_type", "label_smoothing", "use_weighting", "beta"])
def test_what_shapes_a_loss_of_trl_s_is_refused_not_ignored(name: str) -> None:
    with pytest.raises(UserError, match=rf"trainer_args\.{name} shapes a loss of TRL's that is not computed"):
        recipe_of(dpo={"trainer_args": {name: 0.1}})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"optimizer": "adamw_8bit"}, "optimizer must go with mode lora or full"),
        ({"mode": "lora", "pooling": "last_sum"}, "pooling last_sum must go with mode head"),
        ({"pooling": "last_sum", "uncertainty": {"kind": "mc_dropout"}}, "pooling last_sum must go with mode head"),
        ({"group_by_length": True}, "group_by_length must go with mode lora or full"),
        ({"early_stopping": {}}, "early_stopping must go with mode lora or full"),
        ({"quantize": "4bit"}, "set mode lora, not head"),
        ({"mode": "full", "ridge": 1.0, "quantize": "4bit"}, "set mode lora, not full"),
        ({"uncertainty": {"kind": "elliptical"}, "reward_bound": None}, "reward_bound must be a number"),
        ({"uncertainty": {"kind": "ensemble", "heads": 1}}, r"reward\.uncertainty\.heads"),
        ({"uncertainty": {"kind": "laplace"}}, r"reward\.uncertainty\.kind"),
        ({"external": {"public": True}}, r"reward\.external\.path' is required"),
        (
            {"mode": "lora", "ridge": 1.0, "optimizer": "sgd", "trainer_args": {"optim": "sgd"}},
            r"trainer_args\.optim and a key of this section say the same thing",
        ),
    ],
)
def test_reward_keys_that_do_not_fit_together_are_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(reward=reward)


def test_the_keys_of_a_trained_backbone_are_taken() -> None:
    reward = {"mode": "lora", "ridge": 1.0, "optimizer": "adamw_8bit", "group_by_length": True, "quantize": "4bit",
              "early_stopping": {"every": 5}, "uncertainty": {"kind": "ensemble", "heads": 4}}
    assert recipe_of(reward=reward).reward.early_stopping.patience == 3  # type: ignore[union-attr]


def test_ppo_in_four_bits_trains_an_adapter() -> None:
    ppo = recipe_of(ppo={"quantize": "4bit", "optimizer": "adamw_8bit"}).ppo
    assert (ppo.quantize, ppo.optimizer) == ("4bit", "adamw_8bit")
    with pytest.raises(UserError, match="r: ppo: lora must not be null with quantize"):
        recipe_of(ppo={"quantize": "4bit", "lora": None})
    with pytest.raises(UserError, match=r"ppo\.optimizer"):
        recipe_of(ppo={"optimizer": "lion"})


def test_the_adaptive_controller_starts_within_its_bounds() -> None:
    for bounds in ({"kl_coef_min": 0.2}, {"kl_coef_max": 0.05}):
        with pytest.raises(UserError, match=r"r: ppo: kl_coef 0\.1 must lie between kl_coef_min"):
            recipe_of(ppo={"kl_coef": 0.1, "kl_target": 6.0, **bounds})
        assert recipe_of(ppo={"kl_coef": 0.1, **bounds}).ppo.kl_target is None  # fixed: nothing to bound
    assert recipe_of(ppo={"kl_coef": 0.1, "kl_target": 6.0, "kl_coef_min": 0.1, "kl_coef_max": 0.1}).ppo.kl_coef == 0.1
    for bad in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UserError, match="kl_coef_max"):
            recipe_of(ppo={"kl_coef_max": bad})


def test_own_preferences_bring_their_own_prompts() -> None:
    """A recipe that names its preferences alone never trains or evaluates on the embedded task."""
    for preferences, expected in (
        ("embedded", ("embedded", "embedded", "embedded")),
        ("prefs.jsonl", ("release", "release", "evaluation")),
    ):
        data = DataConfig(preferences=preferences)
        assert (data.demonstrations, data.prompts, data.evaluation_prompts) == expected
    assert DataConfig(preferences="prefs.jsonl", prompts="mine.txt").prompts == "mine.txt"
