"""From one notion of privacy to another: zCDP to (ε, δ), and composition of pure guarantees."""

from __future__ import annotations

import math

from private_rlhf.accounting.epsilon_delta import count, not_negative, positive, probability
from scipy.optimize import brentq, minimize_scalar


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The ε that ρ-zCDP gives at δ: min over α > 1 of ρα + log(1/(αδ))/(α−1) + log(1−1/α), at least 0.

    Canonne, Kamath and Steinke (2020), Proposition 12. Every α is valid, so an imperfect minimum is a looser bound,
    never a wrong one. ρ >= 0 and finite, 0 < δ < 1; OutsideAssumptions otherwise.
    """
    not_negative("rho", rho)
    probability("delta", delta)
    if rho == 0.0:
        return 0.0

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)  # α − 1
        order = 1.0 + excess
        return rho * order - math.log(order * delta) / excess + math.log(excess / order)

    centre = 0.5 * math.log(-math.log(delta) / rho)  # the textbook optimum, a few e-folds from the true one at most
    minimum = minimize_scalar(bound, bounds=(centre - 12.0, centre + 12.0), method="bounded", options={"xatol": 1e-10})
    return max(0.0, min(float(minimum.fun), zcdp_epsilon_closed(rho, delta)))


def zcdp_epsilon_closed(rho: float, delta: float) -> float:
    """ρ + 2√(ρ log(1/δ)): the textbook conversion (Bun and Steinke 2016), looser than `zcdp_epsilon`."""
    return not_negative("rho", rho) + 2.0 * math.sqrt(rho * -math.log(probability("delta", delta)))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest ρ for which `zcdp_epsilon(ρ, delta)` is at most `epsilon` > 0."""
    positive("epsilon", epsilon)
    probability("delta", delta)
    high = epsilon + 1.0  # too large unless delta is near 1
    while zcdp_epsilon(high, delta) < epsilon:
        high *= 2.0
    root = float(brentq(lambda rho: zcdp_epsilon(rho, delta) - epsilon, 0.0, high, xtol=1e-14, rtol=1e-13))
    while zcdp_epsilon(root, delta) > epsilon:
        root *= 1.0 - 1e-12
    return root


def advanced_composition(epsilon: float, times: int, slack: float) -> float:
    """ε√(2k log(1/δ')) + kε(e^ε − 1) for k ε-DP mechanisms, chosen adaptively, at additional δ' = `slack`;
    infinite for ε beyond 700. Dwork, Rothblum and Vadhan (2010), Theorem III.3, both terms."""
    not_negative("epsilon", epsilon)
    count("times", times)
    probability("slack", slack)
    growth = math.expm1(epsilon) if epsilon < 700.0 else math.inf
    return epsilon * math.sqrt(2.0 * times * -math.log(slack)) + (times * epsilon * growth if epsilon else 0.0)
