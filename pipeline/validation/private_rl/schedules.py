"""Algorithm 2 under a total ε by searched schedules: growing batches, each read a few times with falling weight.

At update m the score of f is optimism·f̄₁ + stay·Σ_i memory^i 1{f was drawn i+1 updates ago} − Σ_j w_j (loss of the
batch j before). What does not read data, the optimism and the draws that were released, costs nothing. A trajectory's
loss is 0 or 1 (Appendix D), so its user pays 2 w_j at the j-th update after it: Σ_j 2 w_j in all, pure DP by basic
composition, whatever the number of updates. The draw adds exponential noise and takes the largest (permute-and-flip;
McKenna and Sheldon 2020), which is 2w-DP as the exponential mechanism is, and errs less.

`pipeline.validation.private_rl.sweep` is the search that chose PLANS, on other seeds than those that `measure` takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pipeline.validation.lab import Claim, within
from pipeline.validation.private_rl import outcome
from pipeline.validation.private_rl.plateaus import EPISODES, Cell
from pipeline.validation.private_rl.updates import PAPER, Array, geometric

EPSILON = 8.0
LONGEST = 12  # the most updates that read one episode


@dataclass(frozen=True)
class Plan:
    """first, second, growth: batches first, second·growth^i, i = 0, 1, …. decay: w_j ∝ decay^j, j < `reads`, with
    Σ 2 w_j = ε. optimism, stay: in nats. memory in [0, 1): how long a released draw counts.
    """

    first: int
    second: int
    growth: float
    decay: float
    reads: int
    optimism: float
    stay: float
    memory: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """Episodes per batch; they add up to EPISODES."""
        return (self.first, *geometric(EPISODES - self.first, self.second, self.growth).sizes)

    def weights(self, epsilon: float) -> Array:
        """w_1 … w_reads."""
        shares = self.decay ** np.arange(self.reads)
        return np.asarray(0.5 * epsilon * shares / shares.sum())


PLANS = {
    "both": Plan(1, 10, 1.072, 0.739, 5, 6.257, 0, 0.409),
    "easy": Plan(11, 7, 1, 0.641, 5, 3.207, 0, 0.094),
    "hard": Plan(15, 20, 1, 0.773, 5, 3.411, 1.044, 0.052),
}
"""The best finalists of `run_sweep`, by the goal of the search."""


def total_epsilon(plan: Plan, epsilon: float) -> float:
    """What a user pays: the sum over the updates that read an episode, at the batch where it is largest."""
    weights, updates = plan.weights(epsilon), len(plan.sizes)
    reads = [weights[: updates - 1 - batch].sum() for batch in range(updates)]
    return float(2.0 * max(reads))


def regret_curves(
    world: outcome.OutcomeProblem, plan: Plan, epsilon: float, runs: int, rng: np.random.Generator
) -> Array:
    """(runs, EPISODES) expected regret of the policy that is played."""
    weights = plan.weights(epsilon)
    prior = plan.optimism * world.first_value
    regret = np.empty((runs, EPISODES), dtype=np.float32)
    seen: list[Array] = []
    votes = np.zeros((runs, len(prior)))
    start, rows = 0, np.arange(runs)
    for size in plan.sizes:
        score = prior + plan.stay * votes
        for weight, loss in zip(weights, reversed(seen), strict=False):
            score -= weight * loss
        last = (score + rng.exponential(size=score.shape)).argmax(axis=1)
        votes *= plan.memory
        votes[rows, last] += 1.0
        regret[:, start : start + size] = world.regret[last, None]
        contexts = rng.integers(len(outcome.CONTEXTS), size=(runs, size))
        played = contexts * outcome.SEQUENCES + world.played[last[:, None], contexts]
        seen = [*seen[-plan.reads :], world.losses[played].sum(axis=1, dtype=np.int32)]
        start += size
    return regret


def cell(world: outcome.OutcomeProblem, plan: Plan, epsilon: float, runs: int, seed: int) -> Cell:
    """One plan on one instance."""
    rng = np.random.default_rng([seed, *world.name.encode()])
    curves = regret_curves(world, plan, epsilon, runs, rng)
    return Cell(world.name, f"plan, eps = {epsilon:g}", np.cumsum(curves, axis=1))


def misfit(cells: Sequence[Cell]) -> float:
    """Largest plateau / published over the instances."""
    return max(each.plateau / outcome.PUBLISHED[each.world][2] for each in cells)


Cells = Mapping[tuple[str, str], Cell]


def measure(worlds: Sequence[outcome.OutcomeProblem], runs: int) -> Cells:
    """(goal, world) to the runs of its plan, on other seeds than the search."""
    return {
        (goal, world.name): cell(world, plan, EPSILON, runs, 7)
        for goal, plan in PLANS.items()
        for world in worlds
        if goal in ("both", world.name)
    }


def claims(cells: Cells) -> Iterator[Claim]:
    """Whether a valid schedule at a total ε = 8 reaches Table 1's plateaus: one for both instances, one for each."""
    for (goal, world), made in cells.items():
        published = outcome.PUBLISHED[world][2]
        name = "searched for both instances" if goal == "both" else "searched for this instance"
        yield within(f"A total eps = 8 reaches the published plateau {published} ({world}), by a schedule {name}",
                     f"{PAPER} Table 1; schedule ours", made.estimate / published, high=1.0, kind="ours",
                     paper=f"1: episode {published}", what="plateau of the mean curve / published")
    yield within("What the searched schedules charge a user is the stated total", "this project",
                 max(total_epsilon(plan, EPSILON) for plan in PLANS.values()), high=EPSILON * (1.0 + 1e-9),
                 what="largest sum of 2 w_j over the updates that read an episode")


def rows(cells: Cells) -> list[dict[str, object]]:
    """For schedules.csv."""
    return [{"goal": goal, **asdict(PLANS[goal]), **made.row()} for (goal, _), made in cells.items()]
