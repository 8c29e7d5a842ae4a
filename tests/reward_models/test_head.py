"""The ridges of the linear head: chosen by the private likelihood, before a backbone is trained and after."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.bonus_fit import head_bonus
from private_rlhf.reward_models.head import PairFeatures, fit_head, refit_head
from private_rlhf.reward_models.linear import LinearFit, ridge_in_units_of
from private_rlhf.reward_models.losses import get_loss
from support.pipeline_runs import ROOT

DIM, PAIRS, TESTS = 128, 2430, 4000
"""As many pairs a component as the paper's recipe has: 38,800 for 2,048."""
EPSILON = 0.5


class World:
    """Features whose variances fall as 1/j, true margins of standard deviation 1.2, and private labels of pairs."""

    def __init__(self, pairs: int = PAIRS, dim: int = DIM, epsilon: float = EPSILON) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.dim, self.epsilon = dim, epsilon
        self.weight = torch.randn(dim, generator=self.random)
        first, second = self.texts(TESTS)
        self.weight *= 1.2 / ((first - second) @ self.weight).std()
        self.training, self.held_out = self.labelled(pairs), self.labelled(pairs // 10)
        self.first, self.second = self.texts(TESTS)

    def texts(self, count: int) -> torch.Tensor:
        """(2, count, d)."""
        return torch.randn(2, count, self.dim, generator=self.random) / torch.arange(1, self.dim + 1).sqrt()

    def labelled(self, count: int) -> PairFeatures:
        """Pairs in the order that Bradley–Terry labels have after randomised response."""
        first, second = self.texts(count)
        prefers = torch.rand(count, generator=self.random) < torch.sigmoid((first - second) @ self.weight)
        told = prefers ^ (torch.rand(count, generator=self.random) > LabelNoise.of(self.epsilon).keep_prob)
        return PairFeatures(torch.where(told[:, None], first, second), torch.where(told[:, None], second, first))

    def accuracy(self, fit: LinearFit) -> float:
        """Share of test pairs that the fit orders as the true margins do."""
        truth = (self.first - self.second) @ self.weight
        return float((fit.margin(self.first, self.second).sign() == truth.sign()).double().mean())


def recipe(**reward: Any) -> Recipe:
    """The paper's recipe, whose ridges are its own unless given."""
    found = load_recipe(Recipe, ROOT / "configs" / "hh_rlhf_llama3_1b.yaml")
    return replace(found, reward=replace(found.reward, **reward))


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_the_warm_start_of_the_paper_s_recipe_does_not_over_fit(world: World) -> None:
    """With the ridge that this recipe once gave, 1 for 2,048 components, it was worse than no reward at all."""
    fit, selection = fit_head(world.training, EPSILON, recipe().reward)
    assert selection.ridge not in (selection.ridges[0], selection.ridges[-1])
    given, judged = fit_head(world.training, EPSILON, recipe(ridge=DIM / 2048).reward)
    assert judged.held_out_loss[0] > math.log(2) > min(selection.held_out_loss)
    assert world.accuracy(given) < 0.64
    assert world.accuracy(fit) > 0.70


def test_the_ridge_of_the_largest_evidence_does_as_well_and_needs_no_folds(world: World) -> None:
    fit, selection = fit_head(world.training, EPSILON, recipe(ridge="evidence").reward)
    judged, _ = fit_head(world.training, EPSILON, recipe().reward)
    assert selection.ridges == (fit.ridge,)
    assert world.accuracy(fit) > world.accuracy(judged) - 0.01
    least_squares, _ = fit_head(world.training, EPSILON, recipe(ridge="evidence", loss="private_least_squares").reward)
    assert least_squares.ridge == pytest.approx(2 * fit.ridge)  # its curvature is twice the information at margin 0


@pytest.mark.parametrize("loss", ["private_least_squares", "debiased"])
def test_the_grid_stands_for_the_same_priors_with_every_loss(world: World, loss: str) -> None:
    by_loss = {name: fit_head(world.training, EPSILON, recipe(loss=name).reward) for name in (loss, "uncorrected")}
    unit = ridge_in_units_of(get_loss(loss), 1.0, LabelNoise.of(EPSILON))
    assert by_loss[loss][1].ridges == pytest.approx([unit * each for each in by_loss["uncorrected"][1].ridges])
    assert by_loss[loss][0].prior == pytest.approx(by_loss[loss][0].ridge / unit)


def certainty(fit: LinearFit, world: World, scale: float = 1.0) -> float:
    """Γ over the standard deviation of r, on texts of `world` whose features are multiplied by `scale`."""
    bonus = head_bonus(fit, world.training, recipe().reward)
    first, second = scale * world.first, scale * world.second
    return float(bonus.score(first, second[:, None]).bonus.mean() / fit.margin(first, second).std())


def test_uncertainty_after_training_has_the_unit_of_head_mode() -> None:
    """Of the same features, whatever their scale: by the pairs held out as by cross-validation."""
    world = World(pairs=2000, dim=24, epsilon=2.0)
    fit, _ = fit_head(world.training, 2.0, recipe().reward)
    refit, selection = refit_head(world.training, world.held_out, 2.0, recipe().reward)
    assert len(selection.ridges) > 5
    assert certainty(refit, world) == pytest.approx(certainty(fit, world), rel=0.15)
    sides = (world.training.chosen, world.training.rejected, world.held_out.chosen, world.held_out.rejected)
    small = [0.05 * side for side in sides]
    scaled, _ = refit_head(PairFeatures(*small[:2]), PairFeatures(*small[2:]), 2.0, recipe().reward)
    # Once λ = 1 acted on w itself, and Γ here depended on the unit of the features.
    assert certainty(scaled, world, 0.05) == pytest.approx(certainty(refit, world), rel=1e-3)
    given, _ = refit_head(world.training, world.held_out, 2.0, recipe(refit_ridge=3.0).reward)
    assert given.ridge == 3.0


def test_features_that_know_their_labels_are_judged_by_pairs_that_they_do_not_know(world: World) -> None:
    """A backbone that has learnt its pairs by heart: cross-validation among them would trust what it memorised."""
    memory = 0.05 * torch.ones(PAIRS, 1)
    known = PairFeatures(
        torch.cat([world.training.chosen, memory], 1), torch.cat([world.training.rejected, -memory], 1)
    )
    nothing = torch.zeros(len(world.held_out), 1)
    unknown = PairFeatures(
        torch.cat([world.held_out.chosen, nothing], 1), torch.cat([world.held_out.rejected, nothing], 1)
    )
    trusting, _ = fit_head(known, EPSILON, recipe().reward)
    fit, _ = refit_head(known, unknown, EPSILON, recipe().reward)
    assert fit.ridge > 3 * trusting.ridge


def test_prompts_that_are_not_one_for_each_pair_are_refused() -> None:
    pairs = PairFeatures(torch.randn(4, 2), torch.randn(4, 2))
    for prompts, message in (
        (["a", "b"], "prompts must be one for each of 4 pairs, got 2"),
        (["a"] * 4, "pairs must be on 2 prompts or more, since folds are by prompt, got 1"),
    ):
        with pytest.raises(UserError, match=message):
            fit_head(pairs, 2.0, recipe().reward, prompts=prompts)
