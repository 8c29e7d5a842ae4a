"""Is Algorithm 2 as it runs as private as it says? From below, without the formulas that chose its exponents.

Draws are sampled, reads are counted on the memory that the runs use, the sensitivity is the enumerated one, and what a
sequence of draws gives away is the exact privacy loss of one pair of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from private_rlhf.core.stats import Estimate, wilson
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.lab import Claim, within, worst
from scipy.stats import binom

from private_rlhf_lab.studies.private_rl import outcome
from private_rlhf_lab.studies.private_rl.accounts import outcome_losses, outcome_sensitivity
from private_rlhf_lab.studies.private_rl.honest import arms
from private_rlhf_lab.studies.private_rl.updates import DELTA, PAPER, Memory, Schedule, draw, private_exponent

EPSILONS = (8.0, 5.0, 2.0, 1.0)
OTHERS = 12  # trajectories beside the canary


def counted_reads(schedule: Schedule) -> int:
    """The largest number of updates whose scores one batch reaches: a 1 is put into each batch in turn and looked for
    in the memory before every later draw.
    """
    batches = np.eye(len(schedule.sizes), dtype=np.int32)
    memory, reads = Memory(schedule.window, batches.shape[1:]), np.zeros(len(batches), dtype=int)
    for batch in batches:
        reads += memory.total != 0
        memory.add(batch)
    return int(reads.max())


def drawn_exponent(exponent: float, draws: int, seed: int) -> Estimate:
    """The exponent of `draw` from the odds of two scores 1.5/exponent apart, over the one it was given."""
    scores = np.tile([0.0, 1.5 / exponent], (draws, 1))
    share = wilson(int(draw(scores, exponent, np.random.default_rng(seed)).sum()), draws)
    return share.mapped(lambda p: (_log(p) - _log(1.0 - p)) / 1.5)


def _log(share: float) -> float:
    """−∞ for 0: an event that no draw showed."""
    return math.log(share) if share > 0.0 else -math.inf


def canary(epsilon: float, draws: int, seed: int) -> Estimate:
    """log P(A)/P'(A) of one draw from Appendix D's hypotheses, released at `epsilon`, the canary's outcome 0 or 1.

    The canary is the trajectory, and A or its complement the event, that tells most by the softmax; the law itself is
    sampled. Interval: each share at 97.5 %.
    """
    generator, world = np.random.default_rng(seed), outcome.problem("easy")
    losses = outcome_losses().reshape(len(outcome.HYPOTHESES), -1, 2)
    rows = generator.integers(len(world.losses), size=OTHERS)
    base = outcome.OPTIMISM * world.first_value - world.losses[rows].sum(axis=0, dtype=int)
    ends = base - losses.transpose(1, 2, 0)  # (trajectories, outcomes, F)
    exponent = private_exponent(Schedule("one read", (OTHERS + 1, 1)), epsilon, float(outcome_sensitivity()))
    law = np.exp(gibbs_log_policy(ends, np.zeros(len(base)), 1.0 / exponent))
    events = np.stack([losses[..., 0] == 0, losses[..., 0] != 0])  # (2, F, trajectories): the outcome 0 is predicted
    shares = np.einsum("tof,eft->eto", law, events.astype(float))
    tells = np.log((shares[..., 0] + 1e-300) / (shares[..., 1] + 1e-300))
    event, chosen = np.unravel_index(np.abs(np.where(shares.min(axis=2) > 0.15, tells, 0.0)).argmax(), tells.shape)
    seen = [
        wilson(sum(int(events[event, draw(np.tile(score, (1000, 1)), exponent, generator), chosen].sum())
                   for _ in range(draws // 1000)), draws, 0.975)
        for score in ends[chosen][:: 1 if tells[event, chosen] > 0.0 else -1]
    ]  # fmt: skip
    first, second = seen
    return Estimate(_log(first.value) - _log(second.value), _log(first.ci_low) - _log(second.ci_high),
                    _log(first.ci_high) - _log(second.ci_low), draws)


def pair_epsilon(exponent: float, sensitivity: float, reads: int, delta: float) -> float:
    """ε at δ of one pair of neighbours, exactly: a lower bound on what `reads` draws spend.

    Two hypotheses; the user moves one score up and the other down by `sensitivity`, all other users' trajectories move
    both alike. A draw is a coin of log odds b or b + 2·exponent·sensitivity, and the losses of `reads` of them are
    binomial. The worst b of a grid; the other direction is b mirrored. Infinite for an infinite exponent.
    """
    if math.isinf(exponent):
        return math.inf
    width = 2.0 * exponent * sensitivity
    offset = np.linspace(-width - 8.0, 8.0, 81)[:, None]
    heads = np.arange(reads + 1)
    mass = binom.pmf(heads, reads, 1.0 / (1.0 + np.exp(-offset)))
    tail = np.logaddexp(0.0, offset) - np.logaddexp(0.0, offset + width)  # log of the ratio of the two normalisers
    loss = -width * heads - reads * tail

    def spent(epsilon: float) -> float:
        return float((mass * -np.expm1(np.minimum(epsilon - loss, 0.0))).sum(axis=1).max())

    low, high = 0.0, reads * width
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if spent(middle) <= delta else (middle, high)
    return high


def spending(ratio: float) -> dict[tuple[str, float], float]:
    """(arm, ε) to the ε of `pair_epsilon` over ε, for the exponents and schedules of `honest.arms`; ratio: of the
    exponent of the draws to the one that was asked for.
    """
    moved = float(outcome_sensitivity())
    return {
        (name, epsilon): pair_epsilon(ratio * private_exponent(schedule, epsilon, sensitivity, route), moved,
                                      counted_reads(schedule), DELTA) / epsilon
        for name, (schedule, route, sensitivity) in arms().items()
        for epsilon in EPSILONS
    }  # fmt: skip


def claims(quick: bool) -> Iterator[Claim]:
    """Draws, reads and what they spend together."""
    draws = 200_000 if quick else 2_000_000
    ratio = drawn_exponent(0.3, draws, seed=51)
    yield within("A draw has the exponent that it was given", f"{PAPER} Algorithms 1 and 2, by sampling", ratio,
                 low=0.97, high=1.03, kind="control", what="exponent seen in the odds of two scores / the one given")
    yield within("One draw released at eps = 1 gives away at most 1 of a canary's outcome, and some of it",
                 "this project; canaries in Appendix D's data", canary(1.0, draws // 2, seed=52), low=0.5, high=1.0,
                 what="log ratio of an event's shares among draws with the outcome 0 and 1")
    declared = {name: counted_reads(schedule) / schedule.reads for name, (schedule, _, _) in arms().items()}
    yield within("No episode is scored by more updates than its schedule declares", "this project; counted",
                 worst(declared.values()), high=1.0, what="counted / declared, the largest of all schedules")
    asked = spending(1.0)
    yield within("The private arms spend at most their eps on the worst pair found", "this project",
                 worst(asked.values()), high=1.0,
                 what="eps of one pair at delta 1e-5 (reads counted, sensitivity enumerated) / eps")
    value, low, high = (worst(spending(each).values()) for each in (ratio.value, ratio.ci_low, ratio.ci_high))
    yield within("So they do as they run, as far as samples of their draws can tell", "this project",
                 Estimate(value, low, high, ratio.n), high=1.03, what="the same, at the exponent that the draws show")
    for route, charges, low in (("zcdp", "zCDP", 0.75), ("best", "the exact composition of bounded ranges", 0.95)):
        sharp = [value for (name, _), value in asked.items() if arms()[name][1] == route]
        yield within(f"That pair is close to the worst: it spends most of what {charges} charges", "this project",
                     min(sharp), low=low, what="eps of that pair / eps, the smallest of the arms with these exponents")


def rows() -> list[dict[str, object]]:
    """For a CSV: what each arm spends on the worst pair found, draws as asked for."""
    return [{"arm": name, "epsilon": epsilon, "pair_epsilon_over_epsilon": value}
            for (name, epsilon), value in spending(1.0).items()]  # fmt: skip

