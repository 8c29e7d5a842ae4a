"""The study private_rl: Algorithms 1 and 2, Table 1, honest accounting, rates, covers, Appendix C."""

from __future__ import annotations

from private_rlhf.validation.lab import Report

from private_rlhf_lab.studies.private_rl import (
    accounts,
    audit,
    coverability,
    covers,
    design,
    honest,
    outcome,
    plateaus,
    plots,
    rates,
    reports,
    scaling,
    schedules,
)
from private_rlhf_lab.studies.private_rl.worlds import random_worlds


def run(quick: bool) -> Report:
    """All experiments; deterministic. `quick` takes fewer runs and episodes, but 200 runs for Table 1."""
    worlds = [outcome.problem(name) for name in outcome.PUBLISHED]
    table = plateaus.measure(worlds, 200 if quick else 1000, 100 if quick else 500)
    cells = honest.measure(worlds, 200 if quick else 1000, (8.0, 5.0) if quick else (8.0, 5.0, 2.0, 1.0))
    planned = schedules.measure(worlds, 200 if quick else 4000)
    reported = reports.measure(worlds, 200 if quick else 2000, (8.0, 5.0) if quick else (8.0, 5.0, 2.0, 1.0))
    grown = rates.measure(quick)
    covered = covers.measure(quick)
    scaled = scaling.measure(8 if quick else 60, 51, scaling.OUTCOME_EPISODES[: 3 if quick else 4])
    episodes = 512
    matrices = design.measure(episodes, 6 if quick else 40)
    return Report(
        name="private_rl",
        claims=[
            *accounts.claims(random_worlds(4 if quick else 24, seed=5)),
            *audit.claims(quick),
            *plateaus.claims(table),
            *honest.claims(cells, table),
            *rates.exact(random_worlds(4, seed=5)),
            *schedules.claims(planned),
            *reports.privacy_claims(quick),
            *reports.claims(reported, planned),
            *rates.claims(grown),
            *covers.claims(covered),
            *scaling.claims(scaled, 51),
            *coverability.claims(500 if quick else 5000, 52),
            *design.claims(matrices, episodes),
        ],
        tables={
            "accounting": accounts.table(),
            "spending": audit.rows(),
            "table_1": plateaus.rows(table),
            "temperature": [made.row() | {"exponent": x} for (_, x), made in table.swept.items()],
            "honest": honest.rows(cells),
            "theory_batch": plateaus.theory_rows(),
            "growth": [row for each in grown for row in each.rows()],
            "covers": covered.rows(),
            "schedules": schedules.rows(planned),
            "reports": reports.rows(reported),
            "scaling": scaling.rows(scaled),
            "design_matrix": design.rows(matrices),
        },
        figures={
            "figure_1": plots.figure_one(table, cells, reported),
            "temperature": plots.temperature(table),
            "growth": plots.growth(grown),
            "covers": plots.cover(covered),
            "scaling": scaling.figure(scaled),
            "design_matrix": plots.matrices(matrices),
        },
    )
