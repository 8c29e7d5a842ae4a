"""Private online RL by the exponential mechanism: joint DP of the sequence of chosen value functions."""

from __future__ import annotations

import math

from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.accounting.epsilon_delta import Guarantee, count, guarantee, positive, probability

from private_rlhf_lab.accounting.bounded_range import largest_factor
from private_rlhf_lab.accounting.steps import advanced_composition_step

MOST_EXACT = 128
WORTH_A_DELTA = 1.01  # what an exponent must gain for a δ above 0


def private_rl(updates: int, epsilon_total: float, delta: float, sensitivity: float, exact: bool = True) -> Guarantee:
    """How sharp M exponential mechanisms may be so that their sequence is (ε, δ)-private; ε₀ per update, four ways.

    An update samples f with probability ∝ exp(x·S(f)), x = ε₀/(2Δ) with Δ = `sensitivity`: ε₀-bounded range, hence
    ε₀-DP and ε₀²/8-zCDP. (i) zCDP: Mε₀²/8 = ρ(ε, δ), with the conversion of `conversions.zcdp_epsilon`; (ii) advanced
    composition, both of its terms (the paper's appendix drops the second); (iii) basic, ε₀ = ε/M; (iv) the exact
    adaptive composition of bounded ranges (`bounded_range.largest_factor`). The largest ε₀ is the one to use, or basic
    if it is within 1 % of that, as its δ is 0; all are printed. (iv) takes a second at M = 100; it is left out beyond
    MOST_EXACT, where zCDP falls some 5 % short of it, and where `exact` is false. Releasing f to act on is joint DP for
    the users by the billboard lemma. Source: "private online RL with general function approximation", Algorithms 1-2
    and Appendix E; Dong et al. 2020 for bounded range. Assumes M = `updates` is the largest number of updates that
    score any one user's trajectory: all but the first, which has no data, or fewer if an update scores only some
    episodes and which ones is fixed in advance (given the earlier draws, the others do not depend on that user). Δ is
    the largest change of any S(f) when one user's trajectory is replaced, proved or exhausted, not estimated. Units: Δ
    in score units; exponents in 1/score. Fails: for scores exponentiated with another x, for reward curves or regret
    (they read raw data), for sensitivities that hold on average only.
    """
    count("updates", updates)
    positive("epsilon_total", epsilon_total)
    probability("delta", delta)
    positive("sensitivity", sensitivity)
    rho = zcdp_rho(epsilon_total, delta)
    steps = {
        "zcdp": math.sqrt(8.0 * rho / updates),
        "advanced_composition": advanced_composition_step(epsilon_total, updates, delta),
        "basic": epsilon_total / updates,
    }
    if exact and updates <= MOST_EXACT:
        steps["bounded_range"] = largest_factor((1.0,) * updates, epsilon_total, delta)
    best = max(steps, key=lambda name: steps[name] * (WORTH_A_DELTA if name == "basic" else 1.0))
    assumptions = (
        "neighbours differ in one user's trajectory, replaced (joint differential privacy by the billboard lemma)",
        f"at most {updates} updates score any one user's trajectory, and which ones is fixed in advance",
        f"no score changes by more than {sensitivity:g} when one trajectory is replaced: proved or exhausted",
        f"update k samples f with probability proportional to exp(exponent * S(f)), exponent = {steps[best]:.6g} /"
        f" (2 * {sensitivity:g})",
        "rewards, regrets and learning curves are not released",
    )
    return guarantee(
        epsilon_total,
        0.0 if best == "basic" else delta,
        f"the sequence of all sampled value functions, at most {updates} of which score one user's trajectory,",
        assumptions,
        route=best,
        epsilon_per_update=steps[best],
        exponent=steps[best] / (2.0 * sensitivity),
        zcdp={"rho": rho, "epsilon_per_update": steps["zcdp"], "exponent": steps["zcdp"] / (2.0 * sensitivity)},
        **{
            name: {"epsilon_per_update": steps[name], "exponent": steps[name] / (2.0 * sensitivity)}
            for name in steps
            if name != "zcdp"
        },
    )
