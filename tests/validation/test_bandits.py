"""The shared bandit pieces: exact values, private labels as counts, and estimators against naive code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from private_rlhf.core.stats import bootstrap
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.losses import fisher_weight, private_likelihood_loss
from private_rlhf.validation import bandits
from private_rlhf.validation.bandits import Bandit, Counts, all_pairs
from scipy import stats


def example(seed: int = 0, contexts: int = 3, actions: int = 4) -> Bandit:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(contexts, actions))
    log_reference = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Bandit(generator.uniform(0.0, 2.0, (contexts, actions)), log_reference, 0.3)


def test_suboptimality_is_the_difference_of_objectives() -> None:
    bandit = example()
    other = np.log(np.random.default_rng(1).dirichlet(np.ones(4), (5, 3)))
    best = bandit.objective(bandit.gibbs(bandit.reward))
    assert bandit.suboptimality(other) == pytest.approx(best - bandit.objective(other))
    assert (bandit.suboptimality(other) > 0).all()
    assert bandit.suboptimality(bandit.gibbs(bandit.reward + 7.0)) == pytest.approx(0.0, abs=1e-14)
    # max J is the log-partition function: kl_coef · mean log Σ π_ref exp(r/kl_coef).
    partition = np.log((np.exp(bandit.log_reference + bandit.reward / 0.3)).sum(axis=1))
    assert best == pytest.approx(0.3 * partition.mean())


def test_pair_probabilities_by_enumeration() -> None:
    bandit, pairs = example(), all_pairs(3, 4)
    reference = np.exp(bandit.log_reference)
    table: dict[tuple[int, int, int], float] = {}
    for s in range(3):
        for a in range(4):
            for b in range(4):
                key = (s, min(a, b), max(a, b))
                table[key] = table.get(key, 0.0) + reference[s, a] * reference[s, b] / 3
    chance = bandits.pair_probability(bandit.log_reference, pairs)
    for key, value in zip(zip(*pairs, strict=True), chance, strict=True):
        assert value == pytest.approx(table[tuple(int(each) for each in key)])
    assert len(chance) == 18
    assert chance.sum() + (reference**2).sum() / 3 == pytest.approx(1.0)
    values = np.arange(12.0).reshape(3, 4) ** 2
    assert pairs.difference(values)[:3].tolist() == [-1.0, -4.0, -9.0]


@pytest.mark.parametrize("epsilon", [0.5, 2.0, math.inf])
def test_private_labels_have_the_mechanisms_probability(epsilon: float) -> None:
    """Exact binomial tests at 1e-6 each; the probability without flips, or flipped twice, is rejected."""
    margin = np.array([1.3, -0.4])
    drawn = bandits.private_labels(np.random.default_rng(3), np.full(2, 200_000), margin, epsilon)
    assert (drawn.total == 200_000).all()
    likely = 1.0 / (1.0 + np.exp(-margin))
    for power, accepted in ((1, True), (0, math.isinf(epsilon)), (2, math.isinf(epsilon))):
        factor = bandits.factor(epsilon) ** power
        for count, p in zip(drawn.plus, 0.5 + factor * (likely - 0.5), strict=True):
            assert (stats.binomtest(int(count), 200_000, p).pvalue > 1e-6) == accepted


def test_expected_counts_are_the_mean_of_counts() -> None:
    bandit = example()
    expected = bandits.expected_counts(bandit, 500.0, 0.8)
    drawn = bandits.offline_counts(np.random.default_rng(4), bandit, 500, 4000, 0.8)
    for mean, sample in zip(expected, drawn, strict=True):
        error = (sample.mean(axis=0) - mean) / (sample.std(axis=0) / math.sqrt(4000))
        assert np.abs(error).max() < 5.0  # 36 normal deviates: false alarm 2e-5
    truths = np.stack([bandit.reward, bandit.reward[::-1]])
    own = bandits.expected_counts(Bandit(truths, bandit.log_reference, 0.3), 500.0, 0.8)
    assert own.plus[0] == pytest.approx(expected.plus)
    assert own.plus[1] != pytest.approx(expected.plus)


@pytest.mark.parametrize("epsilon", [0.3, math.inf])
def test_total_loss_is_the_sum_over_rows(epsilon: float) -> None:
    import torch

    generator = np.random.default_rng(5)
    margin = generator.normal(size=(6, 3))
    counts = Counts(generator.integers(0, 4, (2, 3)).astype(float), generator.integers(0, 4, (2, 3)).astype(float))
    found = bandits.total_loss(counts, margin, epsilon)
    per_repetition = bandits.total_loss(counts, np.stack([margin, margin]), epsilon)
    assert found == pytest.approx(per_repetition)
    for r in range(2):
        label = np.concatenate(
            [np.repeat([1.0, -1.0], [int(counts.plus[r, p]), int(counts.minus[r, p])]) for p in range(3)]
        )
        place = np.repeat(np.arange(3), counts.total[r].astype(int))
        for member in range(6):
            rows = private_likelihood_loss(torch.tensor(margin[member, place]), torch.tensor(label), epsilon)
            assert found[r, member] == pytest.approx(float(rows.sum()))


@pytest.mark.parametrize(
    ("epsilon", "loss"),
    [(1.5, "private_likelihood"), (math.inf, "private_likelihood"), (1.5, "debiased"), (1.5, "uncorrected")],
)
def test_fit_on_counts_is_the_pipelines_fit_on_rows(epsilon: float, loss: str) -> None:
    generator = np.random.default_rng(6)
    difference = generator.normal(size=(12, 3))
    compared = generator.integers(10, 60, (2, 12))
    counts = bandits.private_labels(generator, compared, difference @ np.array([0.8, -0.5, 0.2]), epsilon)
    ours = bandits.fit_linear_counts(counts, difference, epsilon, ridge=0.5, loss=loss, tolerance=1e-13)
    assert ours.converged.all()
    for r in range(2):
        rows = np.repeat(difference, compared[r], axis=0)
        label = np.concatenate(
            [np.repeat([1.0, -1.0], [int(p), int(m)]) for p, m in zip(counts.plus[r], counts.minus[r], strict=True)]
        )
        fit = fit_linear(rows, np.zeros_like(rows), label, epsilon, ridge=0.5, loss=loss, tolerance=1e-13)
        assert ours.theta[r] == pytest.approx(fit.theta.numpy(), abs=1e-5)
        assert ours.information[r] == pytest.approx(fit.information.numpy(), rel=1e-4)


def test_a_fit_that_needs_halved_steps_still_falls() -> None:
    """Few, very noisy labels, where scoring steps overshoot: what has converged is a minimum."""
    generator = np.random.default_rng(7)
    difference = generator.normal(size=(10, 4))
    counts = bandits.private_labels(generator, np.full((50, 10), 6), difference @ np.ones(4), 0.3)
    fit = bandits.fit_linear_counts(counts, difference, 0.3, ridge=0.01)
    problem, rows = bandits._Fits(counts, difference, 0.3, 0.01, "private_likelihood"), np.arange(50)
    assert (problem.value(fit.theta, rows) < problem.value(np.zeros((50, 4)), rows)).all()
    assert fit.converged.mean() > 0.5
    for move in np.eye(4):
        for sign in (1e-3, -1e-3):
            worse = problem.value(fit.theta + sign * move, rows) - problem.value(fit.theta, rows)
            assert (worse[fit.converged] > -1e-6).all()


def test_information_is_the_sum_of_fisher_weights() -> None:
    import torch

    difference, margin = np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([0.3, -0.9])
    weight = bandits.fisher_weights(margin, 0.7)
    assert weight == pytest.approx(fisher_weight(torch.tensor(margin), 0.7).numpy())
    expected = sum(w * np.outer(psi, psi) for w, psi in zip(weight, difference, strict=True))
    assert bandits.weighted_gram(weight, difference) == pytest.approx(expected)


def test_bootstrap_and_slope() -> None:
    x = np.array([1.0, 10.0, 100.0])
    assert bandits.log_slope(x, 7.0 * x**-0.5) == pytest.approx(-0.5)
    samples = np.random.default_rng(8).normal(3.0, 1.0, (2, 400))
    first = bootstrap(lambda values: float(values.mean()), samples, 1)
    assert first == bootstrap(lambda values: float(values.mean()), samples, 1)
    low, high = first.ci_low, first.ci_high
    assert low < first.value < high
    # rows are independent here, so the standard error is 1/√800; 400 resamples tell it within a quarter
    assert (high - low) / (2 * 1.96) == pytest.approx(1.0 / math.sqrt(800), rel=0.25)
