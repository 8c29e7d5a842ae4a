"""Algorithm 2 at a true total ε: accountings, equal and growing batches, and batches that forget (Appendix D's MDP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from private_rlhf.core.stats import percentile_interval
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.private_rl import outcome
from private_rlhf_lab.studies.private_rl.plateaus import (
    BATCH,
    EPISODES,
    TRUE,
    WORST,
    Cell,
    TableOne,
    cell,
)
from private_rlhf_lab.studies.private_rl.updates import (
    PAPER,
    Schedule,
    fixed,
    geometric,
    private_exponent,
)

PAPERS = "B = 5, exact composition"  # Table 1's batches
EQUAL, GROWING, FORGETFUL = "B = 25", "geometric", "geometric, last 3 batches read"
LARGE, SMALL = 8.0, 5.0


def arms() -> dict[str, tuple[Schedule, str, float]]:
    """Name to schedule, accounting route and sensitivity. The growing ones were chosen on other seeds than these."""
    return {
        "B = 5, Appendix E, sensitivity 25": (fixed(EPISODES, BATCH), "appendix", WORST),
        "B = 5, advanced composition": (fixed(EPISODES, BATCH), "advanced_composition", TRUE),
        "B = 5, zCDP": (fixed(EPISODES, BATCH), "zcdp", TRUE),
        PAPERS: (fixed(EPISODES, BATCH), "best", TRUE),
        EQUAL: (fixed(EPISODES, 25), "best", TRUE),
        GROWING: (geometric(EPISODES, 8, 1.3), "best", TRUE),
        FORGETFUL: (geometric(EPISODES, 8, 1.15, window=3), "best", TRUE),
    }


Cells = Mapping[tuple[str, str, float], Cell]


def measure(worlds: Sequence[outcome.OutcomeProblem], runs: int, epsilons: Sequence[float]) -> Cells:
    """(world, arm, ε) to its runs; every arm is (ε, 1e-5)-jointly private by the route that its name states."""
    found = {}
    for world in worlds:
        for name, (schedule, route, sensitivity) in arms().items():
            for epsilon in epsilons:
                exponent = private_exponent(schedule, epsilon, sensitivity, route)
                method = f"{name}, eps = {epsilon:g}"
                found[world.name, name, epsilon] = cell(world, method, schedule, exponent, runs, 6)
    return found


def rows(cells: Cells) -> list[dict[str, object]]:
    """For a CSV: the privacy parameters of each arm beside its results."""
    return [
        {"epsilon": epsilon, "accounting": route, "sensitivity": sensitivity, "updates_per_user": schedule.reads,
         "exponent": private_exponent(schedule, epsilon, sensitivity, route), **made.row()}
        for (_, name, epsilon), made in cells.items()
        for schedule, route, sensitivity in [arms()[name]]
    ]


def _beats(cells: Cells, better: str, worse: str, text: str) -> Claim:
    """The regret of one arm over that of another, in the least favourable of the four cells."""
    plain, drawn = [], []
    for world in outcome.PUBLISHED:
        for epsilon in (LARGE, SMALL):
            first, second = cells[world, better, epsilon], cells[world, worse, epsilon]
            plain.append(float(first.cumulative[:, -1].mean() / second.cumulative[:, -1].mean()))
            drawn.append(first.regrets / second.regrets)
    largest = percentile_interval(max(plain), np.max(drawn, axis=0), len(first.cumulative))
    return within(text, "this project", largest, high=1.0,
                  what="largest ratio of mean regrets over both instances and eps = 8, 5")


def claims(cells: Cells, table: TableOne) -> list[Claim]:
    """The paper's qualitative findings under honest accounting, and schedules that do better than equal batches."""
    return [
        _order(cells, table),
        _beats(cells, GROWING, EQUAL, "Growing batches beat equal ones (B = 25) at the same total eps"),
        _beats(cells, FORGETFUL, GROWING,
               "Growing batches that score the last three only, so that a user pays for three draws, do better still"),
        *(_reached(cells, world) for world in outcome.PUBLISHED),
    ]


def _order(cells: Cells, table: TableOne) -> Claim:
    """Every comparison of PRL Appendix D, with honest private arms: later plateau / earlier plateau."""
    chain = {
        world: [table.non_private[world, column] for column in (0, 1)]
        + [cells[world, PAPERS, epsilon] for epsilon in (LARGE, SMALL)]
        for world in outcome.PUBLISHED
    }
    pairs = [(line[k], line[k + 1]) for line in chain.values() for k in range(3)]
    pairs += list(zip(chain["easy"], chain["hard"], strict=True))
    plain = min(later.plateau / earlier.plateau for earlier, later in pairs)
    drawn = np.min([later.resampled / earlier.resampled for earlier, later in pairs], axis=0)
    return within(
        "Batches, privacy, less eps and the hard instance each delay the plateau (exact composition, B = 5)",
        f"{PAPER} Appendix D, interpretation of Table 1",
        percentile_interval(plain, drawn, len(pairs[0][0].cumulative)), low=1.0,
        what="smallest of the ten ratios of plateaus")


def _reached(cells: Cells, world: str) -> Claim:
    published = outcome.PUBLISHED[world][2]
    made = cells[world, FORGETFUL, LARGE]
    return within(f"An honest total eps = 8 reaches the published plateau {published} ({world}), by forgetful batches",
                  f"{PAPER} Table 1; schedule ours", made.estimate / published, high=1.0, kind="ours",
                  what="plateau of the mean curve / published")
