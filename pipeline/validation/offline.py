"""PPKL Theorem 4.2 on the linear class: how SubOpt falls with n, the Fisher information, and wrong losses.

The prediction is SubOpt ≈ tr(I⁻¹ E_s Cov_{π*} φ)/(2 kl_coef), to second order in θ̂ − θ*, I the Fisher information of
the n private labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import bootstrap, ratio_of_means, standard_error
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Counts,
    all_pairs,
    expected_counts,
    factor,
    fisher_weights,
    fit_linear_counts,
    keep_prob,
    offline_counts,
    pair_probability,
    slope_of_mean,
    weighted_gram,
)
from private_rlhf.validation.lab import COLOURS, Claim, Report, Row, new_figure, within

EPSILONS = (0.1, 0.5, 1.0, 2.0, math.inf)
CONTEXTS, ACTIONS, DIMENSION = 10, 5, 5
RIDGE = 1e-3
SEED = 20
# Multiples of 100 d of the effective sample size (2α−1)² n: two decades from where the design calls it asymptotic.
SIZES = (1.0, math.sqrt(10.0), 10.0, math.sqrt(1000.0), 100.0)
EFFICIENT_SIZE = 1e4
ARMS = ("private likelihood", "debiased", "uncorrected", "label smoothing")


@dataclass(frozen=True)
class Linear:
    """A bandit whose reward is features (S, A, d) · theta (d,)."""

    bandit: Bandit
    features: Array
    theta: Array

    @property
    def difference(self) -> Array:
        """ψ = φ(s, first) − φ(s, second), (P, d)."""
        pairs = all_pairs(*self.bandit.reward.shape)
        return self.features[pairs.context, pairs.first] - self.features[pairs.context, pairs.second]

    def subopt(self, theta: Array) -> Array:
        """SubOpt of the Gibbs policy of an estimate, (R, d) -> (R,)."""
        rewards = np.einsum("rd,sad->rsa", theta, self.features)
        return self.bandit.suboptimality(self.bandit.gibbs(rewards))

    def information(self, comparisons: float, epsilon: float) -> Array:
        """Expected Fisher information of that many private comparisons at the truth, (d, d)."""
        chance = pair_probability(self.bandit.log_reference, all_pairs(*self.bandit.reward.shape))
        difference = self.difference
        return weighted_gram(comparisons * chance * fisher_weights(difference @ self.theta, epsilon), difference)

    def predicted(self, comparisons: float, epsilon: float) -> float:
        """tr(I⁻¹ E_s Cov_{π*} φ)/(2 kl_coef)."""
        policy = np.exp(self.bandit.gibbs(self.bandit.reward))
        centred = self.features - np.einsum("sa,sad->sd", policy, self.features)[:, None]
        covariance = np.einsum("sa,sai,saj->ij", policy, centred, centred) / len(policy)
        inverse = np.linalg.inv(self.information(comparisons, epsilon))
        return float(np.trace(inverse @ covariance) / (2.0 * self.bandit.kl_coef))


def linear_bandit(generator: np.random.Generator, reward_range: float, kl_coef: float = 1.0) -> Linear:
    """Gaussian features and parameter, scaled so that max r − min r = reward_range; uniform π_ref."""
    features = generator.normal(size=(CONTEXTS, ACTIONS, DIMENSION))
    theta = generator.normal(size=DIMENSION)
    reward = features @ theta
    theta *= reward_range / (reward.max() - reward.min())
    log_reference = np.full(reward.shape, -math.log(ACTIONS))
    return Linear(Bandit(features @ theta, log_reference, kl_coef), features, theta)


@dataclass(frozen=True)
class Curve:
    """SubOpt of the private likelihood at one ε: comparisons (K,), subopt and predicted (K, R)."""

    epsilon: float
    comparisons: Array
    subopt: Array
    predicted: Array


def curves(reward_range: float, repetitions: int, instances: int, seed: int) -> list[Curve]:
    """One curve an ε, at SIZES; the repetitions are shared out over the instances."""
    generator = np.random.default_rng(seed)
    problems = [linear_bandit(generator, reward_range) for _ in range(instances)]
    each = repetitions // instances
    results = []
    for epsilon in EPSILONS:
        comparisons = np.round(100.0 * DIMENSION * np.array(SIZES) / factor(epsilon) ** 2)
        subopt = np.empty((len(SIZES), instances, each))
        predicted = np.empty_like(subopt)
        for row, number in enumerate(comparisons):
            for column, problem in enumerate(problems):
                counts = offline_counts(generator, problem.bandit, int(number), each, epsilon)
                fit = fit_linear_counts(counts, problem.difference, epsilon, ridge=RIDGE)
                subopt[row, column] = problem.subopt(fit.theta)
                predicted[row, column] = problem.predicted(number, epsilon)
        shape = (len(SIZES), instances * each)
        results.append(Curve(epsilon, comparisons, subopt.reshape(shape), predicted.reshape(shape)))
    return results


def spread(subopt: Array, scale: Array) -> float:
    """Largest over smallest ε of the mean log over sizes of (mean SubOpt over its scale), (E, K, R) and (E, K): 1 is a
    collapse."""
    level = np.log(subopt.mean(axis=2) / scale).mean(axis=1)
    return float(np.exp(level.max() - level.min()))


def rate_claims(narrow: Sequence[Curve], wide: Sequence[Curve], seed: int) -> Iterator[Claim]:
    """Slope per ε, the collapse on the Fisher information and on (2α−1)² n. narrow, wide: reward ranges 1 and 4."""
    for curve in narrow:
        slope = bootstrap(slope_of_mean(curve.comparisons), curve.subopt, seed)
        yield within(f"Private MLE, linear class, epsilon = {curve.epsilon:g}: SubOpt falls like 1/n",
                     "PPKL Theorem 4.2", slope, low=-1.05, high=-0.95, paper="slope -1",
                     what="the slope of log mean SubOpt in log n over two decades from (2 alpha - 1)^2 n = 100 d")
    for reward_range, group in ((1, narrow), (4, wide)):
        subopt = np.stack([curve.subopt for curve in group])
        information = np.stack([curve.predicted.mean(axis=1) for curve in group])
        effective = np.stack([1.0 / (factor(curve.epsilon) ** 2 * curve.comparisons) for curve in group])
        for name, source, scale in (
            ("the Fisher information of the private labels", "this project", information),
            ("the effective sample size (2 alpha - 1)^2 n", "PPKL Remark 4.1", effective),
        ):
            ratio = bootstrap(partial(spread, scale=scale), subopt, seed)
            yield within(f"SubOpt of all epsilon collapses on {name}, rewards in [0, {reward_range}]", source, ratio,
                         high=1.1, what="largest / smallest over epsilon of SubOpt in that unit")
        predicted = np.stack([curve.predicted for curve in group])
        last = np.stack([subopt[:, -1].mean(axis=0), predicted[:, -1].mean(axis=0)])
        yield within(f"SubOpt is what the Fisher information of the private labels foretells, rewards in"
                     f" [0, {reward_range}]", "this project", bootstrap(ratio_of_means, last, seed), low=0.9, high=1.1,
                     what="mean SubOpt / its second-order prediction, at the largest n, over all epsilon")


def efficiency(repetitions: int, seed: int) -> dict[float, Array]:
    """θ̂ − θ* of the private MLE whitened by the Fisher information at (2α−1)² n = 10⁴, per ε (R, d): variance 1 is the
    Cramér–Rao bound."""
    generator = np.random.default_rng(seed)
    problem = linear_bandit(generator, 1.0)
    errors = {}
    for epsilon in EPSILONS:
        comparisons = round(EFFICIENT_SIZE / factor(epsilon) ** 2)
        counts = offline_counts(generator, problem.bandit, comparisons, repetitions, epsilon)
        fit = fit_linear_counts(counts, problem.difference, epsilon, ridge=RIDGE)
        root = np.linalg.cholesky(problem.information(comparisons, epsilon))
        errors[epsilon] = (fit.theta - problem.theta) @ root
    return errors


def variance(whitened: Array) -> float:
    """Mean variance of the whitened coordinates, (d, R)."""
    return float(whitened.var(axis=1, ddof=1).mean())


def efficiency_claims(errors: Mapping[float, Array], seed: int) -> Iterator[Claim]:
    """The variance against the Cramér–Rao bound, per ε."""
    for epsilon, whitened in errors.items():
        ratio = bootstrap(variance, whitened.T, seed)
        yield within(f"Private MLE, epsilon = {epsilon:g}: variance at the Cramér-Rao bound of the private labels",
                     "this project", ratio, low=0.95, high=1.05,
                     what=f"variance / bound at (2 alpha - 1)^2 n = {EFFICIENT_SIZE:g}, {len(whitened)} repetitions")


def smoothed(counts: Counts, epsilon: float) -> Counts:
    """Cross-entropy with targets (α, 1−α) on labels that were already flipped, as counts for the uncorrected loss."""
    keep = keep_prob(epsilon)
    return Counts(keep * counts.plus + (1.0 - keep) * counts.minus, (1.0 - keep) * counts.plus + keep * counts.minus)


def estimate(arm: str, counts: Counts, difference: Array, epsilon: float) -> Array:
    """θ̂ (R, d) of one of ARMS."""
    if arm == "label smoothing":
        counts = smoothed(counts, epsilon)
    loss = {"private likelihood": "private_likelihood", "debiased": "debiased"}.get(arm, "uncorrected")
    return fit_linear_counts(counts, difference, epsilon, ridge=RIDGE, loss=loss).theta


@dataclass(frozen=True)
class Arms:
    """SubOpt per arm and ε at `comparisons` (K,): subopt (K, R), limit the SubOpt at n = ∞; ref: SubOpt of π_ref."""

    comparisons: Array
    subopt: Mapping[tuple[str, float], Array]
    limit: Mapping[tuple[str, float], float]
    ref: float


def arms(repetitions: int, sizes: Sequence[float], seed: int, epsilons: Sequence[float] = (0.5, 1.0, 2.0)) -> Arms:
    """All ARMS on the same labels, reward range 4."""
    generator = np.random.default_rng(seed)
    problem = linear_bandit(generator, 4.0)
    subopt: dict[tuple[str, float], Array] = {}
    limit = {}
    for epsilon in epsilons:
        counts_by_size = [offline_counts(generator, problem.bandit, int(size), repetitions, epsilon) for size in sizes]
        for arm in ARMS:
            fits = [estimate(arm, counts, problem.difference, epsilon) for counts in counts_by_size]
            subopt[arm, epsilon] = np.stack([problem.subopt(theta) for theta in fits])
            plus, minus = expected_counts(problem.bandit, 1e12, epsilon)
            far = estimate(arm, Counts(plus[None], minus[None]), problem.difference, epsilon)
            limit[arm, epsilon] = float(problem.subopt(far)[0])
    ref = float(problem.bandit.suboptimality(problem.bandit.log_reference))
    return Arms(np.array(sizes, dtype=np.float64), subopt, limit, ref)


def arm_claims(results: Arms, seed: int) -> Iterator[Claim]:
    """Losses that keep the rate at the last decade of n, ε = 1, and the places where the others stop."""
    last = slice(-3, None)
    for arm in ARMS:
        slope = bootstrap(slope_of_mean(results.comparisons[last]), results.subopt[arm, 1.0][last], seed)
        yield within(f"Loss {arm!r} on private labels: SubOpt falls like 1/n (epsilon = 1)", "this project", slope,
                     low=-1.1, high=-0.9,
                     what=f"the slope over n = {results.comparisons[-3]:g} to {results.comparisons[-1]:g}")
    uncorrected, smooth = (results.limit[arm, 1.0] for arm in ("uncorrected", "label smoothing"))
    yield within("Label smoothing of labels that are already flipped repairs the uncorrected loss (epsilon = 1)",
                 "this project", smooth / uncorrected, high=1.0, what="SubOpt at n = infinity with smoothing / without")


def figure(narrow: Sequence[Curve], wide: Sequence[Curve]) -> Figure:
    """SubOpt against n; and in units of its prediction and of 1/(2α−1)²n."""
    drawing, axes = new_figure(4)
    for place, curve in enumerate(narrow):
        label = f"ε = {curve.epsilon:g}"
        axes[0].plot(curve.comparisons, curve.subopt.mean(axis=1), "o-", label=label)
        axes[0].plot(curve.comparisons, curve.predicted.mean(axis=1), "--", color=COLOURS[place], linewidth=0.7)
    for axis, group, name in ((axes[1], narrow, "[0, 1]"), (axes[2], wide, "[0, 4]")):
        for curve in group:
            size = factor(curve.epsilon) ** 2 * curve.comparisons
            axis.plot(size, curve.subopt.mean(axis=1) * size, "o-")
        axis.set(xscale="log", xlabel="(2α−1)² n", title=f"SubOpt · (2α−1)² n, r in {name}")
    for curve in (*narrow, *wide):
        size = factor(curve.epsilon) ** 2 * curve.comparisons
        axes[3].plot(size, curve.subopt.mean(axis=1) / curve.predicted.mean(axis=1), "o-")
    axes[3].set(xscale="log", ylim=(0.7, 1.3), xlabel="(2α−1)² n", title="SubOpt / Fisher prediction")
    axes[0].set(xscale="log", yscale="log", xlabel="comparisons n", title="SubOpt (dashed: prediction)")
    axes[0].legend()
    return drawing


def rows(curves: Sequence[Curve], reward_range: float) -> list[Row]:
    """For rates.csv."""
    return [
        {"reward_range": reward_range, "epsilon": curve.epsilon, "n": number,
         "effective_n": factor(curve.epsilon) ** 2 * number, "subopt": subopt.mean(),
         "standard_error": standard_error(subopt), "predicted": predicted.mean()}
        for curve in curves
        for number, subopt, predicted in zip(curve.comparisons, curve.subopt, curve.predicted, strict=True)
    ]


def run(quick: bool) -> Report:
    """Rates, efficiency and losses, bit-reproducible; `quick` takes fewer repetitions."""
    narrow = curves(1.0, 400 if quick else 2400, 4, SEED)
    wide = curves(4.0, 400 if quick else 2400, 4, SEED + 1)
    efficient = efficiency(4000 if quick else 10_000, SEED + 2)
    losses = arms(40 if quick else 400, (1e2, 1e3, 1e4, 1e5, 1e6), SEED + 3)
    return Report(
        name="offline",
        claims=[
            *rate_claims(narrow, wide, SEED), *efficiency_claims(efficient, SEED), *arm_claims(losses, SEED)
        ],
        tables={"rates": [*rows(narrow, 1.0), *rows(wide, 4.0)]},
        figures={"rates": figure(narrow, wide)},
    )  # fmt: skip
