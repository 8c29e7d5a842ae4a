"""The bandit accountants against every neighbouring pair of small data sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, hockey_stick, loss

from private_rlhf_lab.accounting.draws import bandit_approximate, bandit_epsilon
from private_rlhf_lab.studies.kl_dp.records import bandit_utility, multisets
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined

REFERENCE_MASSES = (1e-9, 0.5, 1.0 - 1e-9)
KL_COEFS = (0.1, 1.0)
PESSIMISM = (0.5, 4.0)


def pairs(largest: int) -> Iterator[tuple[Array, Array, Array, Array, int]]:
    """(counts, sums) of the smaller and of the larger set, (b, 2) each, and the arm a0 of the added reward in {0, 1}.

    Every data set of two arms with rewards in {0, 1} and at most `largest` records, and every addition to it.
    """
    records = multisets(4, largest)  # types (arm, reward): (0, 0), (0, 1), (1, 0), (1, 1)
    counts = np.stack([records[:, 0] + records[:, 1], records[:, 2] + records[:, 3]], axis=1)
    sums = records[:, [1, 3]]
    for arm in (0, 1):
        for reward in (0.0, 1.0):
            step = np.eye(2)[arm]
            yield counts, sums, counts + step, sums + reward * step, arm


def searches(largest: int) -> list[Search]:
    """Pure and approximate statements, rewards in [0, 1]."""
    pure, halved, approximate = [], [], []
    for kl_coef in KL_COEFS:
        for pessimism in PESSIMISM:
            for mass in REFERENCE_MASSES:
                log_reference = np.log([mass, 1.0 - mass])
                for counts, sums, more_counts, more_sums, _ in pairs(largest):
                    keep = counts.sum(axis=1) > 0
                    small, large = counts[keep], more_counts[keep]
                    first = gibbs_log_policy(bandit_utility(small, sums[keep], pessimism), log_reference, kl_coef)
                    second = gibbs_log_policy(bandit_utility(large, more_sums[keep], pessimism), log_reference, kl_coef)
                    bound = _bounds(small.min(axis=1), kl_coef, pessimism)
                    covered = np.isfinite(bound)
                    measured = loss(first[covered], second[covered])
                    pure.append(measured / bound[covered])
                    halved.append(measured / bound[covered] / 2.0)
                    approximate.append(_approximate(small, first, second, kl_coef, pessimism, mass))
    return [
        joined("Bandit, both neighbours covered: one draw is e0(M)-DP", f"{OURS} Theorem 1, pure", pure),
        joined("Bandit, published factor 2: one draw is 2 e0(M)-DP", "KL-DP paper Theorem 1 (pure)", halved),
        joined("Bandit, any coverage: one draw is (e0(M), delta)-DP", f"{OURS} Theorem 1, Corollary 1", approximate),
    ]


def _bounds(least: Array, kl_coef: float, pessimism: float) -> Array:
    """ε0 at the least count, ∞ at 0."""
    table = [np.inf, *(bandit_epsilon(kl_coef, pessimism, 1.0, m) for m in range(1, int(least.max()) + 1))]
    return np.array(table)[least.astype(int)]


def _approximate(counts: Array, first: Array, second: Array, kl_coef: float, pessimism: float, mass: float) -> Array:
    """δ measured at ε0(M) over the δ of the accountant, wherever that is below 1; all M below the largest count."""
    ratios = []
    best = counts.argmax(axis=1)
    most = counts.max(axis=1).astype(int)
    for leader in (0, 1):
        for size in np.unique(most[best == leader]):
            rows = (best == leader) & (most == size)
            for threshold in range(1, size):
                promise = bandit_approximate(
                    kl_coef, pessimism, 1.0, int(size), threshold / size, (mass, 1.0 - mass)[leader]
                )
                if promise.delta < 1.0:
                    measured = hockey_stick(first[rows], second[rows], promise.epsilon)
                    ratios.append(measured / max(promise.delta, 1e-12))
    return np.concatenate(ratios) if ratios else np.zeros(0)


def worst_loss(kl_coef: float, pessimism: float, count: int) -> float:
    """The loss of the extremal pair: an unlikely arm with `count` rewards of 0 receives a reward of 1."""
    counts, sums = np.array([[count, 4.0 * count]]), np.array([[0.0, 0.0]])
    step = np.array([1.0, 0.0])
    reference = np.log([1e-12, 1.0 - 1e-12])
    first = gibbs_log_policy(bandit_utility(counts, sums, pessimism), reference, kl_coef)
    second = gibbs_log_policy(bandit_utility(counts + step, sums + step, pessimism), reference, kl_coef)
    return float(loss(first, second)[0])
