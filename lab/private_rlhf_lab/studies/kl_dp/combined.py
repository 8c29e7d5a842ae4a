"""Lemma 1, many draws, inexact policies, randomised labels and Proposition 1: exact losses against the statements."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, hockey_stick, loss
from private_rlhf.validation.kl_dp import lemma as lemma
from private_rlhf.validation.kl_dp import proposition_one as proposition_one
from scipy.special import gammaln
from scipy.stats import binom

from private_rlhf_lab.accounting.composition import (
    distance_from_gap,
    draw_after_randomized_response,
    inexact_pointwise,
    inexact_total_variation,
    repeated_draws,
)
from private_rlhf_lab.studies.kl_dp.records import bradley_terry
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined


def many_draws(largest: int) -> list[Search]:
    """Exact δ of m draws from two tilted policies (two actions; then three with one in A2), over the target δ."""
    pure, split, advanced = [], [], []
    for epsilon in (0.05, 0.3, 1.0):
        for mass in (0.01, 0.1, 0.3, 0.5):
            tilted = mass * math.exp(epsilon) / (mass * math.exp(epsilon) + 1.0 - mass)
            for draws in (1, 4, largest // 8, largest):
                for target in (1e-6, 1e-3):
                    promise = repeated_draws(epsilon, 0.0, draws, target)
                    kept = np.arange(draws + 1)
                    first, second = binom.logpmf(kept, draws, mass), binom.logpmf(kept, draws, tilted)
                    if promise.delta > 0.0:
                        pure.append(hockey_stick(first, second, promise.epsilon) / target)
                    else:
                        pure.append(loss(first, second) / promise.epsilon)
                    routes = promise.details["routes"]
                    if "advanced_composition" in routes and draws > 1:
                        advanced.append(np.array(routes["zcdp_closed_form"] / routes["advanced_composition"]))
                    if draws <= 24:
                        split.append(_split_draws(epsilon, mass, tilted, draws))
    return [
        joined("m draws: (e_m, delta')-DP by the zCDP of a bounded range", f"{OURS} repeated sampling", pure),
        joined("m draws with mass delta outside: (e_m, m delta + delta')-DP", f"{OURS} repeated sampling, approximate",
               split),
        joined("The zCDP route costs at most half of advanced composition", f"{OURS} repeated sampling",
               [2.0 * np.array(advanced)]),
    ]


def _split_draws(epsilon: float, mass: float, tilted: float, draws: int, outside: float = 1e-3) -> Array:
    """Three actions: A1 tilted by ε, A2 with mass `outside` under the first policy and none under the second."""
    target = draws * outside + 1e-4
    promise = repeated_draws(epsilon, outside, draws, target)
    kept = np.array([(i, j, draws - i - j) for i in range(draws + 1) for j in range(draws + 1 - i)])
    ways = gammaln(draws + 1) - gammaln(kept + 1).sum(axis=1)
    policies = np.array([[mass * (1 - outside), (1 - mass) * (1 - outside), outside], [tilted, 1 - tilted, 1e-300]])
    logs = ways + (kept @ np.log(policies).T).T
    return np.asarray(hockey_stick(logs[0], logs[1], promise.epsilon) / promise.delta)


def inexact(instances: int, seed: int = 1) -> list[Search]:
    """Perturbed policies: total variation, pointwise error, objective gap; with the tight family of the first."""
    generator = np.random.default_rng(seed)
    variation, pointwise, pinsker = [], [], []
    for _ in range(instances):
        log_reference = np.log(generator.dirichlet(np.ones(4)))
        before, change = generator.normal(0.0, 1.0, 4), generator.uniform(-0.5, 0.5, 4)
        exact = gibbs_log_policy(np.stack([before, before + change]), log_reference, 1.0)
        epsilon = float(loss(exact[0], exact[1]))
        other = generator.dirichlet(np.full(4, 0.3), 2)
        share = generator.uniform(0.0, 0.1)
        mixed = np.log((1.0 - share) * np.exp(exact) + share * other)
        distance = 0.5 * float(np.abs(np.exp(mixed) - np.exp(exact)).sum(axis=1).max())
        promise = inexact_total_variation(epsilon, 0.0, distance)
        variation.append(hockey_stick(mixed[0], mixed[1], epsilon) / promise.delta)
        noise = generator.uniform(-0.2, 0.2, (2, 4))
        noisy = gibbs_log_policy(np.stack([before, before + change]) + noise, log_reference, 1.0)
        error = float(np.abs(noisy - exact).max())
        pointwise.append(loss(noisy[0], noisy[1]) / inexact_pointwise(epsilon, 0.0, error).epsilon)
        gap = _objective(exact[0], before, log_reference) - _objective(mixed[0], before, log_reference)
        own = 0.5 * float(np.abs(np.exp(mixed[0]) - np.exp(exact[0])).sum())
        pinsker.append(np.array(own / max(distance_from_gap(max(gap, 0.0), 1.0), 1e-12)))
    variation.append(_tight_variation())
    return [
        joined("Inexact policy, total variation a: (e, delta + (1 + e^e) a)-DP", f"{OURS} inexact policies", variation),
        joined("Inexact policy, log error a: (e + 2a, e^a delta)-DP", f"{OURS} inexact policies", pointwise),
        joined("Total variation from the objective gap", f"{OURS} inexact policies", pinsker),
    ]


def _objective(log_policy: Array, utility: Array, log_reference: Array) -> float:
    """E[u] − KL(π‖π0) at η = 1."""
    return float(np.exp(log_policy) @ (utility - log_policy + log_reference))


def _tight_variation() -> Array:
    """P = (p, 1−p), Q tilted by ε on both ends of the loss: move α onto the likelier action of P, off it under Q."""
    epsilon, moved = 1.0, 0.02
    p = LabelNoise.of(epsilon).keep_prob
    exact = np.array([[p, 1.0 - p], [1.0 - p, p]])
    shifted = np.log(exact + moved * np.array([[1.0, -1.0], [-1.0, 1.0]]))
    promise = inexact_total_variation(epsilon, 0.0, moved)
    return np.asarray(hockey_stick(shifted[0], shifted[1], promise.epsilon) / promise.delta)


def randomised_labels() -> Search:
    """One draw from a fit on randomised labels: exact mixture over all z of four pairs, every y, every flip."""
    signed = np.array([[1.5, 0.5], [1.0, -1.0], [-0.5, 1.5], [0.3, 0.3]])
    actions = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    vectors = np.array(list(product((-1.0, 1.0), repeat=len(signed))))
    counts = np.concatenate([(vectors > 0), (vectors < 0)], axis=1).astype(np.float64)
    theta = bradley_terry(counts, np.concatenate([signed, -signed]), 0.5, 2.0)
    ratios = []
    for kl_coef, epsilon in product((0.3, 2.0), (0.2, 1.0, 3.0)):
        keep = LabelNoise.of(epsilon).keep_prob
        given_z = np.exp(gibbs_log_policy(theta @ actions.T, np.log([0.98, 0.01, 0.01]), kl_coef))
        same = (vectors[:, None, :] == vectors[None, :, :]).sum(axis=2)
        given_y = np.log((keep**same * (1.0 - keep) ** (len(signed) - same)) @ given_z)
        flips = [(i, j) for i, j in product(range(len(vectors)), repeat=2) if same[i, j] == len(signed) - 1]
        first, second = np.array(flips).T
        draw = float(loss(np.log(given_z)[first], np.log(given_z)[second]).max())
        ratios.append(loss(given_y[first], given_y[second]) / draw_after_randomized_response(draw, epsilon))
    return joined("One draw on randomised labels: 2 artanh(tanh(e_K/2) tanh(e/2))",
                  "this project, draw_after_randomized_response", ratios)


