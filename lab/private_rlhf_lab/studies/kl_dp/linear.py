"""The linear-bandit accountants against every addition to small data sets, and against the extremal family."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from private_rlhf.accounting.epsilon_delta import Guarantee
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, loss

from private_rlhf_lab.accounting.draws import Thresholds, linear_draw, linear_epsilon
from private_rlhf_lab.studies.kl_dp.records import gram, least_eigenvalue, multisets, ridge_estimate, width
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined, threshold_ratios

FEATURES = np.array([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8], [0.01, 0.01]])
RECORDS = np.concatenate([FEATURES, FEATURES])
REWARDS = np.array([1.0] * len(FEATURES) + [-1.0] * len(FEATURES))
RIDGES = (0.3, 2.0)
KL_COEF = 0.5
# log π0 that favours the well-covered action, for the approximate statement.
FAVOURED = np.log([1e-4 / 3, 1e-4 / 3, 1e-4 / 3, 1.0 - 1e-4])


def references(actions: int) -> list[Array]:
    """log π0: uniform, and one that all but excludes each action in turn."""
    uniform = np.full(actions, 1.0 / actions)
    skewed = [np.where(np.arange(actions) == a, 1e-9, 1.0) for a in range(actions)]
    return [np.log(each / each.sum()) for each in (uniform, *skewed)]


def utility(counts: Array, ridge: float, pessimism: float) -> Array:
    """u = φᵀθ̂ − β‖φ‖_{Σ^−1} for the actions FEATURES, (b, A)."""
    estimate = ridge_estimate(counts, RECORDS, REWARDS, ridge)
    return np.asarray(estimate @ FEATURES.T - pessimism * width(FEATURES, gram(counts, RECORDS, ridge)))


def searches(largest: int) -> list[Search]:
    """Pure and approximate over all pairs, and the 1-d extremal family of the pure bound."""
    pure, approximate = [], []
    counts = multisets(len(RECORDS), largest)
    for ridge in RIDGES:
        smaller = gram(counts, RECORDS, ridge)
        least = least_eigenvalue(smaller)
        rows = counts.sum(axis=1).astype(int)
        for pessimism in (0.0, 1.5):
            bound = np.array(
                [linear_epsilon(KL_COEF, pessimism, 1.0, m, int(n)) for m, n in zip(least, rows, strict=True)]
            )
            before, core = utility(counts, ridge, pessimism), width(FEATURES, smaller)
            for step in np.eye(len(RECORDS)):
                after = utility(counts + step, ridge, pessimism)
                for log_reference in references(len(FEATURES)):
                    first = gibbs_log_policy(before, log_reference, KL_COEF)
                    second = gibbs_log_policy(after, log_reference, KL_COEF)
                    pure.append(loss(first, second) / bound)
                spread = width(FEATURES, gram(counts + step, RECORDS, ridge))
                for kl_coef in (KL_COEF, 1.5, 8.0):
                    first = gibbs_log_policy(before, FAVOURED, kl_coef)
                    second = gibbs_log_policy(after, FAVOURED, kl_coef)
                    promise = _promise(kl_coef, pessimism, least, rows)
                    approximate.append(threshold_ratios(first, second, core, spread, FAVOURED, FEATURES, promise))
    pure.append(np.array([extremal_ratio(n) for n in (10**2, 10**4, 10**6)]))
    return [
        joined("Linear bandit: one draw is e0(mu, N)-DP", f"{OURS} Theorem 2, pure", pure),
        joined("Linear bandit, thresholds: one draw is (e(tau), delta)-DP", f"{OURS} Theorem 2, approximate",
               approximate),
    ]


def _promise(
    kl_coef: float, pessimism: float, least: Array, rows: NDArray[np.int64]
) -> Callable[[int, Thresholds], Guarantee]:
    def promise(i: int, split: Thresholds) -> Guarantee:
        return linear_draw(kl_coef, pessimism, 1.0, float(least[i]), int(rows[i]), thresholds=split)

    return promise


def extremal_ratio(rows: int, ridge: float = 1.0, eigenvalue: float = 50.0) -> float:
    """Loss over bound of N copies of x = √((μ−λ)/N) with reward 1, then one record at x = 1 with reward −1.

    Actions ±1, no pessimism, one of them all but excluded by π0. Tends to 1 as N grows.
    """
    x = np.sqrt((eigenvalue - ridge) / rows)
    before = rows * x / eigenvalue
    after = (rows * x - 1.0) / (eigenvalue + 1.0)
    log_reference = np.log([1e-12, 1.0 - 1e-12])
    signs = np.array([-1.0, 1.0])
    first = gibbs_log_policy(signs * before, log_reference, 1e4)
    second = gibbs_log_policy(signs * after, log_reference, 1e4)
    return float(loss(first, second)) / linear_epsilon(1e4, 0.0, 1.0, eigenvalue, rows)
