"""The papers' headline claims hold on small runs, and an estimator that ignores the flips is caught."""

from __future__ import annotations

import numpy as np
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation import kl_dp, offline, outcome_rewards, regret, temporal_differences
from private_rlhf.validation.bandits import slope_of_mean


def test_suboptimality_of_the_private_mle_falls_like_one_over_n_and_that_of_the_uncorrected_does_not() -> None:
    found = offline.arms(60, (1e4, 1e5, 1e6), 1, (1.0,))
    slope = {arm: bootstrap(slope_of_mean(found.comparisons), found.subopt[arm, 1.0], 1) for arm in offline.ARMS}
    assert slope["private likelihood"].ci_low < -1.0 < slope["private likelihood"].ci_high + 0.05
    assert abs(slope["uncorrected"].value) < 0.1


def test_regret_of_optimism_grows_like_log_t_and_privacy_costs_its_square() -> None:
    world = regret.grid_world(np.random.default_rng(1), 6)
    traces = {(regret.OPTIMISM, e): regret.simulate(world, e, 100_000, 1) for e in regret.EPSILONS[:3]}
    final = [traces[regret.OPTIMISM, e].regret[-1].mean() for e in regret.EPSILONS[:3]]
    assert final[0] > final[1] > final[2]
    assert len(list(regret.privacy_claims(traces, 1))) == 2
    assert len(regret.figure({(n, e): traces[regret.OPTIMISM, min(e, 2.0)] for n in (regret.OPTIMISM, regret.NONE)
                              for e in regret.EPSILONS}).axes) == 2  # fmt: skip


def test_the_loss_of_a_gibbs_draw_is_at_most_the_range_of_the_change_and_the_published_step_fails() -> None:
    verdict = {each.claim: each.verdict().verdict for each in kl_dp.lemma(500)}
    assert verdict["Lemma 1: the loss is at most range(d)"] == "holds"
    assert verdict["Published proof step: ratio on A1 at most e^(2 Delta)"] == "refuted"
    assert [claim.verdict for claim in kl_dp.proposition_one()[0]] == ["holds", "holds", "refuted"]


def test_table_one_is_reproduced_without_privacy_and_not_at_an_honest_total() -> None:
    """At ε = 8 in total the plateaus come thrice as late as Table 1 has them; a draw keeps its bound."""
    curves = outcome_rewards.table_one(200, 1)
    verdict = {each.claim.split(":")[0]: each.verdict for each in outcome_rewards.plateau_claims(curves, 1)}
    for name in outcome_rewards.PUBLISHED:
        assert verdict[f"non-private, no batch, {name}"] == verdict[f"non-private, batched, {name}"] == "holds"
        assert verdict[f"private, eps = 8, {name}"] == "refuted"
    assert [each.verdict for each in outcome_rewards.privacy_claims()] == ["holds", "holds", "refuted"]
    assert outcome_rewards.growth("easy", (1000, 4000, 16_000), 8, 1).ci_high < 0.65
    assert len(outcome_rewards.figure(curves).axes) == 2


def test_the_published_noise_of_dptd_cannot_fall_inside_its_conditions() -> None:
    """Eq. 4 rises under Theorem 5.1's noise, and falls under an accountant's; one small grid, fixed seeds."""
    pool = temporal_differences.cart_pole(2000, 3)
    generator = np.random.default_rng(3)
    points = {
        noise: [temporal_differences.point(temporal_differences.linear(*(column[:rows] for column in pool)), epsilon,
                                           noise, 5, generator) for rows, epsilon in ((500, 2.0), (2000, 8.0))]
        for noise in temporal_differences.NOISES
    }  # fmt: skip
    assert [each.verdict for each in temporal_differences.claims(points)] == ["refuted", "holds"]
    assert temporal_differences.condition_claim().verdict == "refuted"
    assert temporal_differences.figure(points).axes[0].get_xscale() == "log"
