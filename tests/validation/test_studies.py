"""The papers' headline claims hold on small runs, and an estimator that ignores the flips is caught."""

from __future__ import annotations

import numpy as np
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation import kl_dp, offline, online
from private_rlhf.validation.bandits import slope_of_mean


def test_suboptimality_of_the_private_mle_falls_like_one_over_n_and_that_of_the_uncorrected_does_not() -> None:
    found = offline.arms(60, (1e4, 1e5, 1e6), 1, (1.0,))
    slope = {arm: bootstrap(slope_of_mean(found.comparisons), found.subopt[arm, 1.0], 1) for arm in offline.ARMS}
    assert slope["private likelihood"].ci_low < -1.0 < slope["private likelihood"].ci_high + 0.05
    assert abs(slope["uncorrected"].value) < 0.1


def test_regret_of_optimism_grows_like_log_t_and_privacy_costs_its_square() -> None:
    world = online.grid_world(np.random.default_rng(1), 6)
    arm = online.Arm(online.OPTIMISM, "optimism")
    traces = {(arm.name, e): online.simulate(world, arm, e, 100_000, 1) for e in online.EPSILONS[:3]}
    final = [traces[arm.name, e].regret[-1].mean() for e in online.EPSILONS[:3]]
    assert final[0] > final[1] > final[2]
    assert len(list(online.privacy_claims(traces, 1))) == 2
    assert len(online.figure({(n, e): traces[arm.name, min(e, 2.0)] for n in (online.OPTIMISM, online.NONE)
                              for e in online.EPSILONS}).axes) == 2  # fmt: skip


def test_the_loss_of_a_gibbs_draw_is_at_most_the_range_of_the_change_and_the_published_step_fails() -> None:
    verdict = {each.claim: each.verdict().verdict for each in kl_dp.lemma(500)}
    assert verdict["Lemma 1: the loss is at most range(d)"] == "holds"
    assert verdict["Published proof step: ratio on A1 at most e^(2 Delta)"] == "refuted"
    assert [claim.verdict for claim in kl_dp.proposition_one()[0]] == ["holds", "holds", "refuted"]
