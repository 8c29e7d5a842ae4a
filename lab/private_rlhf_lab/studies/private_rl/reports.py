"""Algorithm 2 on reports: every trajectory of Appendix D's MDP is randomised once, before anyone scores it.

What a trajectory tells is the class of its context and its reward. Contexts of one class have the same predictions by
every hypothesis: there are 32 classes; the actions follow from the class and f, which is released. With two rewards
that makes 64 kinds. The report is the true kind with probability e^ε/(e^ε + 63), else any other, all alike (randomised
response; Kairouz, Oh and Viswanath 2016). Whatever f was, two users, contexts and all, make a report at most e^ε times
as likely as each other: ε-local differential privacy, δ = 0, hence joint.

Every later draw of f is post-processing. So all updates may score all reports, each episode may have an update, and f
may be the best score without noise, as in Table 1's non-private column: none of it is charged. The exponential
mechanism pays for every update that scores a trajectory; a report pays once. It needs kinds that can be listed, few
beside e^ε: with an ε of 2 it is noise, and for a large class of observations there are no such kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from private_rlhf.core.stats import Estimate, percentile_interval, wilson
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.private_rl import outcome, schedules
from private_rlhf_lab.studies.private_rl.plateaus import EPISODES, PRIVATE, Cell
from private_rlhf_lab.studies.private_rl.updates import PAPER, Array, draw

REWARDS = 2


def context_classes(world: outcome.OutcomeProblem) -> tuple[Array, Array]:
    """(class of each context (X,), one context of each class): alike in what every hypothesis predicts."""
    told = world.predicted.transpose(1, 0, 2).reshape(len(outcome.CONTEXTS), -1)
    _, one, classes = np.unique(told, axis=0, return_index=True, return_inverse=True)
    return classes.reshape(-1), one


def randomised(truth: Array, kinds: int, epsilon: float, rng: np.random.Generator) -> Array:
    """Reports of kinds 0 … kinds − 1: the truth with odds e^ε against each single other one."""
    keep = 1.0 / (1.0 + (kinds - 1) * math.exp(-epsilon))
    lies = rng.random(truth.shape) >= keep
    return np.where(lies, (truth + rng.integers(1, kinds, size=truth.shape)) % kinds, truth)


def regret_curves(world: outcome.OutcomeProblem, epsilon: float, runs: int, rng: np.random.Generator) -> Array:
    """(runs, EPISODES) expected regret of the policy that is played; an update an episode."""
    classes, one = context_classes(world)
    predicted = world.predicted.transpose(1, 2, 0)  # (X, Q, F)
    score = np.tile(outcome.OPTIMISM * world.first_value, (runs, 1))
    regret = np.empty((runs, EPISODES), dtype=np.float32)
    for episode in range(EPISODES):
        chosen = draw(score, math.inf, rng)
        regret[:, episode] = world.regret[chosen]
        context = rng.integers(len(outcome.CONTEXTS), size=runs)
        reward = world.reward[context, world.played[chosen, context]]
        kind = randomised(REWARDS * classes[context] + reward, REWARDS * len(one), epsilon, rng)
        context, reward = one[kind // REWARDS], kind % REWARDS
        score -= predicted[context, world.played[chosen, context]] != reward[:, None]
    return regret


Cells = Mapping[tuple[str, float], Cell]


def measure(worlds: Sequence[outcome.OutcomeProblem], runs: int, epsilons: Sequence[float]) -> Cells:
    """(world, ε) to its runs. Nothing was chosen by trying: optimism and ties are those of the other columns."""
    found = {}
    for world in worlds:
        for epsilon in epsilons:
            rng = np.random.default_rng([8, int(1000 * epsilon), *world.name.encode()])
            curves = np.cumsum(regret_curves(world, epsilon, runs, rng), axis=1)
            found[world.name, epsilon] = Cell(world.name, f"reports, eps = {epsilon:g}", curves)
    return found


def told(epsilon: float, draws: int, seed: int) -> Estimate:
    """The ε in the odds of the true report against one other, over the one that was asked for."""
    kinds = REWARDS * len(context_classes(outcome.problem("easy"))[1])
    reports = randomised(np.zeros(draws, dtype=int), kinds, epsilon, np.random.default_rng(seed))
    share = wilson(int((reports == 0).sum()), draws)
    return share.mapped(lambda kept: math.log((kinds - 1) * kept / (1.0 - kept)) / epsilon)


def privacy_claims(quick: bool) -> Iterator[Claim]:
    """What one report gives away, by sampling."""
    for epsilon in PRIVATE:
        yield within(f"A report tells the eps that it was given, {epsilon:g}, and no more", "this project, by sampling",
                     told(epsilon, 200_000 if quick else 2_000_000, 54), low=0.97, high=1.03, kind="control",
                     what="eps seen in the odds of a true and a false report / the one given")


def claims(cells: Cells, planned: schedules.Cells) -> Iterator[Claim]:
    """Table 1's private cells at their ε, and against the schedules that were searched for."""
    for (world, epsilon), made in cells.items():
        if epsilon in PRIVATE:
            published = outcome.PUBLISHED[world][PRIVATE[epsilon]]
            yield within(f"A total eps = {epsilon:g} reaches the published plateau {published} ({world}), by reports"
                         " that are randomised once", f"{PAPER} Table 1; mechanism ours", made.estimate / published,
                         high=1.0, kind="ours", paper=f"1: episode {published}",
                         what="plateau of the mean curve / published")
    pairs = [(cells[world, schedules.EPSILON], planned[world, world]) for world in outcome.PUBLISHED]
    plain = max(float(ours.cumulative[:, -1].mean() / plan.cumulative[:, -1].mean()) for ours, plan in pairs)
    drawn = np.max([ours.regrets / plan.regrets for ours, plan in pairs], axis=0)
    yield within("At eps = 8 reports have less than half of the regret of the searched schedules", "this project",
                 percentile_interval(plain, drawn, len(pairs[0][0].cumulative)), high=0.5,
                 what="largest ratio of mean regrets over both instances")


def rows(cells: Cells) -> list[dict[str, object]]:
    """For reports.csv."""
    return [{"epsilon": epsilon, **made.row()} for (_, epsilon), made in cells.items()]
