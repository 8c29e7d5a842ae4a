"""How the regret of PRL Theorems 3.1 and 3.4 grows: K^(3/5), ε^(−2/5), C_cov^(3/5), and in |F| like the larger of its
two terms, √log(|F|K/α) + log(|F|K/α)^(2/5).

The bounds are worst cases, and on one MDP with gaps regret falls faster in ε. So regret is taken at the worst of a
family: needles. H = 1, n arms of reward ½, one of ½ + gap; member j of F says that arm j is the better one, and every
false member occurs |F|/n times. All members are equally optimistic, F is complete, C_cov = n. A trajectory moves the
score by at most 1, since values and rewards lie in [0, 1] (with H = 1 the infimum of the loss is common to all).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import bootstrap, standard_error
from private_rlhf.validation.bandits import slope_of_mean
from private_rlhf.validation.lab import COLOURS, Claim, new_figure, within

from private_rlhf_lab.studies.private_rl import outcome
from private_rlhf_lab.studies.private_rl.updates import DELTA, PAPER, Array, draw, fixed, private_exponent

GAPS = tuple(float(gap) for gap in np.geomspace(0.01, 0.5, 24))
EPISODES = (10_000, 40_000, 160_000, 640_000)
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
ARMS = (4, 8, 16, 32, 64)
LOG_SIZES = (50.0, 100.0, 200.0, 400.0, 800.0)  # log |F|: well above log(K/α) = 16, which the bound adds to it
SLACK = 0.05  # the bounds have logarithms of K beside the powers
OUTCOME_EPISODES = (2_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True)
class Needle:
    """One problem: K, total ε at δ = 1e-5, arms, log |F|."""

    episodes: int = 160_000
    epsilon: float = 4.0
    arms: int = 16
    log_members: float = 8.0

    @property
    def batch(self) -> int:
        """B of PRL Appendix E.1 with Δ = H = 1 and constant 1."""
        scale = self.episodes**3 * self.log_class**2 * -math.log(DELTA) / (self.epsilon * self.arms) ** 2
        return max(1, round(scale**0.2))

    @property
    def log_class(self) -> float:
        """log(|F| K/α) at α = 0.05."""
        return self.log_members + math.log(self.episodes / 0.05)


def needle_regret(case: Needle, gap: float, runs: int, rng: np.random.Generator) -> Array:
    """Algorithm 1's expected regret over K episodes, (runs,); rewards without noise. Arm 0 is the better one."""
    schedule = fixed(case.episodes, case.batch)
    exponent = private_exponent(schedule, case.epsilon, 1.0, "zcdp")
    copies = max(0.0, case.log_members - math.log(case.arms))  # log of the copies of a false member: weight in the draw
    score = np.full((runs, case.arms), copies / exponent)
    score[:, 0] = 0.0
    regret = np.zeros(runs)
    for size in schedule.sizes:
        arm = draw(score, exponent, rng)
        wrong = arm > 0
        regret += size * gap * wrong
        # Arm j played: member j errs by `gap` where j is false; where j is true all others do.
        score[np.flatnonzero(wrong), arm[wrong]] -= size * gap**2
        score[~wrong, 1:] -= size * gap**2
    return regret


def worst(case: Needle, runs: int, seed: int) -> Array:
    """Regret at the gap where its mean is largest, (runs,)."""
    rng = np.random.default_rng([seed, case.episodes, case.arms])
    return max((needle_regret(case, gap, runs, rng) for gap in GAPS), key=lambda regret: float(regret.mean()))


@dataclass(frozen=True)
class Sweep:
    """Regret (K, R) where one quantity takes `values` (K,); `high`: the exponent of the theorem."""

    name: str
    source: str
    values: Array
    regret: Array
    high: float


def measure(runs: int, seed: int, outcome_episodes: Sequence[int] = OUTCOME_EPISODES) -> list[Sweep]:
    """Four sweeps of the needles, and Algorithm 2 in K on both instances of Appendix D."""
    large = [Needle(640_000, 16.0, 4, size) for size in LOG_SIZES]
    cases = (
        ("K", EPISODES, [Needle(episodes=k) for k in EPISODES], 0.6),
        ("1/epsilon", 1.0 / np.array(EPSILONS), [Needle(epsilon=each) for each in EPSILONS], 0.4),
        ("C_cov", ARMS, [Needle(arms=arms) for arms in ARMS], 0.6),
        ("log(|F|K/alpha)", [each.log_class for each in large], large, 0.5),
    )
    found = []
    for name, values, made, high in cases:
        regret = np.stack([worst(one, runs, seed) for one in made])
        found.append(Sweep(name, "Theorem 3.1", np.asarray(values, dtype=np.float64), regret, high))
    for name in outcome.PUBLISHED:
        regret = np.stack([_outcome(name, episodes, runs, seed) for episodes in outcome_episodes])
        found.append(Sweep(f"K, Algorithm 2, {name}", "Theorem 3.4", np.array(outcome_episodes), regret, 0.6))
    return found


def _outcome(name: str, episodes: int, runs: int, seed: int) -> Array:
    """Final regret of Algorithm 2 at ε = 8 by zCDP at the true sensitivity 1, B = K^(3/5) ε^(−2/5), (runs,)."""
    schedule = fixed(episodes, round((episodes**1.5 / 8.0) ** 0.4))
    rng = np.random.default_rng([seed, episodes, *name.encode()])
    exponent = private_exponent(schedule, 8.0, 1.0, "zcdp")
    curves = outcome.regret_curves(outcome.problem(name), schedule, exponent, runs, rng)
    return np.asarray(curves.sum(axis=1, dtype=np.float64))


def claims(sweeps: Sequence[Sweep], seed: int) -> Iterator[Claim]:
    """No exponent is above the theorem's."""
    for sweep in sweeps:
        slope = bootstrap(slope_of_mean(sweep.values), sweep.regret, seed)
        needles = "Algorithm 2" not in sweep.name
        where = "needles at their worst gap" if needles else f"{sweep.name[3:]} instance, epsilon = 8"
        power = f"({sweep.name.split(',')[0]})^({sweep.high:g})"
        yield within(f"Regret under joint DP grows no faster than {power}: {where}", f"{PAPER} {sweep.source}", slope,
                     high=sweep.high + SLACK,
                     what=f"the exponent from {sweep.values.min():.3g} to {sweep.values.max():.3g}")


def figure(sweeps: Sequence[Sweep]) -> Figure:
    """Regret in units of its smallest value against each quantity in units of its smallest."""
    drawing, (axes,) = new_figure()
    for place, sweep in enumerate(sweeps):
        mean = sweep.regret.mean(axis=1)
        first = sweep.values.argmin()
        axes.plot(sweep.values / sweep.values[first], mean / mean[first], "o-", color=COLOURS[place], label=sweep.name)
    axes.set(xscale="log", yscale="log", xlabel="quantity / its smallest", title="private regret / its first value")
    axes.legend(fontsize=6)
    return drawing


def rows(sweeps: Sequence[Sweep]) -> list[dict[str, object]]:
    """For scaling.csv."""
    return [
        {"quantity": sweep.name, "value": value, "regret": regret.mean(),
         "standard_error": float(standard_error(regret)), "theorem": sweep.high}
        for sweep in sweeps
        for value, regret in zip(sweep.values, sweep.regret, strict=True)
    ]
