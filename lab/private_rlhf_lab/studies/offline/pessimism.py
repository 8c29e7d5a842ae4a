"""Pessimism against none where it matters: one response that π_ref hardly ever gives, bad or good. Tabular rewards.

Γ is the Fisher form (`reward_models.uncertainty.FisherBonus`, times κ) or Eq. 10, whose D² is S(1/π_ref(a|s) − 1) for
the class of all rewards: the squared Mahalanobis norm of the centred indicator under E_s Var_{π_ref}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import bootstrap, ratio_of_means
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Counts,
    all_pairs,
    fit_linear_counts,
    offline_counts,
)
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.offline.finite import BOUND, bonus, centred

CONTEXTS, ACTIONS = 4, 4
KL_COEF = 0.1
RIDGE = 0.1
KAPPAS = (0.0, 0.5, 1.0, 2.0, 4.0)
CONSTANTS = (0.01, 1.0)  # c of Eq. 10
BAD, GOOD = 0.05, 0.95


@dataclass(frozen=True)
class Case:
    """The rare response's reward and reference mass (None: π_ref is uniform, its reward BAD), ε and n."""

    rare: float
    mass: float | None
    epsilon: float
    comparisons: int

    @property
    def name(self) -> str:
        """For tables."""
        kind = "uniform pi_ref"
        if self.mass is not None:
            kind = f"{'bad' if self.rare == BAD else 'good'} rare response of mass {self.mass:g}"
        return f"{kind}, epsilon {self.epsilon:g}, n {self.comparisons:g}"


CASES = (
    Case(BAD, 0.002, 0.5, 100_000),
    Case(BAD, 0.002, 2.0, 10_000),
    Case(BAD, 0.002, math.inf, 10_000),
    Case(BAD, 0.02, 0.5, 10_000),
    Case(GOOD, 0.02, 2.0, 10_000),
    Case(GOOD, 0.02, math.inf, 100_000),
    Case(GOOD, 0.002, 2.0, 10_000),
    Case(BAD, None, 1.0, 100_000),
)


@dataclass(frozen=True)
class Outcome:
    """SubOpt per arm ("kappa 1", "Eq. 10, c = 1", …) on the same data, (R,); ref: SubOpt of π_ref."""

    case: Case
    subopt: dict[str, Array]
    ref: float


def problem(case: Case, generator: np.random.Generator) -> Bandit:
    """Ordinary responses have rewards in [0.3, 0.7] and share the rest of π_ref."""
    reward = generator.uniform(0.3, 0.7, (CONTEXTS, ACTIONS))
    reward[:, 0] = case.rare
    mass = 1.0 / ACTIONS if case.mass is None else case.mass
    reference = np.full((CONTEXTS, ACTIONS), (1.0 - mass) / (ACTIONS - 1))
    reference[:, 0] = mass
    return Bandit(reward, np.log(reference), KL_COEF)


def fisher_width(information: Array, log_reference: Array) -> Array:
    """‖φ(s, a) − E_{π_ref} φ(s, ·)‖ under H⁻¹ for one-hot φ, by the pipeline's own bonus: (R, SA, SA) -> (R, S, A)."""
    import torch
    from private_rlhf.reward_models.basis import identity_basis
    from private_rlhf.reward_models.uncertainty import FisherBonus

    size = CONTEXTS * ACTIONS
    one_hot = np.eye(size).reshape(CONTEXTS, ACTIONS, size)
    mean = np.einsum("sa,sad->sd", np.exp(log_reference), one_hot)
    gradient = torch.from_numpy((one_hot - mean[:, None]).reshape(size, size))
    zero, basis = torch.zeros(size, dtype=torch.float64), identity_basis(size)
    bonuses = [FisherBonus(zero, basis, torch.from_numpy(each), None) for each in information]
    widths = [bonus.deviation(gradient, gradient).numpy() for bonus in bonuses]
    return np.stack(widths).reshape(-1, CONTEXTS, ACTIONS)


def estimated(bandit: Bandit, counts: Counts, epsilon: float) -> tuple[Array, Array]:
    """The tabular private MLE, centred by π_ref and held in [−B, B], and its Fisher width: (R, S, A) twice."""
    pairs = all_pairs(CONTEXTS, ACTIONS)
    size = CONTEXTS * ACTIONS
    difference = pairs.difference(np.eye(size).reshape(size, CONTEXTS, ACTIONS)).T
    fit = fit_linear_counts(counts, np.ascontiguousarray(difference), epsilon, ridge=RIDGE)
    reward = centred(fit.theta.reshape(-1, CONTEXTS, ACTIONS), bandit.log_reference)
    return np.clip(reward, -BOUND, BOUND), fisher_width(fit.information, bandit.log_reference)


def measure(repetitions: int, seed: int, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """All arms on every case."""
    generator = np.random.default_rng(seed)
    made = []
    for case in cases:
        bandit = problem(case, generator)
        counts = offline_counts(generator, bandit, case.comparisons, repetitions, case.epsilon)
        reward, width = estimated(bandit, counts, case.epsilon)
        concentration = CONTEXTS * (np.exp(-bandit.log_reference) - 1.0)
        log_cover = CONTEXTS * ACTIONS * math.log(BOUND * case.comparisons)  # τ = 1/n
        arms = {f"kappa {kappa:g}": kappa * width for kappa in KAPPAS} | {
            f"Eq. 10, c = {constant:g}": bonus(
                concentration, case.epsilon, case.comparisons, log_cover, constant, 1.0 / case.comparisons
            )
            for constant in CONSTANTS
        }
        subopt = {arm: bandit.suboptimality(bandit.gibbs(reward - gamma)) for arm, gamma in arms.items()}
        made.append(Outcome(case, subopt, float(bandit.suboptimality(bandit.log_reference))))
    return made


def ratio(outcome: Outcome, arm: str, against: str) -> Array:
    """SubOpt of the two arms, (2, R), for a paired bootstrap of the ratio of means."""
    return np.stack([outcome.subopt[arm], outcome.subopt[against]])


def claims(outcomes: Sequence[Outcome], seed: int) -> Iterator[Claim]:
    """κ = 1 against none per case, and Eq. 10 with c = 1 against κ = 1 on the good rare response."""
    for outcome in outcomes:
        found = bootstrap(ratio_of_means, ratio(outcome, "kappa 1", "kappa 0"), seed)
        high = 1.1 if outcome.case.mass is None else 1.0
        yield within(f"Pessimism (Fisher form, kappa = 1) does not cost: {outcome.case.name}", "PPKL Remark 4.1", found,
                     high=high, kind="reading", what="mean SubOpt with / without pessimism")
    good = max((one for one in outcomes if one.case.rare == GOOD), key=lambda one: one.case.comparisons)
    found = bootstrap(ratio_of_means, ratio(good, "Eq. 10, c = 1", "kappa 1"), seed)
    yield within(f"Eq. 10 with c = 1 does as well as the Fisher form within a factor 2: {good.case.name}",
                 "PPKL Eq. 10", found, high=2.0, kind="reading", what="mean SubOpt of Eq. 10 / Fisher form")


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """For pessimism.csv; spread is the 95th percentile over repetitions."""
    return [
        {"case": one.case.name, "arm": arm, "subopt": float(values.mean()),
         "spread": float(np.percentile(values, 95.0)), "reference": one.ref}
        for one in outcomes
        for arm, values in one.subopt.items()
    ]
