"""Many steps under one budget: zCDP of bounded-range mechanisms, and the step that advanced composition allows.

An ε-bounded-range mechanism (its log-likelihood ratio lies in an interval of length ε: the exponential mechanism, one
Gibbs draw) is ε²/8-zCDP: the cumulant function of the ratio vanishes at 0 and 1, and by Popoviciu's inequality its
second derivative is at most ε²/4. A mechanism that is merely ε-DP is only ε²/2-zCDP.
"""

from __future__ import annotations

import math

from private_rlhf.accounting.conversions import advanced_composition
from private_rlhf.accounting.epsilon_delta import count, not_negative, positive, probability
from scipy.optimize import brentq


def bounded_range_zcdp(epsilon: float, times: int = 1) -> float:
    """ρ = times·ε²/8 of adaptively composed ε-bounded-range mechanisms. Not for ones that are only ε-DP."""
    return count("times", times) * not_negative("epsilon", epsilon) ** 2 / 8.0


def advanced_composition_step(total: float, times: int, slack: float) -> float:
    """The largest ε of one mechanism for which `advanced_composition` of `times` of them is at most `total` > 0."""
    positive("total", total)
    high = total / math.sqrt(2.0 * count("times", times) * -math.log(probability("slack", slack)))
    root = float(brentq(lambda step: advanced_composition(step, times, slack) - total, 0.0, high, xtol=1e-15))
    while advanced_composition(root, times, slack) > total:
        root *= 1.0 - 1e-12
    return root
