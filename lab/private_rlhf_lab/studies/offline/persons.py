"""A person's budget E for 20 questions: one answer at ε = E, or twenty at E/20 (`private_rlhf.privacy.person`).

Both arms ask the same persons, of the linear class and with π_ref's pairs. The private MLE is at the Cramér–Rao bound
of either, so the bound's ratio is what splitting costs; at margin 0 it is tanh²(E/2)/(20 tanh²(E/40)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import bootstrap, bootstrap_mean, ratio_of_means
from private_rlhf.privacy.person import epsilon_each, information, split_budget
from private_rlhf.validation.bandits import Array, fit_linear_counts, offline_counts
from private_rlhf.validation.lab import Claim, Row, within
from private_rlhf.validation.offline import RIDGE, Linear, linear_bandit, variance

BUDGET, QUESTIONS = 2.0, 20
MANY = 200_000  # persons: (2α−1)²n = 10⁴ where each gives 20 answers
FEW = (100, 300, 1000, 3000)
KL_COEF, REWARD_RANGE, PRIOR = 0.5, 4.0, 5.0


@dataclass(frozen=True)
class Arms:
    """By (answers a person, ε of each), the chosen way first: whitened (R, d), θ̂ − θ* in units of the Cramér–Rao bound,
    and error (R,), ‖θ̂ − θ*‖², of MANY persons; gain (K, R), J over π_ref's for FEW; best: the J gain of π*.
    """

    whitened: Mapping[tuple[int, float], Array]
    error: Mapping[tuple[int, float], Array]
    gain: Mapping[tuple[int, float], Array]
    best: float


def measure(repetitions: int, seed: int) -> Arms:
    """Both ways to spend BUDGET."""
    generator = np.random.default_rng(seed)
    mild, strong = linear_bandit(generator, 1.0), linear_bandit(generator, REWARD_RANGE, KL_COEF)
    reference = float(strong.bandit.suboptimality(strong.bandit.log_reference))
    ways = (split_budget(BUDGET, QUESTIONS), (QUESTIONS, epsilon_each(BUDGET, QUESTIONS)))
    whitened, error, gain = {}, {}, {}
    for way in ways:
        answers, epsilon = way
        miss = _fits(generator, mild, MANY * answers, epsilon, repetitions, RIDGE) - mild.theta
        whitened[way] = miss @ np.linalg.cholesky(mild.information(MANY * answers, epsilon))
        error[way] = (miss**2).sum(axis=1)
        few = [_fits(generator, strong, persons * answers, epsilon, repetitions, PRIOR) for persons in FEW]
        gain[way] = np.stack([reference - strong.subopt(theta) for theta in few])
    return Arms(whitened, error, gain, reference)


def _fits(
    generator: np.random.Generator, problem: Linear, labels: int, epsilon: float, count: int, ridge: float
) -> Array:
    counts = offline_counts(generator, problem.bandit, labels, count, epsilon)
    return fit_linear_counts(counts, problem.difference, epsilon, ridge=ridge).theta


def claims(found: Arms, seed: int) -> Iterator[Claim]:
    """The bound holds for both ways, the price of splitting is the law's, and J says the same."""
    source = "this project"
    (chosen, split) = found.whitened
    for (answers, epsilon), whitened in found.whitened.items():
        yield within(
            f"A budget of {BUDGET:g} a person as {answers} x epsilon {epsilon:g}: the private MLE has the variance of"
            " the Fisher information", source, bootstrap(variance, whitened.T, seed), low=0.95, high=1.05,
            what=f"variance / bound with {MANY} persons",
        )  # fmt: skip
    law = information(BUDGET, chosen[0]) / information(BUDGET, QUESTIONS)
    price = bootstrap(ratio_of_means, np.stack([found.error[split], found.error[chosen]]), seed)
    yield within(
        f"{chosen[0]} of {QUESTIONS} answers carries {law:.1f} times what {QUESTIONS} carry (budget {BUDGET:g})",
        source, price / law, low=0.9, high=1.1,
        what="mean squared error, split / chosen, over the tanh^2 law at margin 0",
    )  # fmt: skip
    for row, persons in enumerate(FEW):
        yield within(
            f"{persons} persons of budget {BUDGET:g}: J of the Gibbs policy is higher with {chosen[0]} answer each than"
            f" with {QUESTIONS}", source, bootstrap_mean((found.gain[chosen] - found.gain[split])[row] / found.best,
            seed), low=0.0, what="the difference of J, in units of the gain of the best policy",
        )  # fmt: skip


def rows(found: Arms) -> list[Row]:
    """J gain by persons and way."""
    return [
        {"answers": answers, "epsilon": epsilon, "persons": persons, "j_gain": gain[row].mean(), "best": found.best}
        for (answers, epsilon), gain in found.gain.items()
        for row, persons in enumerate(FEW)
    ]
