"""`python -m private_rlhf_lab.studies online`: POKL Algorithm 2 by enumeration, its exploration and its growth law."""

from __future__ import annotations

import numpy as np
from private_rlhf.core.stats import standard_error
from private_rlhf.validation import growth
from private_rlhf.validation.lab import Report, Row

from private_rlhf_lab.studies.online import dependence, late_growth, plots, thompson
from private_rlhf_lab.studies.online.arms import Trace
from private_rlhf_lab.studies.online.study import Study, claims, study

SEED = 40


def run(quick: bool) -> Report:
    """All arms in the same worlds to 10⁶ rounds, bit-reproducible; `quick` takes fewer worlds."""
    found = study(worlds=10 if quick else 100, horizon=1_000_000, seed=SEED)
    sweeps = dependence.measure(4 if quick else 40, 10_000 if quick else 100_000, SEED + 4)
    sampled = thompson.measure(20 if quick else 800, SEED + 5)
    return Report(
        name="online",
        claims=[*claims(found, SEED), *dependence.claims(sweeps, SEED), *thompson.claims(sampled, SEED)],
        tables={
            "regret": _curves(found),
            "summary": _summary(found),
            "dependence": dependence.rows(sweeps),
            "thompson": thompson.rows(sampled),
            "thompson_paired": thompson.pairs(sampled, SEED),
        },
        figures={
            "regret": plots.regret(found),
            "fits": plots.fits(found),
            "final": plots.final(found),
            "dependence": dependence.figure(sweeps),
        },
    )


def _traces(found: Study) -> list[tuple[str, Trace]]:
    return [
        *(("best response rare", trace) for trace in found.traces.values()),
        *(("pi_ref uniform", trace) for trace in found.covered),
        ("best response rare", found.proof),
        *(("best response rare, B = 3", trace) for trace in found.clips),
    ]


def _curves(found: Study) -> list[Row]:
    """About ten rounds a decade."""
    rows: list[Row] = []
    for problem, trace in _traces(found):
        last = 0.0
        for place, rounds in enumerate(trace.rounds):
            if rounds < 1.25 * last and place < len(trace.rounds) - 1:
                continue
            last = float(rounds)
            rows.append(
                {"problem": problem, "arm": trace.arm.name, "epsilon": trace.epsilon, "rounds": int(rounds),
                 "regret": trace.regret[place].mean(),
                 "standard_error": standard_error(trace.regret[place]),
                 "regret_pi1": trace.regret_exploiting[place].mean(), "sum_min_1_u2": trace.eluder[place].mean()}
            )
    return rows


def _summary(found: Study) -> list[Row]:
    return [
        {"problem": problem, "arm": trace.arm.name, "epsilon": trace.epsilon, "worlds": trace.regret.shape[1],
         "rounds": int(trace.rounds[-1]),
         "regret_at_100000": trace.regret[np.searchsorted(trace.rounds, min(100_000, trace.rounds[-1]))].mean(),
         "regret": trace.regret[-1].mean(), "regret_pi1": trace.regret_exploiting[-1].mean(),
         "per_log_t": late_growth.slope_per_log(trace.rounds, trace.regret),
         "late_exponent": late_growth.late_exponent(trace.rounds, trace.regret),
         "power": growth.power(trace.rounds, trace.regret), "optimism_failed": trace.failed.mean(),
         "bonus_saturated": trace.saturated.mean()}
        for problem, trace in _traces(found)
    ]
