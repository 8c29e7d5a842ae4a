"""Beyond the papers: labels with an ε of their own in one likelihood, and labels corrupted before or after the flips.

Corruption turns a share of the labels towards one response (a Huber adversary). Before randomised response it moves the
mean of a true label by at most 2 share; after it, the mean of a released one, and the correction divides by 2α−1
(arXiv 2505.21395, 2512.23816). SubOpt is quadratic in that shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import bootstrap, ratio_of_means
from private_rlhf.validation.bandits import Array, Bandit, Counts, factor, fisher_weights, private_labels
from private_rlhf.validation.lab import Claim, Integers, minimise, within

from private_rlhf_lab.studies.offline.hard import tabular_margin

EPSILONS = (0.5, 1.0, 2.0)
BUDGETS = (0.25, 1.0, 4.0)
LABELS = (40_000, 20_000, 4_000)  # at each budget
SHARES = (0.01, 0.02, 0.04)
MARGIN = 0.6
CORRUPTED = 0.02
ALGEBRA = "arXiv 2505.21395, on J: no chance, it follows at n = infinity and checks the code"


@dataclass(frozen=True)
class _Mixed:
    """−log likelihood of one margin θ (R, 1); groups: labels (R,) by their ε. Curvature: the expected information."""

    groups: Mapping[float, Counts]

    def value(self, theta: Array, rows: Integers) -> Array:
        likely = self._likely(theta)
        return -np.asarray(sum(n.plus[rows] * np.log(p) + n.minus[rows] * np.log(1.0 - p)
                               for n, p in zip(self.groups.values(), likely, strict=True)))  # fmt: skip

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        slope, information = np.zeros(len(rows)), np.zeros(len(rows))
        for (epsilon, n), p in zip(self.groups.items(), self._likely(theta), strict=True):
            tilt = factor(epsilon) * 0.25 / np.cosh(0.5 * theta[:, 0]) ** 2
            slope -= tilt * (n.plus[rows] / p - n.minus[rows] / (1.0 - p))
            information += n.total[rows] * fisher_weights(theta[:, 0], epsilon)
        return slope[:, None], information[:, None, None]

    def _likely(self, theta: Array) -> list[Array]:
        return [0.5 + 0.5 * factor(epsilon) * np.tanh(0.5 * theta[:, 0]) for epsilon in self.groups]


def estimate(groups: Mapping[float, Counts]) -> Array:
    """The private MLE of one margin from labels with several ε, (R,): each label has its own α in the likelihood."""
    repetitions = len(next(iter(groups.values())).plus)
    theta, _ = minimise(_Mixed(groups), np.zeros((repetitions, 1)))
    return np.asarray(theta[:, 0])


def budgets(repetitions: int, seed: int) -> dict[str, Array]:
    """Errors of one margin, (R,), by arm: every label at its own ε; all at the least ε of any; one ε for all, at which
    the mean of z is right; the labels of the largest ε alone.
    """
    generator = np.random.default_rng(seed)

    def labels(number: int, epsilon: float) -> Counts:
        made = private_labels(generator, np.full((repetitions, 1), number), np.array([MARGIN]), epsilon)
        return Counts(made.plus[:, 0], made.minus[:, 0])

    own = {epsilon: labels(number, epsilon) for epsilon, number in zip(BUDGETS, LABELS, strict=True)}
    least = {BUDGETS[0]: labels(sum(LABELS), BUDGETS[0])}
    pooled = Counts(sum(n.plus for n in own.values()), sum(n.minus for n in own.values()))  # type: ignore[arg-type]
    mean = sum(number * factor(epsilon) for epsilon, number in zip(BUDGETS, LABELS, strict=True)) / sum(LABELS)
    common = {2.0 * math.atanh(mean): pooled}
    top = {BUDGETS[-1]: own[BUDGETS[-1]]}
    arms = {"own": own, "least": least, "common": common, "top": top}
    return {name: estimate(groups) - MARGIN for name, groups in arms.items()}


def corrupted(share: float, epsilon: float, *, after: bool) -> float:
    """SubOpt of the private MLE at n = ∞ where `share` of the labels of one pair are turned to −1 before or after the
    flips: two responses, equally likely, margin MARGIN, kl_coef 1.
    """
    mean = math.tanh(0.5 * MARGIN)
    scale = factor(epsilon)
    seen = (1.0 - share) * scale * mean - share if after else scale * ((1.0 - share) * mean - share)
    counts = Counts(*(np.array([0.5e12 * (1.0 + sign * seen)]) for sign in (1.0, -1.0)))
    margin = tabular_margin(counts, epsilon, 8.0)
    bandit = Bandit(np.array([[MARGIN, 0.0]]), np.log(np.full((1, 2), 0.5)), 1.0)
    return float(bandit.suboptimality(bandit.gibbs(np.stack([margin, np.zeros(1)], axis=-1))))


def claims(found: Mapping[str, Array], seed: int) -> Iterator[Claim]:
    """What an ε of one's own is worth, and what corruption costs on either side of the flips."""
    information = sum(
        number * float(fisher_weights(np.array([MARGIN]), epsilon)[0])
        for epsilon, number in zip(BUDGETS, LABELS, strict=True)
    )
    yield within("Labels with epsilon of their own: the MLE is at the Cramer-Rao bound of the sum of their information",
                 "this project", bootstrap(lambda drawn: float(drawn.var()) * information, found["own"], seed),
                 low=0.95, high=1.05, what=f"variance / bound over {len(found['own'])} data sets")
    texts = {"least": "the least epsilon for all", "common": "one epsilon for all", "top": "the best labels alone"}
    for arm, text in texts.items():
        both = np.stack([found["own"], found[arm]]) ** 2
        yield within(f"Each label's own epsilon in the likelihood has less squared error than {text}", "this project",
                     bootstrap(ratio_of_means, both, seed), high=1.0, what="ratio of mean squared errors")
    sizes = np.log(np.array(SHARES))
    for after, place in ((False, "before"), (True, "after")):
        costs = [corrupted(share, EPSILONS[1], after=after) for share in SHARES]
        yield within(f"Corruption {place} randomised response costs SubOpt quadratic in its share",
                     ALGEBRA, float(np.polyfit(sizes, np.log(costs), 1)[0]), low=1.8, high=2.2,
                     kind="control", what=f"exponent of the share over {SHARES[0]:g} to {SHARES[-1]:g}, n = infinity")
    pairs = [(e, *(corrupted(CORRUPTED, e, after=after) for after in (True, False))) for e in EPSILONS]
    ratios = [late / early * factor(epsilon) ** 2 for epsilon, late, early in pairs]
    yield within("Corruption after randomised response costs 1/(2 alpha - 1)^2 times what it costs before, up to a"
                 " factor 2", ALGEBRA, max(*ratios, *(1.0 / each for each in ratios)), high=2.0,
                 kind="control", what="largest misfit over epsilon = 0.5 to 2")


def rows(found: Mapping[str, Array]) -> list[dict[str, object]]:
    """For robust.csv."""
    errors = {f"squared error, {arm}": float((error**2).mean()) for arm, error in found.items()}
    return [{"what": name, "epsilon": "", "value": value} for name, value in errors.items()] + [
        {"what": f"SubOpt, {CORRUPTED:g} corrupted {'after' if after else 'before'}", "epsilon": epsilon,
         "value": corrupted(CORRUPTED, epsilon, after=after)}
        for after in (False, True)
        for epsilon in EPSILONS
    ]
