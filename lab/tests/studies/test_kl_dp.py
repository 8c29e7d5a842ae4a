"""The brute force itself: exact policies and losses against naive code, and searches that catch a wrong bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from private_rlhf.reward_models.gibbs import gibbs_log_policy, gibbs_weights
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.validation.kl_dp import hockey_stick, loss
from private_rlhf_lab.studies.kl_dp import bandit, combined, equal_utility, extremes, linear, rlhf
from private_rlhf_lab.studies.kl_dp.records import bandit_utility, bradley_terry, gram, multisets, ridge_estimate, width
from scipy.optimize import minimize


def test_gibbs_policy_in_logs() -> None:
    """Against the definition; with a uniform reference it is `gibbs_weights`; −∞ excludes an action."""
    utility, reference = np.array([[1.0, 0.0, 3.0], [0.0, -np.inf, 2.0]]), np.array([0.2, 0.5, 0.3])
    weights = reference * np.exp(utility / 0.7)
    expected = weights / weights.sum(axis=1, keepdims=True)
    assert np.exp(gibbs_log_policy(utility, np.log(reference), 0.7)) == pytest.approx(expected)
    uniform = np.exp(gibbs_log_policy(utility[:1], np.zeros(3), 0.7))
    assert uniform == pytest.approx(gibbs_weights(utility[:1], 0.7))
    with pytest.raises(ValueError, match="kl_coef"):
        gibbs_log_policy(utility, reference, 0.0)


def test_loss_and_hockey_stick_by_hand() -> None:
    p, q = np.log([0.5, 0.5, 0.0 + 1e-300]), np.log([0.25, 0.75, 1e-300])
    assert loss(p, q) == pytest.approx(math.log(2.0))
    assert hockey_stick(p, q, 0.0) == pytest.approx(0.25)
    assert hockey_stick(p, q, math.log(1.5)) == pytest.approx(0.125)  # (.5 − 1.5·.25) against (.75 − 1.5·.5)
    gone = np.array([0.0, -np.inf])
    assert loss(gone, np.log([0.5, 0.5])) == np.inf
    assert loss(gone, gone) == 0.0


def test_multisets_are_all_and_once() -> None:
    rows = multisets(3, 2)
    assert len(rows) == 1 + 3 + 6
    assert len({tuple(row) for row in rows}) == len(rows)
    assert set(rows.sum(axis=1)) == {0.0, 1.0, 2.0}


def test_bandit_conventions_without_records() -> None:
    counts, sums = np.array([[4.0, 0.0]]), np.array([[3.0, 0.0]])
    assert bandit_utility(counts, sums, 1.0).tolist() == [[0.25, -np.inf]]
    assert bandit_utility(counts, sums, 1.0, optional=True).tolist() == [[0.25, -1.0]]


def test_ridge_and_widths_against_naive_linear_algebra() -> None:
    generator = np.random.default_rng(0)
    features, counts = generator.normal(size=(5, 3)), generator.integers(0, 3, (4, 5)).astype(float)
    rewards = generator.normal(size=5)
    for row, estimate, widths in zip(
        counts,
        ridge_estimate(counts, features, rewards, 0.7),
        width(features, gram(counts, features, 0.7)),
        strict=True,
    ):
        many = np.repeat(features, row.astype(int), axis=0)
        sigma = many.T @ many + 0.7 * np.eye(3)
        expected = np.linalg.solve(sigma, many.T @ np.repeat(rewards, row.astype(int)))
        assert estimate == pytest.approx(expected)
        assert widths == pytest.approx([math.sqrt(phi @ np.linalg.inv(sigma) @ phi) for phi in features])


def test_bradley_terry_is_the_pipelines_fit_inside_the_ball() -> None:
    """Same minimiser as `private_rlhf.reward_models.linear.fit_linear` on labels that were never flipped."""
    generator = np.random.default_rng(1)
    phi_a, phi_b = generator.normal(size=(2, 60, 3))
    label = np.where(generator.random(60) < 0.7, 1.0, -1.0)
    ours = bradley_terry(np.ones((1, 60)), label[:, None] * (phi_a - phi_b), 2.0, 1e3)[0]
    fit = fit_linear(phi_a, phi_b, label, math.inf, ridge=2.0, tolerance=1e-14)
    assert ours == pytest.approx(fit.theta.to(torch.float64).numpy(), abs=1e-6)


def test_bradley_terry_on_the_boundary_is_the_constrained_minimum() -> None:
    signed = np.array([[1.0, 0.5], [0.7, -1.0], [-0.2, 0.4]])
    counts = np.array([[5.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    found = bradley_terry(counts, signed, 0.05, 0.6)
    assert np.linalg.norm(found, axis=1) == pytest.approx([0.6, 0.0, 0.6])
    for row, theta in zip(counts, found, strict=True):

        def objective(at: np.ndarray, row: np.ndarray = row) -> float:
            return float(row @ np.logaddexp(0.0, -signed @ at) + 0.025 * at @ at)

        angles = np.linspace(0.0, 2.0 * math.pi, 20_001)
        circle = 0.6 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        inside = minimize(objective, np.zeros(2)).x
        best = min(objective(point) for point in circle[::20])
        if np.linalg.norm(inside) <= 0.6:
            best = min(best, objective(inside))
        assert objective(theta) <= best + 1e-9


def test_pairs_of_the_bandit_are_neighbours() -> None:
    for counts, sums, more, more_sums, arm in bandit.pairs(3):
        step = more - counts
        assert (step.sum(axis=1) == 1.0).all()
        assert (step[:, arm] == 1.0).all()
        assert set(np.unique(more_sums - sums)) <= {0.0, 1.0}


def test_searches_attain_and_never_exceed_their_bounds() -> None:
    """Each statement of one action holds on every pair; the pure ones are attained to within 2 %."""
    found = [*bandit.searches(3), *linear.searches(1), *rlhf.searches(2, (1.0,)), *rlhf.threshold_searches(1)]
    for search in found:
        assert 0.0 < search.ratios.max() <= 1.0 + 1e-7, search.claim
        assert search.verdict().verdict == "holds"
    largest = {search.claim: search.ratios.max() for search in found}
    for start in ("Bandit, both", "Linear bandit: one", "RLHF, label DP: one", "RLHF, add-remove DP: one"):
        (value,) = [ratio for claim, ratio in largest.items() if claim.startswith(start)]
        assert value > 0.98, start


def test_a_bound_that_is_two_percent_too_small_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = bandit.bandit_epsilon
    monkeypatch.setattr(bandit, "bandit_epsilon", lambda *given: 0.98 * exact(*given))
    assert bandit.searches(3)[0].verdict().verdict == "refuted"


def test_published_constants_are_violated_as_the_note_says() -> None:
    assert rlhf.halved_exponent_ratio(2.0, 4000) == pytest.approx(5.9, abs=0.05)
    assert rlhf.unridged_ratio(10.0) == pytest.approx(4.3, abs=0.05)
    assert rlhf.unridged_ratio(100.0) == pytest.approx(39.7, abs=0.05)
    verdicts = [search.verdict().verdict for search in combined.lemma(2000)]
    assert verdicts == ["holds", "holds", "holds", "refuted", "refuted"]


def test_composition_inexactness_and_randomised_labels_hold() -> None:
    for search in (*combined.many_draws(64), *combined.inexact(60), combined.randomised_labels()):
        assert 0.5 < search.ratios.max() <= 1.0 + 1e-7, search.claim


def test_proposition_one() -> None:
    claims, rows = combined.proposition_one(2)
    assert [claim.verdict for claim in claims] == ["holds", "holds", "refuted"]
    assert all(row["delta_swap"] == 0.0 and row["delta_add_remove"] == 1.0 for row in rows)


def test_cost_at_a_share_interpolates_in_log_epsilon() -> None:
    epsilon, share = np.array([1.0, 100.0, 10.0]), np.array([0.2, 0.9, 0.4])
    assert equal_utility.cost_at(share, epsilon, 0.3) == pytest.approx(math.sqrt(10.0))
    assert equal_utility.cost_at(share, epsilon, 0.9) == pytest.approx(100.0)
    assert math.isnan(equal_utility.cost_at(share, epsilon, 0.95))


def test_equal_utility_is_reproducible_and_its_verdicts_follow_its_numbers() -> None:
    first, second = (equal_utility.measure(2, pairs=300) for _ in range(2))
    assert np.array_equal(first.kl_share, second.kl_share)
    assert np.array_equal(first.rr_share, second.rr_share)
    assert (np.diff(first.kl_epsilon) < 0).all()
    assert (first.kl_loss <= first.kl_epsilon).all()
    assert (first.kl_loss > first.kl_epsilon / 20).all()
    # Curves made by hand: both arms reach 80 % in the middle of their grids.
    places = [np.linspace(1.0, 0.0, len(equal_utility.KL_COEFS)), np.linspace(0.0, 1.0, len(equal_utility.EPSILONS))]
    bound = np.geomspace(1e-3, 1e-5, len(equal_utility.KL_COEFS))
    made = equal_utility.Curves(places[0][None], places[1][None], bound, bound[None] / 2)
    claims = list(equal_utility.claims(made, resamples=5))
    useless = list(equal_utility.claims(replace(made, rr_share=0.0 * made.rr_share), resamples=5))
    assert [claim.verdict for claim in useless] == ["refuted"] * len(equal_utility.DRAWS)  # no price to compare with
    ratios = [claim.measured for claim in claims]
    assert ratios == sorted(ratios)
    assert [claim.verdict for claim in claims] == ["holds" if ratio <= 1 else "refuted" for ratio in ratios]


def test_random_searches_are_the_same_every_time() -> None:
    for make in (lambda: combined.lemma(50), lambda: combined.inexact(20)):
        assert all(np.array_equal(one.ratios, two.ratios) for one, two in zip(make(), make(), strict=True))


def test_every_approximate_statement_is_attained() -> None:
    assert {claim.verdict for claim in extremes.claims()} == {"holds"}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("linear_draw", 0.9), ("linear_draw", 1.2), ("rlhf_draw", 0.9), ("rlhf_label_instance_epsilon", 0.9),
     ("rlhf_epsilon", 0.9), ("bandit_approximate", 0.9)],
)  # fmt: skip
def test_a_bound_that_is_a_tenth_too_small_or_a_fifth_too_large_is_refuted(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: float
) -> None:
    """Each half of a promise by itself, δ and ε."""
    sound = getattr(extremes, name)

    def scaled(*given: Any, **named: Any) -> Any:
        made = sound(*given, **named)
        return made * factor if isinstance(made, float) else replace(made, **{part: getattr(made, part) * factor})

    for part in ("epsilon", "delta"):
        if name in ("bandit_approximate",) and part == "epsilon":
            continue  # its pair attains δ at any ε
        with monkeypatch.context() as patch:
            patch.setattr(extremes, name, scaled)
            assert "refuted" in {claim.verdict for claim in extremes.claims()}


def test_epsilon_at_delta_is_the_inverse_of_the_hockey_stick() -> None:
    first, second = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.3, 0.5])
    for delta in (0.0, 0.05, 0.2):
        found = extremes.epsilon_at(first, second, delta)
        assert float(hockey_stick(first, second, found)) <= delta + 1e-12
        assert float(hockey_stick(first, second, found - 1e-6)) > delta
    assert extremes.epsilon_at(first, second, 0.3) == 0.0
