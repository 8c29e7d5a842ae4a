"""the study offline: each piece against a closed form, an enumeration or naive code, and verdicts that can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf.validation import offline as rates
from private_rlhf.validation.bandits import Bandit, Counts, all_pairs, factor, loss_values, offline_counts, total_loss
from private_rlhf_lab.studies.offline import finite, hard, pessimism


def test_the_prediction_is_the_second_order_mean() -> None:
    """Gaussian errors with covariance I⁻¹, small: mean SubOpt within 5 % (20,000 draws: standard error 0.5 %)."""
    generator = np.random.default_rng(0)
    problem = rates.linear_bandit(generator, 2.0, kl_coef=0.5)
    root = np.linalg.cholesky(np.linalg.inv(problem.information(1e6, 0.7)))
    theta = problem.theta + generator.normal(size=(20_000, rates.DIMENSION)) @ root.T
    assert problem.subopt(theta).mean() == pytest.approx(problem.predicted(1e6, 0.7), rel=0.05)
    reward = problem.bandit.reward
    assert reward.max() - reward.min() == pytest.approx(2.0)
    assert problem.predicted(1e6, 0.7) == pytest.approx(100.0 * problem.predicted(1e8, 0.7))


def test_wrong_losses_end_where_theory_says() -> None:
    """tanh(Δ/2) shrinks by 2α−1 without a correction, by (2α−1)² with smoothing; the others find Δ."""
    margin = np.array([1.4, -0.6])
    likely = 0.5 + factor(1.0) * (1.0 / (1.0 + np.exp(-margin)) - 0.5)
    counts = Counts(1e9 * likely[None], 1e9 * (1.0 - likely)[None])
    for arm, power in (("private likelihood", 0), ("debiased", 0), ("uncorrected", 1), ("label smoothing", 2)):
        theta = rates.estimate(arm, counts, np.eye(2), 1.0)[0]
        assert np.tanh(theta / 2) == pytest.approx(factor(1.0) ** power * np.tanh(margin / 2), abs=1e-5), arm


def test_arms_stop_at_their_limits_and_their_verdicts_follow() -> None:
    found = rates.arms(6, (1e4, 1e6, 1e7), 3, epsilons=(1.0,))
    for arm in ("uncorrected", "label smoothing"):
        assert found.subopt[arm, 1.0][-1].mean() == pytest.approx(found.limit[arm, 1.0], rel=0.05)
    assert found.limit["private likelihood", 1.0] < 1e-9 < found.limit["uncorrected", 1.0]
    verdicts = [claim.verdict for claim in rates.arm_claims(found, 0)]
    assert verdicts[2:] == ["refuted", "refuted", "refuted"]
    assert "refuted" not in verdicts[:2]


def curve(epsilon: float, exponent: float) -> rates.Curve:
    n = 500.0 / factor(epsilon) ** 2 * np.array([1.0, 10.0, 100.0])
    noise = np.random.default_rng(1).uniform(0.9, 1.1, (3, 50))
    subopt = (5.0 * (factor(epsilon) ** 2 * n) ** exponent)[:, None] * noise
    return rates.Curve(epsilon, n, subopt, np.repeat((5.0 / (factor(epsilon) ** 2 * n))[:, None], 50, axis=1))


def test_rate_verdicts_follow_the_curves() -> None:
    good, slow = [curve(epsilon, -1.0) for epsilon in (0.5, 2.0)], [curve(epsilon, -0.8) for epsilon in (0.5, 2.0)]
    shifted = [good[0], replace(good[1], subopt=1.3 * good[1].subopt)]
    assert [claim.verdict for claim in rates.rate_claims(good, shifted, 0)] == ["holds"] * 5 + ["refuted"] * 3
    assert [claim.verdict for claim in rates.rate_claims(slow, good, 0)][:2] == ["refuted"] * 2


def test_private_mle_is_efficient_in_a_small_run() -> None:
    """Variance / bound over 5 × 400 coordinates has standard error .045 (and 2 ε): within five of them of 1."""
    found = rates.efficiency(300, 5)
    for epsilon, whitened in found.items():
        assert rates.variance(whitened.T) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 1500)), epsilon
    doubled = {1.0: math.sqrt(1.2) * found[1.0]}
    assert next(rates.efficiency_claims(doubled, 0)).measured == pytest.approx(1.2 * rates.variance(found[1.0].T))


def test_definition_3_2_by_naive_loops() -> None:
    generator = np.random.default_rng(2)
    members = generator.uniform(size=(5, 2, 3))
    reference = generator.dirichlet(np.ones(3), 2)
    naive = np.zeros((2, 3))
    for g in members:
        for h in members:
            gap = g - h
            means = (reference * gap).sum(axis=1)
            variance = np.mean([(reference[s] * (gap[s] - means[s]) ** 2).sum() for s in range(2)])
            if variance > 0:
                naive = np.maximum(naive, (gap - means[:, None]) ** 2 / variance)
    assert finite.concentrability(members, np.log(reference)) == pytest.approx(naive)
    assert finite.typeset_concentrability(members) == 0.0
    assert finite.typeset_concentrability(3.0 * members) > 0.0  # an interval for b that is too short would leave some


def test_tabular_concentrability_is_attained_and_never_exceeded() -> None:
    """D² = S(1/π − 1) over all rewards: single indicators attain it."""
    reference = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]])
    bound = 2 * (1.0 / reference - 1.0)
    indicators = np.eye(6).reshape(6, 2, 3)
    anything = np.random.default_rng(3).normal(size=(40, 2, 3))
    zero = np.zeros((1, 2, 3))
    assert (finite.concentrability(np.concatenate([zero, anything]), np.log(reference)) <= bound + 1e-9).all()
    assert finite.concentrability(np.concatenate([zero, indicators]), np.log(reference)) == pytest.approx(bound)


def test_eq_10_by_hand() -> None:
    value = finite.bonus(np.array([4.0]), math.log(3.0), 100.0, math.log(10.0), 0.25, net=0.01)
    expected = math.sqrt(4.0 * 0.25 * math.e / 0.25 * (math.log(10.0 / 0.05) / 100.0 + 0.01))
    assert value == pytest.approx([expected])


def test_lemma_b2_holds_with_half_its_constant_and_nearly_attains_it() -> None:
    ratios = finite.lemma_b2(20_000, 1)
    assert 0.49 < ratios.max() <= 0.5 + 1e-6
    assert ratios.min() > 0.0


def test_algorithm_one_on_a_finite_class() -> None:
    whole = finite.algorithm(20, 4, sizes=(1e3, 1e5))
    for one in whole:
        assert (one.subopt[one.covered] <= one.promised[one.covered]).all()
        assert one.subopt[1].mean() < one.subopt[0].mean()
        assert one.plain[1].mean() < 0.2 * one.plain[0].mean()
    again = finite.algorithm(20, 4, sizes=(1e3, 1e5))
    assert all(np.array_equal(a.subopt, b.subopt) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("tau", [0.2, 0.03])
def test_the_net_is_a_net_and_not_much_finer_than_needed(tau: float) -> None:
    theta = np.linspace(0.0, 1.0, 500)
    distance = np.abs(finite.curve_members(theta)[:, None] - finite.curve_members(finite.net(tau))[None])
    farthest = distance.max(axis=(2, 3)).min(axis=1).max()
    assert tau / 4 < farthest <= tau


def test_nets_cost_the_square_of_tau() -> None:
    found = finite.nets(40, 5, sizes=(1e4,))
    assert (found.limit[0] > 0).mean() > 0.9
    exponent = np.polyfit(np.log(finite.NETS), np.log(found.limit.mean(axis=1)), 1)[0]
    assert 1.6 < exponent < 2.4
    assert found.exact.mean() < found.fixed[0].mean()
    assert found.growing.mean() == pytest.approx(found.exact.mean(), rel=0.2)


def setting(**changes: float) -> hard.Setting:
    return replace(hard.Setting(4.0, 0.5, 2.0, 1.0, 10_000, 0.1), **changes)  # type: ignore[arg-type]


def test_the_hard_instance_has_the_concentrability_it_says() -> None:
    """π*/π_ref at most C, and near C/2 for both responses' worst case: Theorem 4.5, step 2."""
    given = setting()
    for sign in (1.0, -1.0):
        bandit = Bandit(np.array([[given.offset + sign * 0.1, 0.0]]), np.log([[0.25, 0.75]]), 0.5)
        policy = np.exp(bandit.gibbs(bandit.reward))[0]
        assert policy[0] == pytest.approx(1.0 / (1.0 + math.exp(-sign * 0.1 / 0.5)))
        assert (policy / [0.25, 0.75]).max() <= 4.0


def test_lower_bound_by_hand() -> None:
    given = setting(epsilon=math.log(3.0))
    a = math.sqrt(32.0 / 10_000) / 2.0
    assert given.lower_bound == pytest.approx(math.exp(-1) / 4 * min(2.0 * a * a / 8.0, 0.3 * a))
    assert hard.rate_distance(4.0, math.log(3.0), 10_000) == pytest.approx(2.0 * math.sqrt(32.0 / 10_000) / 0.5)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_tabular_margin_is_the_maximiser(epsilon: float) -> None:
    counts = Counts(np.array([[30.0, 50.0, 0.0, 1.0]]), np.array([[20.0, 2.0, 0.0, 0.0]]))
    grid = np.linspace(-1.0, 1.0, 4001)
    plus, minus = loss_values(grid, epsilon, "private_likelihood")
    naive = grid[(counts.plus[0][:, None] * plus + counts.minus[0][:, None] * minus).argmin(axis=1)]
    found = hard.tabular_margin(counts, epsilon, 1.0)[0]
    assert found[[0, 1, 3]] == pytest.approx(naive[[0, 1, 3]], abs=1e-3)
    assert found[2] == 0.0


def test_the_posterior_mean_is_bayes_and_best() -> None:
    given = setting(comparisons=2000, distance=0.3)
    counts = Counts(np.array([[12.0] * 8]), np.array([[9.0] * 8]))
    plus, minus = loss_values(given.offset + np.array([0.3, -0.3]), 1.0, "private_likelihood")
    likelihood = np.exp(-12.0 * plus - 9.0 * minus)
    expected = given.offset + 0.3 * (likelihood[0] - likelihood[1]) / likelihood.sum()
    margins = hard._margins(counts, given)
    assert margins["posterior mean"][0] == pytest.approx(np.full(8, expected))
    assert margins["tabular MLE - Fisher bonus"][0, 0] < margins["tabular MLE"][0, 0]
    risks = hard.simulate(np.random.default_rng(6), given, 400)
    mean = {policy: risks.mean(policy).mean() for policy in hard.POLICIES}
    assert min(mean, key=mean.get) == "posterior mean"  # type: ignore[arg-type]
    assert all(risks.worst(policy) >= value for policy, value in mean.items())


def test_lower_bound_verdicts() -> None:
    """The bound holds, is matched in (2α−1)^−2 and not in (e^ε−1)^−2; a bound 100 times too large is refuted."""
    bound = hard.grid(40, 7, (10_000, 100_000), theorem=True)
    rate = hard.grid(40, 8, (100_000,), theorem=False)
    verdicts = [claim.verdict for claim in hard.claims(bound, rate, hard.coverage_curve(40, 9), 0)]
    assert verdicts[0] == "holds"
    assert verdicts[2:5] == ["refuted", "refuted", "holds"]
    least = min(float(one.mean("posterior mean").mean() / one.setting.lower_bound) for one in bound)
    assert 5.0 < least < 20.0


def test_fisher_width_by_naive_linear_algebra() -> None:
    generator = np.random.default_rng(10)
    bandit = pessimism.problem(pessimism.CASES[3], generator)
    root = generator.normal(size=(16, 16))
    information = (root @ root.T + np.eye(16))[None]
    width = pessimism.fisher_width(information, bandit.log_reference)
    inverse = np.linalg.inv(information[0])
    for s in range(4):
        for a in range(4):
            phi = np.zeros((4, 4))
            phi[s] = -np.exp(bandit.log_reference[s])
            phi[s, a] += 1.0
            assert width[0, s, a] == pytest.approx(math.sqrt(phi.ravel() @ inverse @ phi.ravel()))


def test_pessimism_saves_from_a_bad_rare_response_and_costs_on_a_good_one() -> None:
    outcomes = pessimism.measure(30, 11, (pessimism.CASES[1], pessimism.CASES[4]))
    bad, good = outcomes
    assert bad.subopt["kappa 1"].mean() < 0.5 * bad.subopt["kappa 0"].mean()
    assert good.subopt["kappa 1"].mean() > 1.2 * good.subopt["kappa 0"].mean()
    claims = list(pessimism.claims(outcomes, 0))
    assert [claim.verdict for claim in claims][:2] == ["holds", "refuted"]


def test_a_golden_run() -> None:
    """Seeded counts, fit and SubOpt, to seven digits: any change of a draw or a formula shows."""
    problem = rates.linear_bandit(np.random.default_rng(12), 1.0)
    counts = offline_counts(np.random.default_rng(13), problem.bandit, 5000, 2, 1.0)
    margin = all_pairs(10, 5).difference(problem.bandit.reward)
    assert counts.plus.sum() == GOLDEN_PLUS
    assert total_loss(counts, margin[None], 1.0)[:, 0] == pytest.approx(GOLDEN_LOSS, rel=1e-7)
    theta = rates.estimate("private likelihood", counts, problem.difference, 1.0)
    assert problem.subopt(theta) == pytest.approx(GOLDEN_SUBOPT, rel=1e-5)


GOLDEN_PLUS = 4166.0
GOLDEN_LOSS = [2759.65917, 2757.91528]
GOLDEN_SUBOPT = [0.00842016564, 0.00615570449]
