"""The privacy side: sensitivities by enumeration, the exact loss of a draw, and what each accounting certifies."""

from __future__ import annotations

import itertools

from private_rlhf.accounting.conversions import advanced_composition, zcdp_epsilon
from private_rlhf.validation.lab import Claim, within
from private_rlhf.validation.outcome_rewards import appendix_step, draw_tightness, outcome_sensitivity
from private_rlhf.validation.outcome_rewards import outcome_losses as outcome_losses

from private_rlhf_lab.accounting.bounded_range import composed_epsilon
from private_rlhf_lab.accounting.private_rl import private_rl
from private_rlhf_lab.accounting.steps import bounded_range_zcdp
from private_rlhf_lab.studies.private_rl import outcome
from private_rlhf_lab.studies.private_rl.general import Instances, sensitivities
from private_rlhf_lab.studies.private_rl.updates import DELTA, PAPER, section_step
from private_rlhf_lab.studies.private_rl.worlds import HORIZON

UPDATES = 100  # M = K/B at K = 500, B = 5


def general_outcome_sensitivity(horizon: int = outcome.HORIZON) -> float:
    """The same over every class with values in [0, 1]: H².

    R^(f) = f₁(s₁, a₁) + Σ_{h>1} [f_h(s_h, a_h) − max_a f_h(s_h, a)] is linear in pairs (value, maximum) with 0 ≤ value
    ≤ maximum ≤ 1. The loss is convex in it, so it is largest at corners of these triangles; its least value 0 is also
    reached there: enumerated.
    """
    corners = ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    losses = [
        (first + sum(value - top for value, top in later) - reward) ** 2
        for first in (0.0, 1.0)
        for reward in (0.0, 1.0)
        for later in itertools.product(corners, repeat=horizon - 1)
    ]
    return max(losses) - min(losses)


def table() -> list[dict[str, object]]:
    """ε₀ of one update by every accounting, and what each composition certifies for M of them."""
    found: list[dict[str, object]] = []
    for epsilon, updates in itertools.product((8.0, 5.0, 2.0, 1.0), (3, 11, 19, UPDATES)):
        details = private_rl(updates, epsilon, DELTA, 1.0).details
        routes = ("zcdp", "advanced_composition", "basic", "bounded_range")
        steps = {name: details[name]["epsilon_per_update"] for name in routes}
        steps |= {"appendix E": appendix_step(epsilon, updates), "section 3.3": section_step(epsilon, updates)}
        for name, step in steps.items():
            found.append(
                {"epsilon_total": epsilon, "updates": updates, "accounting": name, "epsilon_per_update": step,
                 "certified_by_zcdp": _zcdp(step, updates),
                 "certified_exactly": composed_epsilon((step,) * updates, DELTA),
                 "certified_by_lemma_E2": advanced_composition(step, updates, DELTA),
                 "certified_by_basic": updates * step}
            )
    return found


def _zcdp(step: float, updates: int) -> float:
    return zcdp_epsilon(bounded_range_zcdp(step, updates), DELTA)


def claims(worlds: Instances) -> list[Claim]:
    """Sensitivities and compositions."""
    horizon = outcome.HORIZON
    step = appendix_step(8.0, UPDATES)
    return [
        within("Algorithm 2: replacing a trajectory changes the score by at most (H+1)^2 = 25 (Appendix D's class)",
               f"{PAPER} Appendix E.2", outcome_sensitivity(), high=(horizon + 1) ** 2,
               what="largest change over all hypotheses, trajectories and outcomes"),
        within("In Appendix D one trajectory's loss telescopes to 0 or 1, so the sensitivity is 1",
               "this project; enumeration", outcome_sensitivity(), low=1.0, high=1.0,
               what="largest change over all hypotheses, trajectories and outcomes"),
        within("Algorithm 2: H^2 = 16 is enough for every class with values in [0, 1]",
               "this project; enumeration of corners", general_outcome_sensitivity(), high=horizon**2,
               what="largest change at H = 4"),
        within("Algorithm 1: replacing a trajectory changes the score by at most 8H = 24 (the random MDPs)",
               f"{PAPER} Appendix E.1", float(sensitivities(worlds).max()), high=8.0 * HORIZON,
               what="largest supremum over transitions, rewards and members of F"),
        within("One draw of the exponential mechanism loses at most 2 * exponent * sensitivity",
               "McSherry and Talwar; enumeration of neighbours", max(draw_tightness(x) for x in (0.1, 0.5, 2.0)),
               high=1.0 + 1e-9, kind="control", what="largest exact loss / bound over every replaced trajectory"),
        within("eps0 = eps / sqrt(2 M log(1/delta)) composes to eps by the paper's own Lemma E.2",
               f"{PAPER} Appendix E.1, at eps = 8, M = {UPDATES}, delta = 1e-5",
               advanced_composition(step, UPDATES, DELTA), high=8.0, what="total by Lemma E.2, both terms"),
        within("The same eps0 composes to at most eps by zCDP, as draws have bounded range",
               "Dong, Durfee and Rogers 2020; at eps = 8, M = 100, delta = 1e-5", _zcdp(step, UPDATES), high=8.0,
               kind="control", what="total by zCDP"),
        within("Appendix E's eps0 and section 3.3's are the same formula", f"{PAPER} section 3.3, Appendix E.1",
               step / section_step(8.0, UPDATES), low=1.0 - 1e-9, high=1.0 + 1e-9, what="ratio of the two eps0"),
    ]
