"""`python -m private_rlhf_lab.studies offline`: PPKL Algorithm 1 on problems small enough to know the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from private_rlhf.validation import offline as rates
from private_rlhf.validation.bandits import Array
from private_rlhf.validation.lab import Report, Row

from private_rlhf_lab.studies.offline import (
    dependence,
    finite,
    hard,
    lower_bound,
    persons,
    pessimism,
    plots,
    robust,
)

SEED = 20


def run(quick: bool) -> Report:
    """All experiments, bit-reproducible; `quick` takes fewer repetitions."""
    narrow = rates.curves(1.0, 400 if quick else 2400, 4, SEED)
    wide = rates.curves(4.0, 400 if quick else 2400, 4, SEED + 1)
    efficient = rates.efficiency(4000 if quick else 10_000, SEED + 2)
    arms = rates.arms(40 if quick else 400, (1e2, 1e3, 1e4, 1e5, 1e6), SEED + 3)
    whole = finite.algorithm(100 if quick else 1000, SEED + 4)
    lemma = finite.lemma_b2(20_000 if quick else 200_000, SEED + 5)
    nets = finite.nets(60 if quick else 400, SEED + 6)
    outcomes = pessimism.measure(60 if quick else 400, SEED + 7)
    budgets = persons.measure(4000 if quick else 10_000, SEED + 11)
    repetitions = 200 if quick else 2000
    bound = hard.grid(repetitions, SEED + 8, (10**3, 10**4, 10**5, 10**6), theorem=True)
    rate = hard.grid(repetitions, SEED + 9, (10**4, 10**5, 10**6), theorem=False)
    coverage = hard.coverage_curve(repetitions, SEED + 10)
    depends = dependence.measure(100 if quick else 1000, SEED + 13)
    mixed = robust.budgets(2000 if quick else 20_000, SEED + 14)
    corrected = lower_bound.at_the_bound(repetitions, SEED + 12)
    return Report(
        name="offline",
        claims=[
            *rates.rate_claims(narrow, wide, SEED),
            *rates.efficiency_claims(efficient, SEED),
            *rates.arm_claims(arms, SEED),
            *finite.claims(whole, lemma, nets, SEED + 4),
            *pessimism.claims(outcomes, SEED),
            *hard.claims(bound, rate, coverage, SEED),
            *lower_bound.claims(corrected, rate, 20_000, SEED),
            *dependence.claims(depends, SEED),
            *robust.claims(mixed, SEED),
            *persons.claims(budgets, SEED),
        ],
        tables={
            "rates": [*rates.rows(narrow, 1.0), *rates.rows(wide, 4.0)],
            "efficiency": _efficiency(efficient),
            "losses": _losses(arms),
            "finite": _whole(whole),
            "nets": _nets(nets),
            "pessimism": pessimism.rows(outcomes),
            "hard": hard.rows([*bound, *rate]),
            "coverage": hard.rows(coverage),
            "lower_bound": lower_bound.rows([*corrected, *rate]),
            "dependence": dependence.rows(depends),
            "robust": robust.rows(mixed),
            "persons": persons.rows(budgets),
        },
        figures={
            "rates": rates.figure(narrow, wide),
            "efficiency": plots.efficiency(efficient),
            "losses": plots.losses(arms),
            "finite": plots.finite(whole, nets),
            "pessimism": plots.pessimism(outcomes),
            "lower_bound": plots.lower_bound(bound, rate, coverage),
            "corrected_bound": lower_bound.figure(rate),
            "dependence": dependence.figure(depends),
        },
    )


def _efficiency(found: Mapping[float, Array]) -> list[Row]:
    return [
        {"epsilon": epsilon, "coordinate": place, "variance_over_bound": value, "repetitions": len(whitened)}
        for epsilon, whitened in found.items()
        for place, value in enumerate(whitened.var(axis=0, ddof=1))
    ]


def _losses(found: rates.Arms) -> list[Row]:
    return [
        {"loss": arm, "epsilon": epsilon, "n": number, "subopt": values.mean(), "limit": found.limit[arm, epsilon],
         "reference": found.ref}
        for (arm, epsilon), rows in found.subopt.items()
        for number, values in zip(found.comparisons, rows, strict=True)
    ]


def _whole(found: Sequence[finite.Whole]) -> list[Row]:
    return [
        {"epsilon": one.epsilon, "n": number, "subopt": one.subopt[row].mean(),
         "subopt_without_bonus": one.plain[row].mean(), "bound": one.promised[row].mean(),
         "covered": one.covered[row].mean()}
        for one in found
        for row, number in enumerate(one.comparisons)
    ]


def _nets(found: finite.Nets) -> list[Row]:
    nets = [
        (f"{tau:g}", members, values, limit.mean())
        for tau, members, values, limit in zip(finite.NETS, found.cover, found.fixed, found.limit, strict=True)
    ]
    nets += [("1/sqrt(n')", None, found.growing, None), ("0 (whole class)", None, found.exact, 0.0)]
    return [
        {"tau": tau, "members": members, "effective_n": size, "subopt": row.mean(), "subopt_at_infinity": limit}
        for tau, members, values, limit in nets
        for size, row in zip(found.sizes, values, strict=True)
    ]
