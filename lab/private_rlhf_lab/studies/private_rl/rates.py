"""How regret grows with K under Algorithm 1: the exponent 3/5, and batches of √K without privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap, standard_error
from private_rlhf.validation.bandits import slope_of_mean
from private_rlhf.validation.lab import Claim, Kind, within, worst

from private_rlhf_lab.studies.private_rl.general import (
    Instances,
    bellman_loss,
    cumulative_regret,
    sensitivities,
    squares,
)
from private_rlhf_lab.studies.private_rl.updates import PAPER, Array, fixed, private_exponent
from private_rlhf_lab.studies.private_rl.worlds import random_worlds

EPSILON = 8.0
ROOT, BOUND = "non-private, B = sqrt(K)", "joint DP, exhausted sensitivity, zCDP"
SINGLE, PUBLISHED = "non-private, B = 1", "joint DP, sensitivity 8H, Appendix E"


@dataclass(frozen=True)
class Growth:
    """Regret of one arm: episodes (k,), regret (k, i) of each instance, mean over its runs."""

    arm: str
    episodes: Array
    regret: Array

    def slope(self, part: slice) -> Estimate:
        """Of log mean regret on log K over a part of the counts; bootstrap over instances."""
        return bootstrap(slope_of_mean(self.episodes[part]), self.regret[part], 21, 2000)

    def exponent(self, text: str, source: str, high: float, part: slice, kind: Kind | None = None) -> Claim:
        """The claim that regret grows no faster than K^high over a part of the counts."""
        ends = self.episodes[part]
        what = f"slope of log regret on log K, K = {ends[0]} to {ends[-1]}"
        return within(text, f"{PAPER} {source}", self.slope(part), high=high, what=what, kind=kind)

    def rows(self) -> list[dict[str, object]]:
        """For a CSV."""
        return [
            {"arm": self.arm, "episodes": int(k), "regret": float(mean), "standard_error": float(error)}
            for k, mean, error in zip(self.episodes, self.regret.mean(axis=1), standard_error(self.regret), strict=True)
        ]


def balance(episodes: int) -> float:
    """K^{3/5} ε^{−2/5}: B, and the growth of η, in K and ε (PRL Theorem 3.1); the other factors are left out."""
    return float((episodes**1.5 / EPSILON) ** 0.4)


def growth(arm: str, worlds: Instances, counts: Sequence[int], runs: int) -> Growth:
    """Final regret of one arm at each number of episodes; η and B depend on K, so each is a run of its own."""
    bounds = sensitivities(worlds)
    found = []
    for episodes in counts:
        private = arm in (BOUND, PUBLISHED)
        batch = 1 if arm == SINGLE else round(balance(episodes) if private else math.sqrt(episodes))
        schedule = fixed(episodes, max(1, batch))
        exponents = np.full(len(bounds), math.inf)
        if arm == PUBLISHED:
            exponents = np.full(len(bounds), private_exponent(schedule, EPSILON, 8.0 * worlds.horizon, "appendix"))
        elif private:
            exponents = np.array([private_exponent(schedule, EPSILON, float(bound), "zcdp") for bound in bounds])
        optimism = 0.1 * balance(episodes) if private else 0.2 * math.sqrt(episodes)
        rng = np.random.default_rng([3, episodes, *arm.encode()])
        regret = cumulative_regret(worlds, schedule, exponents, optimism, runs, rng)
        found.append(regret[:, :, -1].mean(axis=1))
    return Growth(arm, np.array(counts), np.stack(found))


def measure(quick: bool) -> list[Growth]:
    """Four arms: non-private at √K and, for fewer episodes, at 1; private with the proved and the published bound."""
    worlds = random_worlds(10 if quick else 24, seed=5)
    counts = [1000 * 4**power for power in range(6 if quick else 7)]
    runs = 1 if quick else 3
    return [
        growth(SINGLE, worlds, [250, 1000] if quick else [250, 1000, 4000], runs),
        growth(ROOT, worlds, [count // 4 for count in counts], runs),
        growth(BOUND, worlds, counts, runs),
        growth(PUBLISHED, worlds, counts, runs),
    ]


def claims(grown: Sequence[Growth]) -> list[Claim]:
    """Slopes. The slope may exceed the exponent of a true bound before the burn-in ends: early and late apart."""
    by_arm = {each.arm: each for each in grown}
    late, early = slice(-3, None), slice(0, 4)
    published = "The paper's accounting (sensitivity 8H, Appendix E), eps = 8: regret grows no faster than K^(3/5)"
    return [
        by_arm[BOUND].exponent("Algorithm 1, joint DP at eps = 8 by zCDP: regret grows no faster than K^(3/5)",
                               "Theorem 3.1", 0.6, late),
        by_arm[PUBLISHED].exponent(f"{published} from small K on", "reading of Theorem 3.1", 0.6, early, "reading"),
        by_arm[PUBLISHED].exponent(f"{published} once K is large", "Theorem 3.1", 0.6, late),
        by_arm[ROOT].exponent("Batches of sqrt(K) keep the exponent at 1/2 without privacy", "Remark 3.7", 0.55,
                              slice(None)),
    ]


def exact(worlds: Instances) -> list[Claim]:
    """What the infimum in Algorithm 1's loss is for, on unlimited data from every state and action of random worlds."""
    errors = []
    for stage in range(worlds.horizon):
        law = worlds.transition[:, stage].reshape(len(worlds.reward), -1, 1)
        sizes = worlds.classes[stage].shape[1], worlds.next_values(stage).shape[1]
        errors.append((squares(worlds, stage) @ law).reshape(-1, *sizes))
    truth = bellman_loss(errors).reshape(len(worlds.reward), -1)[:, 0]  # the first member of every class is Q*
    return [within("The loss of Q* is 0 on unlimited data, whatever the noise of the transitions",
                   f"{PAPER} section 3.1", worst(truth), high=1e-9, kind="control",
                   what="largest loss of Q* over random MDPs")]
