"""Small preference bandits, exactly: Gibbs policies and suboptimality by enumeration, private labels as counts, and
estimators on counts, for many repetitions at once.

R repetitions, S contexts, A actions, P pairs of one context's actions, N members of a finite class, d features; "..."
may be empty or R. Contexts are uniform; kl_coef is 1/β of the PPKL paper; losses are in nats. A comparison's label is
+1 where the first response of its pair is preferred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.lab import Array, Integers, minimise

if TYPE_CHECKING:
    from torch import Tensor

Booleans = NDArray[np.bool_]


class Pairs(NamedTuple):
    """Every unordered pair once: context, first < second, (P,) integers each; P = S·A(A−1)/2."""

    context: Integers
    first: Integers
    second: Integers

    def difference(self, values: Array) -> Array:
        """values(s, first) − values(s, second): (..., S, A) -> (..., P)."""
        return values[..., self.context, self.first] - values[..., self.context, self.second]


def all_pairs(contexts: int, actions: int) -> Pairs:
    """The pairs of S contexts with A actions each, context by context."""
    first, second = np.triu_indices(actions, 1)
    count = len(first)
    return Pairs(np.repeat(np.arange(contexts), count), np.tile(first, contexts), np.tile(second, contexts))


@dataclass(frozen=True)
class Bandit:
    """A known problem: reward r* (..., S, A), log_reference log π_ref (..., S, A), kl_coef > 0."""

    reward: Array
    log_reference: Array
    kl_coef: float

    def gibbs(self, reward: Array) -> Array:
        """log π with π ∝ π_ref exp(reward/kl_coef) (PPKL Eq. 5), (..., S, A)."""
        return gibbs_log_policy(reward, self.log_reference, self.kl_coef)

    def objective(self, log_policy: Array) -> Array:
        """J(π) = E[r*] − kl_coef·KL(π‖π_ref) (Eq. 1), (...,)."""
        policy = np.exp(log_policy)
        value = (policy * (self.reward - self.kl_coef * (log_policy - self.log_reference))).sum(axis=-1)
        return np.asarray(value.mean(axis=-1))

    def gaps(self, log_policy: Array) -> Array:
        """J(π*) − J(π) per context, (..., S): kl_coef·KL(π‖π*), which loses no digits where π is close to π*."""
        best = self.gibbs(self.reward)
        return np.asarray(self.kl_coef * (np.exp(log_policy) * (log_policy - best)).sum(axis=-1))

    def suboptimality(self, log_policy: Array) -> Array:
        """SubOpt (Eq. 2), (...,)."""
        return np.asarray(self.gaps(log_policy).mean(axis=-1))


def pair_probability(log_reference: Array, pairs: Pairs) -> Array:
    """P(a comparison is this pair) with both responses from π_ref, (S, A) -> (P,); 1 − Σ is the chance of a = b."""
    reference = np.exp(log_reference)
    chosen = reference[pairs.context, pairs.first] * reference[pairs.context, pairs.second]
    return np.asarray(2.0 * chosen / len(reference))


class Counts(NamedTuple):
    """Counts of +1 and −1 among each pair's private labels, (..., P) float64 each: a sufficient statistic."""

    plus: Array
    minus: Array

    @property
    def total(self) -> Array:
        """(..., P)."""
        return self.plus + self.minus


def keep_prob(epsilon: float) -> float:
    """α of randomised response as the pipeline's mechanism realises it; 1 at ε = ∞."""
    return LabelNoise.of(epsilon).keep_prob


def factor(epsilon: float) -> float:
    """2α − 1, likewise."""
    return LabelNoise.of(epsilon).factor


def private_labels(generator: np.random.Generator, compared: Integers, margin: Array, epsilon: float) -> Counts:
    """Bradley–Terry labels (Eq. 6) of `compared` comparisons (..., P), each through randomised response (Eq. 7)."""
    preferred = generator.binomial(compared, 0.5 * (1.0 + np.tanh(0.5 * margin)))
    keep = keep_prob(epsilon)
    plus = generator.binomial(preferred, keep) + generator.binomial(compared - preferred, 1.0 - keep)
    return Counts(plus.astype(np.float64), (compared - plus).astype(np.float64))


def offline_counts(
    generator: np.random.Generator, bandit: Bandit, comparisons: int, repetitions: int, epsilon: float
) -> Counts:
    """`repetitions` data sets of `comparisons` comparisons from π_ref (S, A) with private labels, (R, P); a reward (R,
    S, A) gives every repetition its own truth."""
    pairs = all_pairs(*bandit.log_reference.shape)
    chance = pair_probability(bandit.log_reference, pairs)
    compared = generator.multinomial(comparisons, [*chance, max(0.0, 1.0 - chance.sum())], repetitions)[:, :-1]
    return private_labels(generator, compared, pairs.difference(bandit.reward), epsilon)


def expected_counts(bandit: Bandit, comparisons: float, epsilon: float) -> Counts:
    """The expectation of `offline_counts`, (..., P): its estimate is where an estimator goes as n → ∞."""
    pairs, keep = all_pairs(*bandit.log_reference.shape), keep_prob(epsilon)
    compared = comparisons * pair_probability(bandit.log_reference, pairs)
    prefer = 0.5 * (1.0 + np.tanh(0.5 * pairs.difference(bandit.reward)))
    return Counts(compared * (1.0 - keep + factor(epsilon) * prefer), compared * (keep - factor(epsilon) * prefer))


def _torch(values: Array) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))


def loss_values(margin: Array, epsilon: float, loss: str) -> tuple[Array, Array]:
    """The loss of `private_rlhf.reward_models.losses` at a label +1 and at −1, shapes as `margin`."""
    return _of_both_labels(margin, epsilon, loss, "value")


def _of_both_labels(margin: Array, epsilon: float, loss: str, field: str) -> tuple[Array, Array]:
    import torch
    from private_rlhf.reward_models.losses import get_loss

    tensor = _torch(margin)
    function = getattr(get_loss(loss), field)
    ones = torch.ones_like(tensor)
    return function(tensor, ones, epsilon).numpy(), function(tensor, -ones, epsilon).numpy()


def total_loss(counts: Counts, margin: Array, epsilon: float, loss: str = "private_likelihood") -> Array:
    """Σ over the data of the loss of every member of a finite class: margin (N, P) or (..., N, P) -> (..., N)."""
    plus, minus = loss_values(margin, epsilon, loss)
    return np.asarray((plus @ counts.plus[..., None] + minus @ counts.minus[..., None])[..., 0])


def fisher_weights(margin: Array, epsilon: float) -> Array:
    """Information of one private label about its margin, `private_rlhf.reward_models.losses.fisher_weight`."""
    from private_rlhf.reward_models.losses import fisher_weight

    return np.asarray(fisher_weight(_torch(margin), epsilon).numpy())


def weighted_gram(weight: Array, difference: Array) -> Array:
    """Σ_p weight_p ψ_p ψ_pᵀ: (..., P), (P, d) -> (..., d, d)."""
    count, dimension = difference.shape
    outer = (difference[:, :, None] * difference[:, None, :]).reshape(count, -1)
    return (weight @ outer).reshape(*weight.shape[:-1], dimension, dimension)


class Fit(NamedTuple):
    """theta (R, d); information (R, d, d): Fisher information of the private labels plus the ridge; converged (R,)."""

    theta: Array
    information: Array
    converged: Booleans


def fit_linear_counts(
    counts: Counts,
    difference: Array,
    epsilon: float,
    *,
    ridge: float,
    loss: str = "private_likelihood",
    tolerance: float = 1e-8,
) -> Fit:
    """The minimiser of Σ loss + (ridge/2)‖θ‖², margin = ψ·θ, ψ `difference` (P, d), all repetitions at once: what
    `reward_models.fit_linear` minimises, by Fisher scoring to a decrement of `tolerance` nats. Below (2α−1)²n ≈ 20 d
    with a small ridge it may not converge."""
    from private_rlhf.reward_models.linear import prior_of
    from private_rlhf.reward_models.losses import get_loss

    problem = _Fits(counts, difference, epsilon, ridge, loss)
    theta, converged = minimise(problem, np.zeros((len(counts.plus), difference.shape[1])), tolerance=tolerance)
    weight = counts.total * fisher_weights(theta @ difference.T, epsilon)
    prior = prior_of(get_loss(loss), ridge, LabelNoise.of(epsilon))
    return Fit(theta, weighted_gram(weight, difference) + prior * np.eye(theta.shape[1]), converged)


@dataclass(frozen=True)
class _Fits:
    """The objectives of R repetitions."""

    counts: Counts
    difference: Array
    epsilon: float
    ridge: float
    loss: str

    def _summed(self, parts: tuple[Array, Array], rows: Integers) -> Array:
        return np.asarray(self.counts.plus[rows] * parts[0] + self.counts.minus[rows] * parts[1])

    def value(self, theta: Array, rows: Integers) -> Array:
        data = self._summed(loss_values(theta @ self.difference.T, self.epsilon, self.loss), rows).sum(axis=1)
        return np.asarray(data + 0.5 * self.ridge * (theta**2).sum(axis=1))

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        from private_rlhf.reward_models.losses import get_loss

        margin = theta @ self.difference.T
        slope = self._summed(_of_both_labels(margin, self.epsilon, self.loss, "slope"), rows)
        weight = self.counts.total[rows] * get_loss(self.loss).curvature(_torch(margin), self.epsilon).numpy()
        matrix = weighted_gram(weight, self.difference) + self.ridge * np.eye(theta.shape[1])
        return slope @ self.difference + self.ridge * theta, matrix


def log_slope(x: Array | Integers, y: Array) -> float:
    """Least-squares slope of log y against log x, (K,) each; infinite or NaN where a y is 0."""
    centred = np.log(x) - np.log(x).mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(centred @ np.log(y) / (centred @ centred))


def slope_of_mean(x: Array) -> Callable[[Array], float]:
    """For `bootstrap`: the log-log slope of the mean over repetitions, (K, R), against x (K,)."""
    return lambda samples: log_slope(x, samples.mean(axis=1))
