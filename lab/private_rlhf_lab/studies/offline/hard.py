"""The hard instance of PPKL Theorem 4.5 and its lower bound (Eq. 12), and what C* costs.

S contexts, two responses. π_ref gives the rare one mass 1/C. In context s the margin of the rare response is b + v_s a
with v_s = ±1 and b = kl_coef·log(C−1), so that the optimal policy is near ½ and C^{π*} <= C. With uniform contexts
SubOpt is a mean over contexts; whatever is done context by context has its worst case over v in one of two values.

The proof gives more than an order: SubOpt >= ¼ e^−1 min(a²/(8 kl_coef), 3a/10) at a = √(SC)/((e^ε−1)√n) < B/2, for the
mean over v and so for the worst. For the mean over v the best policy is exactly known: Gibbs of the posterior mean
reward, because J is linear in the reward. It is the floor that estimators are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import Estimate, bootstrap
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Counts,
    factor,
    fisher_weights,
    loss_values,
    offline_counts,
    slope_of_mean,
)
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.offline.finite import CONFIDENCE

CONTEXTS = 8
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
POLICIES = ("posterior mean", "two-point MLE", "tabular MLE", "tabular MLE - Fisher bonus", "two-point MLE - Eq. 10")
FISHER_RIDGE = 0.1


@dataclass(frozen=True)
class Setting:
    """C, kl_coef = 1/β, reward bound B, ε, n and the half-distance a of the two margins."""

    coverage: float
    kl_coef: float
    bound: float
    epsilon: float
    comparisons: int
    distance: float

    @property
    def offset(self) -> float:
        """b."""
        return self.kl_coef * math.log(self.coverage - 1.0)

    @property
    def lower_bound(self) -> float:
        """¼ e^−1 min(a²/(8 kl_coef), 3a/10) at the theorem's a."""
        a = theorem_distance(self.coverage, self.epsilon, self.comparisons)
        return 0.25 * math.exp(-1.0) * min(a * a / (8.0 * self.kl_coef), 0.3 * a)

    @property
    def unit(self) -> float:
        """C S/(kl_coef (2α−1)² n): the rate with the factor that randomised response has at every ε."""
        return self.coverage * CONTEXTS / (self.kl_coef * factor(self.epsilon) ** 2 * self.comparisons)


def theorem_distance(coverage: float, epsilon: float, comparisons: float) -> float:
    """a = √(SC)/((e^ε−1)√n)."""
    return math.sqrt(CONTEXTS * coverage / comparisons) / math.expm1(epsilon)


def rate_distance(coverage: float, epsilon: float, comparisons: float) -> float:
    """a = 2√(SC)/((2α−1)√n): where two-point testing is hardest for randomised response."""
    return 2.0 * math.sqrt(CONTEXTS * coverage / comparisons) / factor(epsilon)


@dataclass(frozen=True)
class Risks:
    """Mean SubOpt a repetition over its contexts with v = +1 and with v = −1, per policy (2, R)."""

    setting: Setting
    by_sign: dict[str, Array]

    def mean(self, policy: str) -> Array:
        """Over a uniform v, (R,)."""
        return np.asarray(self.by_sign[policy].mean(axis=0))

    def worst(self, policy: str) -> float:
        """The larger of the two expectations."""
        return float(self.by_sign[policy].mean(axis=1).max())


def simulate(generator: np.random.Generator, setting: Setting, repetitions: int) -> Risks:
    """All POLICIES on the same data; half of the contexts have v = +1."""
    sign = np.tile([1.0, -1.0], CONTEXTS // 2)
    reward = np.stack([setting.offset + sign * setting.distance, np.zeros(CONTEXTS)], axis=1)
    log_reference = np.tile(np.log([1.0 / setting.coverage, 1.0 - 1.0 / setting.coverage]), (CONTEXTS, 1))
    bandit = Bandit(reward, log_reference, setting.kl_coef)
    counts = offline_counts(generator, bandit, setting.comparisons, repetitions, setting.epsilon)
    by_sign = {}
    for policy, margin in _margins(counts, setting).items():
        gaps = bandit.gaps(bandit.gibbs(np.stack([margin, np.zeros_like(margin)], axis=-1)))
        by_sign[policy] = np.stack([gaps[:, sign > 0].mean(axis=1), gaps[:, sign < 0].mean(axis=1)])
    return Risks(setting, by_sign)


def _margins(counts: Counts, setting: Setting) -> dict[str, Array]:
    """The margin of the rare response that each policy takes for true, (R, S)."""
    a, b, epsilon = setting.distance, setting.offset, setting.epsilon
    (low_plus, high_plus), (low_minus, high_minus) = loss_values(
        np.array([b - a, b + a]), epsilon, "private_likelihood"
    )
    evidence = counts.plus * (low_plus - high_plus) + counts.minus * (low_minus - high_minus)
    two_point = b + a * np.where(evidence >= 0.0, 1.0, -1.0)
    tabular = tabular_margin(counts, epsilon, setting.bound)
    # The centred feature of the rare response is 1 − 1/C, of the other −1/C; what shifts the margin is the difference.
    information = counts.total * fisher_weights(tabular, epsilon) + FISHER_RIDGE
    fisher = (1.0 - 2.0 / setting.coverage) / np.sqrt(information)
    return dict(
        zip(
            POLICIES,
            (
                b + a * np.tanh(0.5 * evidence),
                two_point,
                tabular,
                tabular - fisher,
                two_point - _bonus_difference(setting),
            ),
            strict=True,
        )
    )


def _bonus_difference(setting: Setting) -> float:
    """Γ(rare) − Γ(other) of Eq. 10 with c = 1: for the class of all v, D² is S(C−1) and S/(C−1), log N = S log 2."""
    rate = (CONTEXTS * math.log(2.0) - math.log(CONFIDENCE)) / setting.comparisons
    scale = math.sqrt(CONTEXTS * math.exp(setting.bound) * rate) / factor(setting.epsilon)
    root = math.sqrt(setting.coverage - 1.0)
    return scale * (root - 1.0 / root)


def tabular_margin(counts: Counts, epsilon: float, bound: float) -> Array:
    """The private MLE of one margin per context over [−B, B], closed form: P̃ inverted; 0 without data."""
    total = np.maximum(counts.total, 1.0)
    tilt = (counts.plus - counts.minus) / (total * factor(epsilon))  # of tanh(Δ/2)
    limit = math.tanh(0.5 * bound)
    return np.asarray(2.0 * np.arctanh(np.clip(tilt, -limit, limit)))


def grid(repetitions: int, seed: int, sizes: Sequence[int], *, theorem: bool) -> list[Risks]:
    """Two families (C, β, B) = (4, 2, 2) and (10, 5, 1), all EPSILONS and sizes; a of the theorem, or `rate_distance`.

    Leaves out a >= B/2, where the theorem does not apply.
    """
    generator = np.random.default_rng(seed)
    made = []
    for coverage, kl_coef, bound in ((4.0, 0.5, 2.0), (10.0, 0.2, 1.0)):
        for epsilon in EPSILONS:
            for size in sizes:
                number = size if theorem else round(size / factor(epsilon) ** 2)
                a = (theorem_distance if theorem else rate_distance)(coverage, epsilon, number)
                if a < bound / 2.0:
                    setting = Setting(coverage, kl_coef, bound, epsilon, number, a)
                    made.append(simulate(generator, setting, repetitions))
    return made


COVERAGES = (8.0, 16.0, 32.0, 64.0)


def coverage_curve(repetitions: int, seed: int) -> list[Risks]:
    """The effect of C* at n' = 10⁶, ε = 1, β = 5, B = 2, at the hardest distance."""
    generator = np.random.default_rng(seed)
    number = round(1e6 / factor(1.0) ** 2)
    return [
        simulate(generator, Setting(c, 0.2, 2.0, 1.0, number, rate_distance(c, 1.0, number)), repetitions)
        for c in COVERAGES
    ]


def _stack(risks: Sequence[Risks], policy: str) -> Array:
    """SubOpt over a uniform v, (K, R)."""
    return np.stack([one.mean(policy) for one in risks])


def _growth(risks: Sequence[Risks], policy: str, unit: str, seed: int) -> Estimate:
    """Largest over smallest ε of SubOpt in a unit, each the geometric mean over everything else."""
    scale = np.array([one.setting.lower_bound if unit == "lower_bound" else one.setting.unit for one in risks])
    epsilons = np.array([one.setting.epsilon for one in risks])

    def growth(values: Array) -> float:
        logs = np.log(values.mean(axis=1) / scale)
        means = [logs[epsilons == epsilon].mean() for epsilon in np.unique(epsilons)]
        return math.exp(max(means) - min(means))

    return bootstrap(growth, _stack(risks, policy), seed)


def claims(bound: Sequence[Risks], rate: Sequence[Risks], coverage: Sequence[Risks], seed: int) -> list[Claim]:
    """bound: at the theorem's a; rate: at the hardest a of randomised response; coverage: over C*."""
    best, _, tabular = POLICIES[:3]
    tightest = min(bound, key=lambda one: float(one.mean(best).mean()) / one.setting.lower_bound)
    lowest = bootstrap(lambda values: float(values.mean()) / tightest.setting.lower_bound, tightest.mean(best), seed)
    over = bootstrap(
        lambda values: float((values[0].mean(axis=1) / values[1].mean(axis=1)).max()),
        np.stack([_stack(rate, tabular), _stack(rate, best)]),
        seed,
    )
    exponent = bootstrap(slope_of_mean(np.array(COVERAGES)), _stack(coverage, tabular), seed)
    return [
        within("Eq. 12 with the proof's constant is a lower bound", "PPKL Theorem 4.5", lowest, low=1.0,
               what="the best policy's SubOpt / the bound, at the setting where it is smallest"),
        *_dependence_claims(rate, seed),
        within("At its hardest distance the private MLE is within 2.5 times the best possible, at every epsilon",
               "this project", over, high=2.5, what="largest SubOpt / that of the posterior mean"),
        within("SubOpt of the private MLE grows in proportion to C*", "PPKL Theorem 4.5", exponent, low=0.8, high=1.2,
               what="the exponent of C* over 8 to 64"),
        *(_pessimism_claim(rate, plain, low, seed) for plain, low in ((2, 3), (1, 4))),
    ]


def _dependence_claims(rate: Sequence[Risks], seed: int) -> Iterator[Claim]:
    """Which function of ε the best possible SubOpt and the private MLE's follow."""
    small = [one for one in rate if one.setting.epsilon <= 1.0]
    best, _, tabular = POLICIES[:3]
    cases = (
        ("Eq. 12 follows the best possible SubOpt from epsilon = 0.1 to 1", "PPKL Theorem 4.5",
         small, best, "lower_bound", 4.0),
        ("Eq. 12 follows the best possible SubOpt from epsilon = 0.1 to 4", "PPKL abstract (matching bounds)",
         rate, best, "lower_bound", 4.0),
        ("The private MLE's SubOpt is proportional to 1/((e^epsilon - 1)^2 n) from epsilon = 0.1 to 4",
         "PPKL abstract", rate, tabular, "lower_bound", 4.0),
        ("The private MLE's SubOpt is proportional to 1/((2 alpha - 1)^2 n) from epsilon = 0.1 to 4",
         "PPKL Theorem 4.2", rate, tabular, "unit", 1.5),
    )  # fmt: skip
    for claim, source, risks, policy, unit, high in cases:
        yield within(claim, source, _growth(risks, policy, unit, seed), high=high,
                     what="largest / smallest over epsilon of SubOpt in that unit")


def _pessimism_claim(rate: Sequence[Risks], plain: int, low: int, seed: int) -> Claim:
    """The worst case over v with and without pessimism, geometric mean over the settings."""
    with_it, without = POLICIES[low], POLICIES[plain]
    both = np.stack([np.stack([one.by_sign[policy] for one in rate]) for policy in (with_it, without)])

    def ratio(values: Array) -> float:
        worst = np.log(values.mean(axis=3).max(axis=2))
        return math.exp(float((worst[0] - worst[1]).mean()))

    found = bootstrap(ratio, both, seed)
    return within(f"Hard instance: pessimism ({with_it}) lowers the worst-case SubOpt of the {without}",
                  "PPKL Algorithm 1", found, high=1.0, kind="reading",
                  what="worst-case SubOpt with / without, mean over settings")


def rows(risks: Sequence[Risks]) -> list[dict[str, object]]:
    """For hard.csv."""
    return [
        {"coverage": one.setting.coverage, "kl_coef": one.setting.kl_coef, "epsilon": one.setting.epsilon,
         "n": one.setting.comparisons, "distance": one.setting.distance, "lower_bound": one.setting.lower_bound,
         "policy": policy, "subopt": float(one.mean(policy).mean()), "worst": one.worst(policy)}
        for one in risks
        for policy in POLICIES
    ]
