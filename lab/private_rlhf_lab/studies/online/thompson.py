"""Exploring by the posterior: the first response from the Gibbs policy of the posterior mean reward, the second from
that of a member drawn from the posterior. Against the decaying uniform mixture, in the same worlds; also against the
mixture on the same posterior mean, which tells what the rule does from what the estimate does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from private_rlhf.core.stats import bootstrap, ratio_of_means, standard_error, student_mean
from private_rlhf.validation.bandits import Array
from private_rlhf.validation.lab import Claim, within
from private_rlhf.validation.regret import EPSILONS, grid_world

from private_rlhf_lab.studies.online.arms import POSTERIOR_MEAN, Arm, Trace, simulate
from private_rlhf_lab.studies.online.study import LIKELIHOOD, MIXTURE, MLE

THOMPSON = "posterior sampling"
SAME_MEAN = f"{MIXTURE} (posterior mean)"
ARMS = (
    Arm(THOMPSON, "posterior", POSTERIOR_MEAN),
    Arm(MIXTURE, "uniform", mixture=100.0),
    Arm(MIXTURE + MLE, "uniform", LIKELIHOOD, mixture=100.0),
    Arm(SAME_MEAN, "uniform", POSTERIOR_MEAN, mixture=100.0),
)
Traces = Mapping[tuple[str, float], Trace]


def measure(worlds: int, seed: int, horizon: int = 1_000_000) -> Traces:
    """All arms at every ε in the same worlds."""
    world = grid_world(np.random.default_rng(seed), worlds)
    return {(arm.name, epsilon): simulate(world, arm, epsilon, horizon, seed) for epsilon in EPSILONS for arm in ARMS}


def _paired(traces: Traces) -> Iterator[tuple[str, float, Array]]:
    """A mixture's name, ε, and the regrets of π² at the horizon, posterior sampling's and the mixture's, (2, R)."""
    for other in (arm.name for arm in ARMS[1:]):
        for epsilon in EPSILONS:
            yield other, epsilon, np.stack([traces[name, epsilon].regret[-1] for name in (THOMPSON, other)])


def claims(traces: Traces, seed: int) -> Iterator[Claim]:
    """Regret of π² at the horizon, paired, against each mixture at every ε."""
    for other, epsilon, both in _paired(traces):
        yield within(f"Posterior sampling has less regret than the {other}, epsilon = {epsilon:g}", "this project",
                     bootstrap(ratio_of_means, both, seed), high=1.0,
                     what=f"ratio of regrets of pi2 at the horizon over {both.shape[1]} paired worlds")


def pairs(traces: Traces, seed: int) -> list[dict[str, object]]:
    """For thompson_paired.csv: both regrets, their ratio and difference with 95 % intervals over paired worlds."""
    found = []
    for other, epsilon, both in _paired(traces):
        ratio, difference = bootstrap(ratio_of_means, both, seed), student_mean(both[0] - both[1])
        row: dict[str, object] = {"arm": THOMPSON, "other": other, "epsilon": epsilon, "worlds": both.shape[1],
                                  "regret": both[0].mean(), "regret_other": both[1].mean()}  # fmt: skip
        for name, one in (("ratio", ratio), ("difference", difference)):
            row |= {name: one.value, f"{name}_low": one.ci_low, f"{name}_high": one.ci_high}
        found.append(row)
    return found


def rows(traces: Traces) -> list[dict[str, object]]:
    """For thompson.csv."""
    return [
        {"arm": name, "epsilon": epsilon, "worlds": trace.regret.shape[1], "rounds": int(trace.rounds[-1]),
         "regret": trace.regret[-1].mean(), "standard_error": float(standard_error(trace.regret[-1])),
         "regret_pi1": trace.regret_exploiting[-1].mean()}
        for (name, epsilon), trace in traces.items()
    ]
