"""The RLHF accountants against every neighbour of small preference sets, and against the one-dimensional extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from private_rlhf.accounting.epsilon_delta import Guarantee
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, loss

from private_rlhf_lab.accounting.draws import (
    Thresholds,
    curvature_floor,
    rlhf_draw,
    rlhf_epsilon,
    rlhf_label_instance_epsilon,
)
from private_rlhf_lab.studies.kl_dp.linear import references
from private_rlhf_lab.studies.kl_dp.records import bradley_terry, gram, least_eigenvalue, multisets, width
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined, threshold_ratios

ACTIONS = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.01, 0.01]])
PAIRS = np.array([ACTIONS[0] - ACTIONS[1], ACTIONS[0] - ACTIONS[2], ACTIONS[1] - ACTIONS[2]])
SIGNED = np.concatenate([PAIRS, -PAIRS])  # label times difference: a flip moves a count from t to t ± 3
FLIPPED = (3, 4, 5, 0, 1, 2)
KL_COEF = 0.5
PESSIMISM = 1.0
# log π0 that favours the well-covered action, for the approximate statements.
FAVOURED = np.log([1e-4 / 3, 1e-4 / 3, 1e-4 / 3, 1.0 - 1e-4])


def searches(largest: int, radii: tuple[float, ...]) -> list[Search]:
    """Label and add-remove DP, pure; worst case and instance form; exact constrained fits with ridge κ = γλ."""
    label, instance, add = [], [], []
    counts = multisets(len(SIGNED), largest + 1)
    place = {tuple(row): i for i, row in enumerate(counts.astype(int).tolist())}
    small = np.flatnonzero(counts.sum(axis=1) <= largest)
    for radius in radii:
        for ridge in (0.3, 2.0):
            matrix = gram(counts, SIGNED, ridge)
            least = least_eigenvalue(matrix)
            theta = bradley_terry(counts, SIGNED, curvature_floor(radius) * ridge, radius)
            utility = theta @ ACTIONS.T - PESSIMISM * width(ACTIONS, matrix)
            pairs_wide = width(PAIRS, matrix)
            actions_apart = pairs_wide.max(axis=1)  # the fourth action lies between the others
            for log_reference in references(len(ACTIONS)):
                policy = gibbs_log_policy(utility, log_reference, KL_COEF)
                for kind, other in enumerate(FLIPPED):
                    move = np.eye(len(SIGNED), dtype=int)
                    own = small[counts[small, kind] > 0]
                    there = [place[tuple(row)] for row in (counts[own].astype(int) - move[kind] + move[other]).tolist()]
                    measured = loss(policy[own], policy[there])
                    label.append(measured / [_label(m, radius, ridge) for m in least[own]])
                    present = np.where((counts[own] + counts[own][:, FLIPPED])[:, :3] > 0, pairs_wide[own], 0.0)
                    instance.append(measured / _instance(radius, actions_apart[own], present.max(axis=1)))
                    more = [place[tuple(row)] for row in (counts[small].astype(int) + move[kind]).tolist()]
                    add.append(loss(policy[small], policy[more]) / [_added(m, radius) for m in least[small]])
    label.append(np.array([extremal_ratio(radius, 4000, "label") for radius in radii]))
    add.append(np.array([extremal_ratio(radius, 4000, "add-remove") for radius in radii]))
    return [
        joined("RLHF, label DP: one draw is 2 F xi / (gamma eta sqrt(mu))-DP", f"{OURS} Theorem 3", label),
        joined("RLHF, label DP for the given features", f"{OURS} Theorem 3, instance form", instance),
        joined("RLHF, add-remove DP: one draw is e0-DP", f"{OURS} Theorem 4", add),
    ]


def _label(eigenvalue: float, radius: float, ridge: float) -> float:
    return rlhf_epsilon(KL_COEF, eigenvalue, radius, "label", ridge=ridge)


def _added(eigenvalue: float, radius: float) -> float:
    return rlhf_draw(KL_COEF, eigenvalue, radius, "add-remove", pessimism=PESSIMISM).epsilon


def _instance(radius: float, apart: Array, wide: Array) -> Array:
    each = zip(apart, wide, strict=True)
    return np.array([rlhf_label_instance_epsilon(KL_COEF, radius, float(a), float(w)) for a, w in each])


def extremal_loss(radius: float, pairs: int, kl_coef: float, notion: str, ridge: float = 1.0) -> float:
    """Largest loss of `pairs` equal pairs x = 2 with labels such that θ̂ sits just inside the ball.

    The neighbour has one label turned against the majority, or one more such record. Actions φ = ±1 (so F = 1, L = 2),
    the favoured one all but excluded by π0; no pessimism.
    """
    signed = np.array([[2.0], [-2.0]])
    kappa = curvature_floor(radius) * ridge
    against = math.ceil(pairs / (1.0 + math.exp(2.0 * radius)))
    table = np.array([[pairs - against - k, against + k] for k in range(8)], dtype=np.float64)
    step = np.array([-1.0, 1.0]) if notion == "label" else np.array([0.0, 1.0])
    log_reference = np.log([1e-12, 1.0 - 1e-12])
    policies = []
    for counts in (table, table + step):
        theta = bradley_terry(counts, signed, kappa, radius)
        policies.append(gibbs_log_policy(theta * np.array([1.0, -1.0]), log_reference, kl_coef))
    return float(loss(policies[0], policies[1]).max())


def extremal_ratio(radius: float, pairs: int, notion: str, ridge: float = 1.0) -> float:
    """`extremal_loss` over its bound; tends to 1 as the number of pairs grows."""
    bound = rlhf_epsilon(KL_COEF, ridge + 4.0 * pairs, radius, notion, ridge=ridge)
    return extremal_loss(radius, pairs, KL_COEF, notion, ridge) / bound


def threshold_searches(largest: int, radius: float = 0.5, ridge: float = 0.3) -> list[Search]:
    """The approximate statements, label and add-remove, for two strengths of KL."""
    label: list[Array] = []
    add: list[Array] = []
    counts = multisets(len(SIGNED), largest)
    kappa = curvature_floor(radius) * ridge
    small = gram(counts, SIGNED, ridge)
    least = least_eigenvalue(small)
    core = width(ACTIONS, small)
    before = bradley_terry(counts, SIGNED, kappa, radius) @ ACTIONS.T
    for kind, other in enumerate(FLIPPED):
        moves = {"add-remove": np.eye(len(SIGNED))[kind],
                 "label": np.eye(len(SIGNED))[other] - np.eye(len(SIGNED))[kind]}
        for notion, move in moves.items():
            own = counts[:, kind] > 0 if notion == "label" else np.ones(len(counts), dtype=bool)
            after_counts = counts[own] + move
            spread = width(ACTIONS, gram(after_counts, SIGNED, ridge))
            after = bradley_terry(after_counts, SIGNED, kappa, radius) @ ACTIONS.T
            for kl_coef, pessimism in ((0.5, 6.0), (0.5, 0.0), (1.5, 0.0)):
                first = gibbs_log_policy(before[own] - pessimism * core[own], FAVOURED, kl_coef)
                second = gibbs_log_policy(after - pessimism * spread, FAVOURED, kl_coef)
                promise = _promise(notion, kl_coef, pessimism, least[own], radius, ridge)
                found = threshold_ratios(first, second, core[own], spread, FAVOURED, ACTIONS, promise)
                (label if notion == "label" else add).append(found)
    return [
        joined("RLHF, label DP, thresholds: one draw is (e(tau), delta)-DP", f"{OURS} Theorem 3, approximate", label),
        joined("RLHF, add-remove DP, thresholds: one draw is (e(tau), delta)-DP", f"{OURS} Theorem 4, approximate",
               add),
    ]


def _promise(
    notion: str, kl_coef: float, pessimism: float, least: Array, radius: float, ridge: float
) -> Callable[[int, Thresholds], Guarantee]:
    def promise(i: int, split: Thresholds) -> Guarantee:
        return rlhf_draw(kl_coef, float(least[i]), radius, notion, pessimism=pessimism, ridge=ridge, thresholds=split)

    return promise


def halved_exponent_ratio(radius: float, pairs: int) -> float:
    """The extremal loss over the bound with γ = 1/(2 + e^B + e^−B), as if ‖φ_a − φ_b‖ ≤ 1 followed from ‖φ‖ ≤ 1."""
    return extremal_ratio(radius, pairs, "label") * curvature_floor(radius, 0.5) / curvature_floor(radius)


def unridged_ratio(ridge: float) -> float:
    """One pair x = 1, B = 1, Σ with λ no ridge in the fit: flip loss over the bound; actions ±1/2 (L = 1)."""
    counts = np.array([[1.0, 0.0], [0.0, 1.0]])
    theta = bradley_terry(counts, np.array([[1.0], [-1.0]]), 0.0, 1.0)[:, 0]
    log_reference = np.log([1e-12, 1.0 - 1e-12])
    policy = gibbs_log_policy(theta[:, None] * np.array([0.5, -0.5]), log_reference, 1.0)
    bound = rlhf_epsilon(1.0, ridge + 1.0, 1.0, "label", feature_norm=0.5, ridge=ridge)
    return float(loss(policy[0], policy[1])) / bound
