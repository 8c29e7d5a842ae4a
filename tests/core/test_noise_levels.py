"""The noise of labels with an ε each: exact by enumeration, coverage with its false-alarm rate, one ε as before."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import (
    LevelledNoise,
    group_numbers,
    joined,
    known_noise,
    mean_factor,
    noise_from_json,
    rows_of,
    true_share,
)
from private_rlhf.core.stats import wilson
from private_rlhf.evaluation.forecast import margin_scale
from private_rlhf.reward_models.linear import fit_linear, ridge_in_units_of
from private_rlhf.reward_models.losses import LOSSES, fisher_weight
from private_rlhf.reward_models.ridge import select_ridge
from scipy.stats import binom

LEVELS = (0.5, 1.0, 4.0)
MIX = LevelledNoise.of(LEVELS, [0.5, 0.5, 4.0, 1.0])
LABELS = np.array(list(itertools.product((-1, 1), repeat=len(MIX))))


def chance_of(z: np.ndarray, truth: np.ndarray) -> float:
    """The probability of the private labels z (n,) where the true ones are `truth`."""
    return float(np.where(z == truth, 1.0 - MIX.flip_prob, MIX.flip_prob).prod())


def test_the_debiased_share_is_unbiased_for_any_labels() -> None:
    for truth in LABELS:
        expected = sum(chance_of(z, truth) * MIX.share(z == 1).value for z in LABELS)
        weight = MIX.factor**2 / np.square(MIX.factor).sum()
        assert expected == pytest.approx(float((weight * (truth == 1)).sum()), abs=1e-12)


@pytest.mark.parametrize("name", ["private_likelihood", "private_least_squares", "debiased"])
def test_losses_have_their_least_mean_at_the_true_margin(name: str) -> None:
    """The expected slope over z and y is 0 at the true margins, and of the debiased loss that of the true labels."""
    loss = LOSSES[name]
    margin = torch.tensor([0.3, -1.2, 0.8, 2.0], dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for truth, z in itertools.product(LABELS, LABELS):
        drawn = float(torch.sigmoid(margin * torch.tensor(truth)).prod()) * chance_of(z, truth)
        total += drawn * loss.slope(margin, torch.tensor(z, dtype=torch.float64), MIX)
    assert torch.allclose(total, torch.zeros(4, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_mix_is_each_label_at_its_own_epsilon(name: str) -> None:
    loss = LOSSES[name]
    margin = torch.tensor([0.3, -1.2, 0.8, 2.0], dtype=torch.float64)
    z = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    for place, epsilon in enumerate((0.5, 0.5, 4.0, 1.0)):
        one = slice(place, place + 1)
        assert loss.value(margin, z, MIX)[one].equal(loss.value(margin[one], z[one], epsilon))
        assert loss.slope(margin, z, MIX)[one].equal(loss.slope(margin[one], z[one], epsilon))
        assert loss.curvature(margin, MIX)[one].equal(loss.curvature(margin[one], epsilon))
    given = margin.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss.value(given, z, MIX).sum(), given)
    assert torch.allclose(slope, loss.slope(margin, z, MIX))
    assert loss.value(margin.float(), z.float(), MIX).dtype == torch.float32
    if name != "uncorrected":  # which reads no noise
        with pytest.raises(ValueError, match="one for each margin"):
            loss.value(margin[:2], z[:2], MIX)


def test_a_label_carries_its_level_s_information() -> None:
    """At margin 0: tanh²(ε/2)/4 of each; the mean factor is that of one ε with the same sum."""
    information = fisher_weight(torch.zeros(4, dtype=torch.float64), MIX)
    expected = np.tanh(np.array([0.5, 0.5, 4.0, 1.0]) / 2) ** 2
    assert information.numpy() == pytest.approx(expected / 4)
    assert 4 * MIX.mean_factor**2 == pytest.approx(float(expected.sum()))
    assert mean_factor(LabelNoise.of(1.0)) == LabelNoise.of(1.0).factor


def test_one_level_is_one_epsilon() -> None:
    one = LevelledNoise.of((1.0, 2.0), [1.0] * 50)
    agrees = np.repeat([1.0, 0.5, 0.0], [30, 4, 16])
    mixed, plain = one.share(agrees), true_share(agrees, LabelNoise.of(1.0))
    assert plain == LabelNoise.of(1.0).debias(wilson(32.0, 50))
    for name in ("value", "ci_low", "ci_high"):
        assert getattr(mixed, name) == pytest.approx(getattr(plain, name), abs=1e-12)
    for name in LOSSES:
        assert ridge_in_units_of(LOSSES[name], 3.0, one) == pytest.approx(
            ridge_in_units_of(LOSSES[name], 3.0, LabelNoise.of(1.0))
        )


@pytest.mark.parametrize("share", [0.5, 0.65, 0.9])
@pytest.mark.parametrize("mix", [(0.4, 0.4, 0.2), (0.9, 0.05, 0.05)])
def test_the_interval_covers_the_share_in_94_to_96_per_cent(share: float, mix: tuple[float, ...]) -> None:
    """2,000 simulations of 600 labels. A true coverage of 95 % leaves 94 to 96 with probability .04 in one case; the
    seeds are fixed, so nothing is left to chance, and a coverage of 92 % would be found with probability .999."""
    generator = np.random.default_rng(0)
    noise = LevelledNoise.of(LEVELS, generator.choice(LEVELS, 600, p=mix).tolist())
    right = generator.random((2000, 600)) < share
    agrees = np.where(generator.random((2000, 600)) < noise.flip_prob, ~right, right)
    estimates = [noise.share(row) for row in agrees]
    covered = sum(each.ci_low <= share <= each.ci_high for each in estimates)
    assert 1 - binom.cdf(1880, 2000, 0.92) < 1e-3
    assert 1880 <= covered <= 1920
    values = np.array([each.value for each in estimates])
    assert abs(values.mean() - share) < 4 * values.std() / math.sqrt(2000)  # false alarm 6e-5


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("pairs", "people"), [(400, 1), (100, 20), (20, 5)])
def test_the_interval_counts_the_labels_of_one_prompt_by_their_variance(mixed: bool, pairs: int, people: int) -> None:
    """A rule that is a coin for each pair, about which people agree in 65 %: 1,000 simulations, of which 93.5 % or more
    cover 1/2. A true coverage of 95 % fails with probability .015 in one case, one of 91 % passes with .003; the seed
    is fixed. Labels counted as independent cover 67 % at 20 people. A label on each prompt gives the same bits as no
    prompts.
    """
    generator = np.random.default_rng(0)
    prompts = np.repeat(np.arange(pairs), people)
    epsilons = generator.choice(LEVELS, pairs * people)
    noise = LevelledNoise.of(LEVELS, epsilons.tolist()) if mixed else LabelNoise.of(2.0)
    scale = margin_scale(0.65)
    covered = 0
    for _ in range(1000):
        prefers = 1 / (1 + np.exp(-scale * generator.standard_normal(pairs)))
        right = generator.random(pairs * people) < np.abs(prefers - generator.integers(0, 2, pairs))[prompts]
        agrees = right ^ (generator.random(pairs * people) < noise.flip_prob)
        estimate = true_share(agrees, noise, prompts)
        covered += estimate.ci_low <= 0.5 <= estimate.ci_high
        assert people > 1 or estimate == true_share(agrees, noise)
    assert binom.cdf(934, 1000, 0.95) < 0.02
    assert 1 - binom.cdf(934, 1000, 0.91) < 0.005
    assert covered >= 935


def test_labels_that_all_agree_or_are_on_few_prompts_count_by_prompt() -> None:
    """20 of each of 20 prompts; 400 on two; 12 alone and 40 of one more, worth 1.6 prompts of one size."""
    for agrees, prompts, count in (
        (np.ones(400), group_numbers([f"prompt {i % 20}" for i in range(400)]), 20),
        (np.arange(400) % 3 > 0, np.arange(400) % 2, 2),
        (np.arange(52) % 3 > 0, np.minimum(np.arange(52), 12), 1),
    ):
        assert true_share(agrees, LabelNoise.of(4.0), prompts).n == count
        assert LevelledNoise.of(LEVELS, [1.0] * len(agrees)).share(agrees, prompts).n == count


def test_weights_by_information_beat_weights_by_count() -> None:
    """The standard error is that of the best weights, at a share of 1/2; equal weights pay the noisiest level."""
    noise = LevelledNoise.of(LEVELS, [0.5] * 240 + [1.0] * 240 + [4.0] * 120)
    by_information = 1 / np.square(noise.factor).sum()
    by_count = np.square(1 / noise.factor).sum() / 600**2
    estimate = noise.share(np.arange(600) % 2)
    half = (estimate.ci_high - estimate.ci_low) / 2
    assert half == pytest.approx(1.96 * math.sqrt(by_information / 4), rel=0.02)
    assert by_count > 2.5 * by_information


def test_the_mean_epsilon_is_biased_and_the_mix_is_not() -> None:
    """4,000 pairs on one feature of margin 1.2: the fit at each label's ε finds it, at the mean ε (1.4) it does not."""
    generator = np.random.default_rng(1)
    noise = LevelledNoise.of(LEVELS, generator.choice(LEVELS, 4000, p=(0.4, 0.4, 0.2)).tolist())
    right = generator.random(4000) < 1 / (1 + math.exp(-1.2))
    z = np.where(right ^ (generator.random(4000) < noise.flip_prob), 1.0, -1.0)
    ones, zeros = torch.ones(4000, 1, dtype=torch.float64), torch.zeros(4000, 1, dtype=torch.float64)
    own = fit_linear(ones, zeros, torch.tensor(z), noise, ridge=1e-6)
    error = float(own.information[0, 0]) ** -0.5
    assert abs(float(own.weight[0]) - 1.2) < 4 * error  # false alarm 6e-5
    mean = fit_linear(ones, zeros, torch.tensor(z), 1.4, ridge=1e-6)
    assert abs(float(mean.weight[0]) - 1.2) > 4 * error


def test_folds_and_parts_keep_each_label_with_its_level() -> None:
    generator = np.random.default_rng(2)
    noise = LevelledNoise.of(LEVELS, generator.choice(LEVELS, 200).tolist())
    x = torch.tensor(generator.normal(size=(200, 3)))
    order = torch.tensor(generator.permutation(200))
    folds = torch.arange(200) % 4
    z = torch.where(x[:, 0] > 0, 1.0, -1.0).double()
    chosen = select_ridge(x, torch.zeros_like(x), z, noise, folds=folds)
    shuffled = (x[order], torch.zeros_like(x), z[order], rows_of(noise, order))
    again = select_ridge(*shuffled, folds=folds[order])
    assert chosen.held_out_loss == pytest.approx(again.held_out_loss, rel=1e-9)
    whole = joined(rows_of(noise, torch.arange(150)), rows_of(noise, np.arange(200) >= 150))
    assert isinstance(whole, LevelledNoise)
    assert np.array_equal(whole.level, noise.level)
    assert joined(LabelNoise.of(1.0), LabelNoise.of(1.0)) == rows_of(LabelNoise.of(1.0), order)


def test_json_both_ways_and_refusals() -> None:
    stated = MIX.as_json()
    assert stated["levels"] == [[0.5, 2], [1.0, 1], [4.0, 1]]
    assert stated["epsilon"] == 4.0
    again = noise_from_json(stated)
    assert isinstance(again, LevelledNoise)
    assert again.as_json() == stated
    assert noise_from_json(LabelNoise.of(2.0).as_json()) == known_noise(2.0)
    with pytest.raises(ValueError, match=r"one of 0\.5, 1\.0, 4\.0, got 2\.0"):
        LevelledNoise.of(LEVELS, [0.5, 2.0])
