"""Many draws from one policy, policies that are only nearly the Gibbs policy, labels that were randomised before."""

from __future__ import annotations

import math
import sys

from private_rlhf.accounting.conversions import advanced_composition, zcdp_epsilon, zcdp_epsilon_closed
from private_rlhf.accounting.epsilon_delta import (
    Guarantee,
    OutsideAssumptions,
    count,
    guarantee,
    not_negative,
    positive,
    probability,
)
from private_rlhf.core.noise import LabelNoise

from private_rlhf_lab.accounting.steps import bounded_range_zcdp


def repeated_draws(epsilon: float, delta: float, draws: int, target_delta: float) -> Guarantee:
    """m independent draws from one policy (or from policies of several prompts), each (ε, δ) by the Gibbs accountants.

    Theorem: the log-likelihood ratio of a draw, outside a set of mass at most δ under both neighbours, lies in an
    interval of length ε, so m draws are mε²/8-zCDP outside a set of mass mδ, and (ε_m, mδ + δ')-DP by the zCDP
    conversion at δ' = target_delta − mδ. Basic composition (mε, mδ) where that is smaller. Source: bounded range is
    ε²/8-zCDP (`conversions`); at most half the ε of the KL-DP paper's advanced composition, which is also printed.
    Assumes: `epsilon` bounds the *range* of the log ratio, as every accountant of `accounting.draws` gives it;
    one fixed data set; the number of draws fixed in advance.
    Units: ε nats; δ, target_delta probabilities. Fails: for a mechanism that is only ε-DP (then ε²/2, not ε²/8); if the
    weights or probabilities of the policy are released beside the draws. Raises OutsideAssumptions for
    target_delta < m·delta and for values out of range.
    """
    not_negative("epsilon", epsilon)
    probability("delta", delta, zero=True)
    count("draws", draws)
    probability("target_delta", target_delta)
    spent = draws * delta
    slack = target_delta - spent
    if abs(slack) <= 1e-12 * target_delta:  # m times a decimal fraction is seldom exact
        slack = 0.0
    if slack < 0.0:
        raise OutsideAssumptions(
            "target_delta",
            f"must be at least draws * delta = {spent:.6g}, got {target_delta!r}; raise it, or make fewer draws",
        )
    routes = {"basic": draws * epsilon}
    if 0.0 < slack < 1.0:
        rho = bounded_range_zcdp(epsilon, draws)
        routes["zcdp"] = zcdp_epsilon(rho, slack)
        routes["zcdp_closed_form"] = zcdp_epsilon_closed(rho, slack)
        routes["advanced_composition"] = advanced_composition(epsilon, draws, slack)
    best = min(routes, key=lambda name: routes[name])
    assumptions = (
        "epsilon bounds the range of the log-likelihood ratio of one draw (the Gibbs accountants do)",
        f"{draws} draws in all, a number fixed in advance, independent given the data",
        "only the draws are released: no weights, probabilities or scores of the policy",
    )
    return guarantee(
        routes[best],
        spent if best == "basic" else target_delta,
        f"the sequence of {draws} draws, each ({epsilon:g}, {delta:g})-private,",
        assumptions,
        route=best,
        routes={name: value for name, value in routes.items() if math.isfinite(value)},
    )


def inexact_total_variation(epsilon: float, delta: float, distance: float) -> Guarantee:
    """A policy within total variation α of an (ε, δ)-private one, on both neighbours: (ε, δ + (1+e^ε)α).

    By the triangle inequality on both sides of the definition: π̂(S) ≤ e^ε(π̂'(S) + α) + δ + α; tight. `distance` α in
    [0, 1]. From an objective gap ν: α = √(ν/(2η)), see `distance_from_gap`. Fails if the closeness holds for one of the
    neighbours only, or if the training trace is released.
    """
    not_negative("epsilon", epsilon)
    probability("delta", delta, zero=True, one=True)
    probability("distance", distance, zero=True, one=True)
    factor = 1.0 + math.exp(epsilon) if epsilon < 700.0 else math.inf
    return guarantee(
        epsilon,
        delta + factor * distance if distance > 0.0 else delta,
        "one draw from the inexact policy",
        (
            f"the policy lies within total variation {distance:g} of the exact one, for both neighbouring data sets",
            "nothing of the optimisation but the draw is released",
        ),
    )


def inexact_pointwise(epsilon: float, delta: float, log_error: float) -> Guarantee:
    """A policy with |log π̂/π| ≤ α everywhere, on both neighbours, of an (ε, δ)-private π: (ε + 2α, e^α δ).

    The three factors π̂/π, π/π' and π'/π̂' multiply. `log_error` α in nats, >= 0; utilities with error ≤ ζ give α =
    2ζ/η; an inexact MLE with ‖θ̃ − θ̂‖_Σ ≤ ρ gives α = 2ρ·F/(η√μ).
    """
    not_negative("epsilon", epsilon)
    probability("delta", delta, zero=True, one=True)
    not_negative("log_error", log_error)
    return guarantee(
        epsilon + 2.0 * log_error,
        math.exp(min(math.log(delta) + log_error, 1.0)) if delta > 0.0 else 0.0,  # e is as vacuous as any
        "one draw from the inexact policy",
        (
            f"its log-probabilities are within {log_error:g} of the exact ones, for both neighbouring data sets",
            "nothing of the optimisation but the draw is released",
        ),
    )


def distance_from_gap(objective_gap: float, kl_coef: float) -> float:
    """Total variation of π̂ from the optimum π* of E[u] − η KL(·‖π0), at most √(ν/(2η)) with ν = J(π*) − J(π̂).

    J(π*) − J(π̂) = η KL(π̂‖π*) exactly, then Pinsker. `objective_gap` in reward units, >= 0; the
    value is capped at 1.
    """
    return min(1.0, math.sqrt(not_negative("objective_gap", objective_gap) / (2.0 * positive("kl_coef", kl_coef))))


def draw_after_randomized_response(epsilon_draw: float, epsilon_label: float) -> float:
    """ε of one label when a draw is ε_K-label-private in z, and z is the label after randomised response at ε_R.

    log[(α e^{ε_K} + 1 − α)/((1 − α) e^{ε_K} + α)] with α = e^{ε_R}/(1+e^{ε_R}); below both ε_K and ε_R. Symmetric in
    the two: it is 2·artanh(tanh(ε_K/2)·tanh(ε_R/2)), which is how it is computed. The output's
    likelihoods under z = ±1 lie within e^{ε_K} of each other, and the mixture's ratio grows with that factor.
    Covers the draw alone: whoever publishes z, or anything else made from it, stands at ε_R.
    """
    factor = LabelNoise.of(positive("epsilon_label", epsilon_label)).factor
    product = max(math.tanh(positive("epsilon_draw", epsilon_draw) / 2.0) * factor, sys.float_info.min)  # never 0
    return min(2.0 * math.atanh(product) if product < 1.0 else math.inf, epsilon_draw, epsilon_label)


def combined_draw(epsilon_draw: float, epsilon_label: float) -> Guarantee:
    """`draw_after_randomized_response` with what it assumes."""
    return guarantee(
        draw_after_randomized_response(epsilon_draw, epsilon_label),
        0.0,
        "one draw from a policy that was fitted to randomised labels",
        (
            f"the draw is {epsilon_draw:g}-differentially private in each randomised label",
            f"each of them is the true label after randomised response at epsilon {epsilon_label:g}, independent coins",
            "nothing else made from the randomised labels is released: whoever publishes them stands at"
            f" epsilon {epsilon_label:g}",
        ),
    )
