"""The corrected lower bound: every step of its proof by number, and verdicts that can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf.validation.bandits import factor
from private_rlhf_lab.studies.offline import hard, lower_bound
from private_rlhf_lab.studies.offline.lower_bound import FLOOR, MLE


def test_the_two_rewards_of_a_pair_cannot_both_be_served() -> None:
    """Least of KL(p ‖ σ(x)) + KL(p ‖ σ(−x)) over p is 2 log cosh(x/2), at least min(x²/8, 3x/10)."""
    share = np.linspace(1e-6, 1.0 - 1e-6, 20_001)
    for x in (1e-2, 0.5, 2.0, 2.4, 5.0, 10.0):
        best = 1.0 / (1.0 + math.exp(-x))
        cost = sum(share * np.log(share / q) + (1 - share) * np.log((1 - share) / (1 - q)) for q in (best, 1 - best))
        assert cost.min() == pytest.approx(2.0 * math.log(math.cosh(x / 2.0)), rel=1e-6)
        assert cost.min() >= min(x * x / 8.0, 0.3 * x)


def test_one_comparison_tells_at_most_a_squared_over_two() -> None:
    """Largest KL of margins b + a and b − a over a²/2: at most 1, and near 1 for a small a at b = 0."""
    b, a = np.meshgrid(np.linspace(0.0, 3.0, 31), np.geomspace(1e-3, 3.0, 31))
    first, second = (1.0 / (1.0 + np.exp(-margin)) for margin in (b + a, b - a))
    kl = first * np.log(first / second) + (1.0 - first) * np.log((1.0 - first) / (1.0 - second))
    assert 0.999 < (2.0 * kl / a**2).max() <= 1.0


def test_random_channels_are_private_and_come_from_randomised_response() -> None:
    epsilon = np.repeat([0.1, 1.0, 4.0], 200)
    rows = lower_bound.random_channels(np.random.default_rng(0), epsilon)
    assert rows.sum(axis=2) == pytest.approx(1.0)
    assert (np.abs(np.log(rows[:, 0] / rows[:, 1])).max(axis=1) <= epsilon + 1e-9).all()
    keep = (1.0 / (1.0 + np.exp(-epsilon)))[:, None]
    after = [(keep * rows[:, i] - (1.0 - keep) * rows[:, 1 - i]) / (2.0 * keep - 1.0) for i in (0, 1)]
    assert min(each.min() for each in after) > -1e-12
    assert [each.sum(axis=1) for each in after] == pytest.approx(np.ones((2, len(epsilon))))


def test_contraction_is_at_most_one_and_response_reaches_it() -> None:
    anywhere, response = lower_bound.contraction(5000, 0)
    assert anywhere.max() <= 1.0
    assert 0.999 < response.max() <= 1.0 + 1e-12


def risks(scale: float = 1.0) -> list[hard.Risks]:
    """Exact-looking floors: 14 corrected bounds, times `scale` at ε = 4; the MLE twice, pessimism thrice that."""
    made = []
    for epsilon in hard.EPSILONS:
        setting = hard.Setting(4.0, 0.5, 2.0, epsilon, round(1e6 / factor(epsilon) ** 2), 0.1)
        level = 14.0 * lower_bound.bound(setting) * (scale if epsilon == 4.0 else 1.0)
        noise = level * np.random.default_rng(1).uniform(0.99, 1.01, (2, 100))
        by_sign = dict(zip(hard.POLICIES, (share * noise for share in (1.0, 1.5, 2.0, 3.0, 9.0)), strict=True))
        made.append(hard.Risks(setting, by_sign))
    return made


def test_corrected_and_published_bound() -> None:
    for one in risks():
        assert lower_bound.bound(one.setting) / one.setting.lower_bound == pytest.approx(
            (math.exp(one.setting.epsilon) + 1.0) ** 2, rel=1e-5
        )


def test_verdicts_follow_the_floor() -> None:
    def verdicts(given: list[hard.Risks]) -> dict[str, str]:
        found = lower_bound.claims(given, given, 500, 0)
        return {claim.claim: claim.verdict for claim in found if "kappa =" not in claim.claim}

    good = verdicts(risks())
    assert [name for name, verdict in good.items() if verdict != "holds"] == [
        "The best possible SubOpt follows the published bound from epsilon = 0.1 to 4"
    ]
    for scale, words in ((1.4, ("from above", "follows the corrected")), (0.05, ("from below", "is a lower bound"))):
        broken = verdicts(risks(scale))
        assert {broken[name] for name in broken if any(word in name for word in words)} == {"refuted"}
    heavy = [replace(one, by_sign={**one.by_sign, MLE: 3.0 * one.by_sign[FLOOR]}) for one in risks()]
    assert {verdict for name, verdict in verdicts(heavy).items() if "Private MLE, eps" in name} == {"refuted"}


def test_the_expansion_is_the_truth_for_many_labels() -> None:
    """2,000 data sets of 8 contexts: standard error of a mean SubOpt 1.1 %."""
    setting = hard.Setting(4.0, 0.5, 2.0, 1.0, 2_000_000, 0.02)
    found = hard.simulate(np.random.default_rng(3), setting, 2000)
    for kappa, policy in ((0.0, MLE), (1.0, lower_bound.PESSIMISTIC)):
        assert found.mean(policy).mean() == pytest.approx(lower_bound.expansion(setting, kappa), rel=0.05)
