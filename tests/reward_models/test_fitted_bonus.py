"""Γ of each kind that a recipe may name, as the scorer of PPO reads it; splits by record."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.basis import pair_basis
from private_rlhf.reward_models.bonus_fit import check_uncertainty, head_bonus
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.uncertainty import BONUS_KINDS, DropoutBonus, FisherBonus, bonus_kind
from private_rlhf.stages.reward import split
from support.recipes import recipe_of
from transformers import LlamaForCausalLM


def recipe(kind: str | None, **reward: Any) -> Recipe:
    """Null: the recipe says nothing about the kind."""
    uncertainty = {"uncertainty": {"kind": kind, "heads": 3}} if kind else {}
    return recipe_of(reward={"kappa": 0.5, "reward_bound": 4.0, **uncertainty, **reward})


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.randn(2, 60, 6, generator=torch.Generator().manual_seed(0))
    return first, second


@pytest.mark.parametrize("kind", BONUS_KINDS)
def test_every_kind_is_made_and_scores_as_ppo_asks(kind: str) -> None:
    chosen, rejected = pairs()
    basis = pair_basis(chosen, rejected, num_components=3)
    fit = fit_linear(chosen, rejected, torch.ones(60), 1.0, ridge=2.0, basis=basis, reward_bound=4.0)
    bonus = head_bonus(fit, PairFeatures(chosen, rejected), recipe(kind).reward)
    assert bonus_kind(bonus) == kind
    assert (bonus.kappa, bonus.reward_bound) == (0.5, 4.0)
    width = 6 + (bonus.samples if isinstance(bonus, DropoutBonus) else 0)
    features = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    references = torch.randn(5, 4, width, generator=torch.Generator().manual_seed(2))
    kept = torch.stack([bonus.reference_gradient(completions[None])[0] for completions in references])
    score = bonus.score_centred(features, kept)
    torch.testing.assert_close(score.bonus, bonus.score(features, references).bonus)
    assert float(score.bonus.min()) > 0


def test_the_default_is_the_fisher_bonus_of_the_fit_bit_for_bit() -> None:
    chosen, rejected = pairs()
    fit = fit_linear(chosen, rejected, torch.ones(60), 1.0, ridge=2.0, reward_bound=4.0)
    bonus = head_bonus(fit, PairFeatures(chosen, rejected), recipe(None).reward)
    expected = FisherBonus.from_fit(fit, 0.5)
    assert isinstance(bonus, FisherBonus)
    assert torch.equal(bonus.information, expected.information)


def test_mc_dropout_is_refused_before_training_without_dropout(small: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match=r"reward\.uncertainty\.kind mc_dropout: LlamaForCausalLM has no active"):
        check_uncertainty(small, recipe("mc_dropout").reward)
    check_uncertainty(small, recipe("fisher").reward)


def test_statistics_that_cannot_be_inverted_name_the_remedy() -> None:
    chosen, rejected = pairs()
    fit = fit_linear(chosen[:2], rejected[:2], torch.ones(2), 1.0, ridge=2.0, reward_bound=4.0)
    few = PairFeatures(chosen[:2], rejected[:2])
    with pytest.raises(UserError, match=r"the covariance matrix .*: raise reward\.ridge .*reward\.refit_ridge\) or"):
        head_bonus(dataclasses.replace(fit, prior=1e-30), few, recipe("elliptical").reward)


def test_a_record_is_either_learnt_or_held_out() -> None:
    ids = [f"r{i // 3}" for i in range(90)]  # three events on each pair
    training, validation = split(ids, 0.2, seed=0)
    assert len(validation) == 18
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(90))
    assert not {ids[i] for i in training} & {ids[i] for i in validation}
    # One event on each pair: a plain random split.
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    training, validation = split([f"r{i}" for i in range(50)], 0.1, seed=3)
    assert torch.equal(validation, order[:5].sort().values)
    assert torch.equal(training, order[5:].sort().values)
    with pytest.raises(UserError, match="must be enough to fit a reward and hold some out, got 2"):
        split(["a", "b", "a", "b"], 0.1, seed=0)
