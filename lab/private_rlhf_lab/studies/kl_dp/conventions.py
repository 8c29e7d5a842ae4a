"""Two accountants without a condition on the data: the bandit whose unseen arms count as one record of 0 (convention
B), and the ridge estimate held in a ball, whose ε does not grow like √N. Both under add-remove neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, loss
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.accounting.draws import bandit_unconditional, linear_draw, linear_epsilon
from private_rlhf_lab.studies.kl_dp import bandit, linear
from private_rlhf_lab.studies.kl_dp.records import bandit_utility, gram, least_eigenvalue, multisets, width
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined

RADIUS = 0.5
SIZES = (10**2, 10**4, 10**6)  # N: the ratio to the bound is the same at each, so N is not in the truth either


def unconditional(largest: int) -> Search:
    """Every pair of data sets of two arms, empty ones included, against the bound that asks for no coverage."""
    ratios = []
    for kl_coef in bandit.KL_COEFS:
        for pessimism in (0.0, *bandit.PESSIMISM):
            bound = bandit_unconditional(kl_coef, pessimism, 1.0).epsilon
            for mass in bandit.REFERENCE_MASSES:
                log_reference = np.log([mass, 1.0 - mass])
                for counts, sums, more_counts, more_sums, _ in bandit.pairs(largest):
                    both = ((counts, sums), (more_counts, more_sums))
                    first, second = (
                        gibbs_log_policy(bandit_utility(n, r, pessimism, optional=True), log_reference, kl_coef)
                        for n, r in both
                    )
                    ratios.append(loss(first, second) / bound)
    return joined("Bandit, unseen arms count as one record of 0: one draw is pure DP for every data set",
                  f"{OURS} Theorem 1, convention B", ratios)


def ball_ridge(matrix: Array, moments: Array, radius: float) -> Array:
    """argmin θᵀΣθ − 2bᵀθ over ‖θ‖ <= radius, (n, d, d), (n, d) -> (n, d): where it binds, a larger ridge."""
    values, vectors = np.linalg.eigh(matrix)
    along = np.einsum("nij,ni->nj", vectors, moments)

    def at(extra: Array) -> Array:
        return np.asarray(along / (values + extra[:, None]))

    low, high = np.zeros(len(matrix)), np.linalg.norm(moments, axis=1) / radius
    free = np.linalg.norm(at(low), axis=1) <= radius
    for _ in range(100):
        middle = 0.5 * (low + high)
        large = np.linalg.norm(at(middle), axis=1) > radius
        low, high = np.where(large, middle, low), np.where(large, high, middle)
    return np.einsum("nij,nj->ni", vectors, at(np.where(free, 0.0, high)))


def constrained(largest: int) -> Search:
    """Every addition to small data sets of `linear`'s records, and the one-dimensional extremes."""
    counts, ratios = multisets(len(linear.RECORDS), largest), []
    for ridge in linear.RIDGES:
        least = least_eigenvalue(gram(counts, linear.RECORDS, ridge))
        rows = counts.sum(axis=1).astype(int)
        for pessimism in (0.0, 1.5):
            bound = np.array([
                linear_draw(linear.KL_COEF, pessimism, 1.0, float(m), int(n), parameter_norm=RADIUS).epsilon
                for m, n in zip(least, rows, strict=True)
            ])
            before = _utility(counts, ridge, pessimism)
            for step in np.eye(len(linear.RECORDS)):
                after = _utility(counts + step, ridge, pessimism)
                for log_reference in linear.references(len(linear.FEATURES)):
                    first = gibbs_log_policy(before, log_reference, linear.KL_COEF)
                    ratios.append(loss(first, gibbs_log_policy(after, log_reference, linear.KL_COEF)) / bound)
    ratios.append(np.array([extremal_ratio(n) for n in SIZES]))
    return joined("Linear bandit, ridge constrained to a ball: one draw is e0(mu)-DP, without N",
                  f"{OURS} Theorem 2, remark", ratios)


def _utility(counts: Array, ridge: float, pessimism: float) -> Array:
    matrix = gram(counts, linear.RECORDS, ridge)
    moments = np.einsum("bt,ti,t->bi", counts, linear.RECORDS, linear.REWARDS)
    spread = width(linear.FEATURES, matrix)
    return np.asarray(ball_ridge(matrix, moments, RADIUS) @ linear.FEATURES.T - pessimism * spread)


def extremal_ratio(rows: int, ridge: float = 1.0, eigenvalue: float = 50.0) -> float:
    """Loss over bound: copies of one small x whose rewards put θ̂ on the ball's edge, then a record (1, −1)."""
    before = np.array([[eigenvalue * RADIUS]])
    matrix = np.array([[[eigenvalue]]])
    assert eigenvalue * RADIUS <= np.sqrt((eigenvalue - ridge) * rows)  # rewards of at most 1 can do it
    first = ball_ridge(matrix, before, RADIUS)[0]
    second = ball_ridge(matrix + 1.0, before - 1.0, RADIUS)[0]
    log_reference, signs = np.log([1e-12, 1.0 - 1e-12]), np.array([-1.0, 1.0])
    policies = [gibbs_log_policy(signs * theta, log_reference, 1e4) for theta in (first, second)]
    bound = linear_epsilon(1e4, 0.0, 1.0, eigenvalue, rows, parameter_norm=RADIUS)
    return float(loss(policies[0], policies[1])) / bound


def searches(largest: int) -> list[Search]:
    """Both accountants."""
    return [unconditional(largest + 3), constrained(largest)]


def claims() -> Iterator[Claim]:
    """Convention A has no such bound."""
    counts, sums = np.array([[0.0, 3.0]]), np.array([[0.0, 3.0]])
    step = np.array([1.0, 0.0])
    both = (counts, counts + step)
    policies = [gibbs_log_policy(bandit_utility(n, sums, 1.0), np.log([0.5, 0.5]), 1.0) for n in both]
    yield within("Bandit, unseen arms have probability 0 (convention A): the unconditional bound holds as well",
                 "reading of the KL-DP paper, Theorem 1", float(loss(*policies)[0]), kind="reading",
                 high=bandit_unconditional(1.0, 1.0, 1.0).epsilon, what="loss when an arm gets its first record")
