"""PRL Table 1: the plateau episode of each method, with bootstrap intervals, beside the published numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import Estimate, percentile_interval, standard_error
from private_rlhf.validation.lab import Claim, within
from private_rlhf.validation.outcome_rewards import BATCH, CEILING, EPISODES, plateaus

from private_rlhf_lab.accounting.bounded_range import composed_epsilon
from private_rlhf_lab.studies.private_rl import outcome
from private_rlhf_lab.studies.private_rl.updates import DELTA, PAPER, Array, Schedule, fixed, private_exponent

EXPONENTS = (0.002, *(float(x) for x in np.geomspace(0.03, 2.5, 17)))
RESAMPLES = 1000
PRIVATE = {8.0: 2, 5.0: 3}  # ε to its place among the columns of Table 1
# Sensitivities for which the softmax is scaled: the paper's (H+1)², the best for values in [0, 1], and the true one.
WORST, GENERAL, TRUE = 25.0, 16.0, 1.0


@dataclass(frozen=True)
class Cell:
    """Runs of one method on one instance. cumulative: (runs, K) float32 expected regret, summed over episodes."""

    world: str
    method: str
    cumulative: Array

    @functools.cached_property
    def plateau(self) -> int:
        """Of the mean curve: the first episode, from 1, by which 95 % of the final regret has been incurred."""
        return int(plateaus(self.cumulative.mean(axis=0)))

    @functools.cached_property
    def resampled(self) -> Array:
        """(RESAMPLES,) plateaus of the mean curves of resampled runs."""
        return plateaus(self._weights @ self.cumulative)

    @property
    def regrets(self) -> Array:
        """(RESAMPLES,) mean final regrets of the same resamples."""
        return np.asarray(self._weights @ self.cumulative[:, -1])

    @property
    def _weights(self) -> Array:
        """(RESAMPLES, runs); seeded by the cell, so that different cells are resampled independently."""
        runs = len(self.cumulative)
        rng = np.random.default_rng([20, *self.method.encode(), *self.world.encode()])
        return (rng.multinomial(runs, np.full(runs, 1.0 / runs), size=RESAMPLES) / runs).astype(np.float32)

    @property
    def estimate(self) -> Estimate:
        """The plateau with its 95 % percentile bootstrap over runs."""
        return percentile_interval(self.plateau, self.resampled, len(self.cumulative))

    def row(self) -> dict[str, object]:
        """For a CSV."""
        final = self.cumulative[:, -1]
        return {"environment": self.world, "method": self.method, "runs": len(final), "plateau": self.plateau,
                "plateau_low": self.estimate.ci_low, "plateau_high": self.estimate.ci_high,
                "median_of_single_runs": float(np.median(plateaus(self.cumulative))), "regret": float(final.mean()),
                "regret_standard_error": float(standard_error(final))}


def cell(world: outcome.OutcomeProblem, method: str, schedule: Schedule, exponent: float, runs: int, seed: int) -> Cell:
    """One method on one instance."""
    rng = np.random.default_rng([seed, *method.encode(), *world.name.encode()])
    regret = outcome.regret_curves(world, schedule, exponent, runs, rng)
    return Cell(world.name, method, np.cumsum(regret, axis=1))


@dataclass(frozen=True)
class TableOne:
    """non_private: (world, column 0 or 1) to its cell. swept: (world, exponent) to the private cell at B = 5."""

    non_private: Mapping[tuple[str, int], Cell]
    swept: Mapping[tuple[str, float], Cell]

    def curve(self, world: str) -> tuple[Array, Array]:
        """Plateau of every exponent of the sweep, (E,), and resampled, (RESAMPLES, E); made to fall, as it does."""
        cells = [self.swept[world, x] for x in EXPONENTS]
        plain = np.array([float(each.plateau) for each in cells])
        drawn = np.stack([each.resampled for each in cells], axis=1).astype(float)
        return np.minimum.accumulate(plain), np.minimum.accumulate(drawn, axis=1)

    @property
    def runs(self) -> int:
        """Of a private cell."""
        return len(next(iter(self.swept.values())).cumulative)

    def estimate(self, world: str, of_curve: Callable[[Array], Array]) -> Estimate:
        """What a function (..., E) -> (...) reads off the curve, with its interval."""
        plain, drawn = map(of_curve, self.curve(world))
        return percentile_interval(float(plain), drawn, self.runs)


def measure(worlds: Sequence[outcome.OutcomeProblem], runs: int, swept_runs: int) -> TableOne:
    """All runs behind Table 1: the two non-private columns, and the private ones at every exponent of the sweep."""
    plain, swept = {}, {}
    for world in worlds:
        for column, (name, batch) in enumerate((("non-private, no batch", 1), ("non-private, batched", BATCH))):
            plain[world.name, column] = cell(world, name, fixed(EPISODES, batch), math.inf, runs, 1)
        for x in EXPONENTS:
            method = f"exponent {x:.4g}"
            swept[world.name, x] = cell(world, method, fixed(EPISODES, BATCH), x, swept_runs, 2)
    return TableOne(plain, swept)


def rows(table: TableOne) -> list[dict[str, object]]:
    """Table 1 beside the published one; private cells at the exponents of several conventions, interpolated."""
    found = [
        {"column": column, "convention": "", "published": outcome.PUBLISHED[world][column]} | made.row()
        for (world, column), made in table.non_private.items()
    ]
    schedule = fixed(EPISODES, BATCH)
    for world, (epsilon, column) in itertools.product(outcome.PUBLISHED, PRIVATE.items()):
        for convention, exponent in _conventions(schedule, epsilon).items():
            made = table.estimate(world, functools.partial(at_exponent, exponent=exponent))
            row = {"column": column, "convention": convention, "published": outcome.PUBLISHED[world][column],
                   "environment": world, "method": f"private, eps = {epsilon:g}", "plateau": made.value,
                   "plateau_low": made.ci_low, "plateau_high": made.ci_high}
            found.append(dict.fromkeys(found[0]) | row)
    return found


def _conventions(schedule: Schedule, epsilon: float) -> dict[str, float]:
    """What "eps" might mean in Table 1, as exponents."""
    return {
        "eps in total, Appendix E, sensitivity 25": private_exponent(schedule, epsilon, WORST, "appendix"),
        "eps in total, Appendix E, sensitivity 1": private_exponent(schedule, epsilon, TRUE, "appendix"),
        "eps in total, zCDP, sensitivity 1": private_exponent(schedule, epsilon, TRUE, "zcdp"),
        "eps in total, exact composition, sensitivity 1": private_exponent(schedule, epsilon, TRUE),
    } | {f"eps per update, sensitivity {each:g}": epsilon / (2.0 * each) for each in (WORST, GENERAL, TRUE)}


def claims(table: TableOne) -> Iterator[Claim]:
    """Non-private cells one by one; private cells at the stated accounting, and under any scale at all."""
    for (world, column), made in table.non_private.items():
        published = outcome.PUBLISHED[world][column]
        yield within(f"{made.method}, {world}: the regret curve reaches its plateau at episode {published}",
                     f"{PAPER} Table 1", made.estimate / published, low=1.0 / CEILING, high=CEILING,
                     paper=f"1: episode {published} (no seeds given; B = 5 chosen to come nearest)",
                     what="plateau of the mean curve / published")
    # The first batch is played on no data at a constant expected regret: no plateau before 95 % of it.
    batch = outcome.theory_batch(EPISODES, 8.0, WORST, outcome.complexity(EPISODES))
    yield within("The batch behind Table 1 is the theory's (K = 500, eps = 8, sensitivity 25, constants 1)",
                 f"{PAPER} Appendix D, Appendix E.2", 0.95 * batch, high=outcome.PUBLISHED["easy"][1],
                 what="earliest possible plateau with that batch, against the published 24 (easy, batched)")
    yield from _stated(table)
    yield _any_scale(table)
    yield from _honest_totals(table)


def theory_rows() -> list[dict[str, object]]:
    """The batch of PRL Appendix E.2 with all constants 1, at three sensitivities."""
    complexity = outcome.complexity(EPISODES)
    return [
        {"epsilon": epsilon, "delta": DELTA, "sensitivity": sensitivity,
         "batch": outcome.theory_batch(EPISODES, epsilon, sensitivity, complexity)}
        for epsilon in PRIVATE
        for sensitivity in (WORST, GENERAL, TRUE)
    ]


def _stated(table: TableOne) -> Iterator[Claim]:
    schedule = fixed(EPISODES, BATCH)
    for world, epsilon in itertools.product(outcome.PUBLISHED, PRIVATE):
        published = outcome.PUBLISHED[world][PRIVATE[epsilon]]
        exponent = private_exponent(schedule, epsilon, WORST, "appendix")
        made = table.estimate(world, functools.partial(at_exponent, exponent=exponent))
        yield within(f"private eps = {epsilon:g}, {world}: plateau at episode {published} when eps is the total",
                     f"{PAPER} Table 1 with Appendix E's accounting and sensitivity 25",
                     made / published, low=1.0 / CEILING, high=CEILING, paper=f"1: episode {published}",
                     what="plateau of the mean curve / published")


def at_exponent(curve: Array, exponent: float) -> Array:
    """Plateau at any exponent: linear in log-log, constant beyond the ends; `curve` (..., E) to (...)."""
    grid, x = np.log(EXPONENTS), min(max(math.log(exponent), math.log(EXPONENTS[0])), math.log(EXPONENTS[-1]))
    place = min(int(np.searchsorted(grid, x, side="right")) - 1, len(grid) - 2)
    share = (x - grid[place]) / (grid[place + 1] - grid[place])
    log_curve = np.log(curve)
    return np.asarray(np.exp((1.0 - share) * log_curve[..., place] + share * log_curve[..., place + 1]))


def reaching(curve: Array, plateau: float) -> Array:
    """The smallest exponent of the interpolated curve whose plateau is at most `plateau`; (..., E) to (...)."""
    rows, grid = np.log(curve).reshape(-1, curve.shape[-1]), np.log(EXPONENTS)
    found = [np.interp(-math.log(plateau), -row, grid) for row in rows]  # falling: np.interp wants rising
    return np.exp(np.array(found)).reshape(curve.shape[:-1])


def _any_scale(table: TableOne) -> Claim:
    scales = np.geomspace(0.005, 0.2, 120)
    curves = {world: table.curve(world) for world in outcome.PUBLISHED}

    def worst(part: int) -> Array:
        """Largest of the four misfits at the best scale; part 0: (), 1: (RESAMPLES,)."""
        misfits = []
        for scale in scales:
            each = [
                np.abs(np.log(at_exponent(curves[world][part], scale * epsilon) / outcome.PUBLISHED[world][column]))
                for world in outcome.PUBLISHED
                for epsilon, column in PRIVATE.items()
            ]
            misfits.append(np.max(each, axis=0))
        return np.asarray(np.exp(np.min(misfits, axis=0)))

    return within(
        "The four private cells of Table 1 follow from one softmax whose exponent is proportional to eps, B = 5",
        f"{PAPER} Table 1", percentile_interval(float(worst(0)), worst(1), table.runs), high=CEILING,
        what="largest ratio among the four cells at the best constant of proportion")


def total_epsilon(exponent: float, schedule: Schedule, sensitivity: float = TRUE) -> float:
    """ε at δ = 1e-5 of all draws of a schedule at one exponent, by exact composition of their bounded ranges."""
    return composed_epsilon((2.0 * exponent * sensitivity,) * schedule.reads, DELTA)


def _honest_totals(table: TableOne) -> Iterator[Claim]:
    for world, epsilon in itertools.product(outcome.PUBLISHED, PRIVATE):
        published = outcome.PUBLISHED[world][PRIVATE[epsilon]]
        exponent = table.estimate(world, functools.partial(reaching, plateau=published))
        total = exponent.mapped(lambda x: total_epsilon(x, fixed(EPISODES, BATCH)))
        yield within(
            f"The published plateau {published} ({world}, eps = {epsilon:g}) costs a total of at most {epsilon:g}",
            f"{PAPER} Table 1; exact composition at the true sensitivity 1, delta 1e-5", total, high=epsilon,
            paper=f"at most {epsilon:g}", what="total eps of the exponent that gives this plateau at B = 5")
