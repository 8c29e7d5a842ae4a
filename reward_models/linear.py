"""The papers' linear class: a ridge-penalised private likelihood on frozen features, by Fisher scoring.

Minimises F(θ) = Σ_i ℓ(Δ_i, z_i; ε) + (λ/2)‖θ‖², Δ_i = r(w·φ_a,i) − r(w·φ_b,i), w = Vθ. For α < 1 the loss is not convex
in Δ; the scoring matrix H = Σ ω_i δg_i δg_iᵀ + λI (ω the expected curvature) is positive definite, and backtracking
makes F fall. Below (2α−1)²n ≈ 20 d the unpenalised maximiser runs off to infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise, known_noise, rows_of
from private_rlhf.reward_models.basis import (
    ALONE,
    FeatureArray,
    FeatureBasis,
    Spread,
    as_double,
    count_pairs,
    identity_basis,
)
from private_rlhf.reward_models.losses import (
    PreferenceLoss,
    bound_slope,
    bounded_reward,
    check_reward_bound,
    check_signs,
    fisher_weight,
    get_loss,
)
from torch import Tensor

_ARMIJO = 1e-4
_MAX_HALVINGS = 40
_STEPS_PER_MATRIX = 20
_MAX_ITERATIONS = 200


@dataclass(frozen=True)
class LinearFit:
    """A fitted linear reward: `weight` w (d,) and `theta` (k,) float64 with w = Vθ.

    `information` H (k, k) = Σ ω δg δgᵀ + pI at the optimum, with ω the expected information of the *privatised*
    likelihood whatever the loss, so that H⁻¹ is the covariance that the bonus uses. `prior` p is the precision of θ
    for which the `ridge` λ stands: λ itself with that likelihood, less by the curvature of another loss.
    """

    weight: Tensor
    theta: Tensor
    basis: FeatureBasis
    information: Tensor
    noise: LabelNoise | LevelledNoise
    ridge: float
    prior: float
    reward_bound: float | None
    loss: str
    num_pairs: int

    def reward(self, features: FeatureArray) -> Tensor:
        """r(φ·w): (n, d) -> (n,) float64."""
        return bounded_reward(as_double(features, "features", 2) @ self.weight, self.reward_bound)

    def margin(self, phi_a: FeatureArray, phi_b: FeatureArray) -> Tensor:
        """Δ = r(a) − r(b): (n, d) twice -> (n,) float64."""
        return self.reward(phi_a) - self.reward(phi_b)


@dataclass(frozen=True)
class PairProblem:
    """The objective and its derivatives; sums are over all pairs of the `spread`.

    x_a, x_b (n, k) float64 coordinates of the two responses, `private_label` (n,) ±1: of the pairs that this process
    holds. ValueError for other labels.
    """

    x_a: Tensor
    x_b: Tensor
    private_label: Tensor
    noise: LabelNoise | LevelledNoise
    reward_bound: float | None
    loss: PreferenceLoss
    spread: Spread = ALONE

    def __post_init__(self) -> None:
        check_signs(self.private_label)

    def __len__(self) -> int:
        return len(self.private_label)

    @cached_property
    def _difference(self) -> Tensor | None:
        """∂Δ/∂θ of an unbounded reward, the same at every θ."""
        return self.x_a - self.x_b if self.reward_bound is None else None

    def rows(self, rows: Tensor) -> PairProblem:
        """The problem of some of the pairs: their numbers, or a mask (n,)."""
        parts = (self.x_a[rows], self.x_b[rows], self.private_label[rows])
        return PairProblem(*parts, rows_of(self.noise, rows), self.reward_bound, self.loss, self.spread)

    def margin(self, theta: Tensor) -> Tensor:
        """Δ (n,)."""
        if self._difference is not None:
            return self._difference @ theta
        return bounded_reward(self.x_a @ theta, self.reward_bound) - bounded_reward(self.x_b @ theta, self.reward_bound)

    def margin_gradient(self, theta: Tensor) -> Tensor:
        """δg = ∂Δ/∂θ (n, k)."""
        if self._difference is not None:
            return self._difference
        slope_a, slope_b = (bound_slope(side @ theta, self.reward_bound) for side in (self.x_a, self.x_b))
        return slope_a[:, None] * self.x_a - slope_b[:, None] * self.x_b

    def total_loss(self, theta: Tensor) -> float:
        """Σ_i ℓ_i, nats."""
        return float(self.spread.sum(self.loss.value(self.margin(theta), self.private_label, self.noise).sum()))

    def gradient(self, theta: Tensor) -> Tensor:
        """∂ Σ_i ℓ_i/∂θ (k,)."""
        slope = self.loss.slope(self.margin(theta), self.private_label, self.noise)
        if self._difference is not None:
            return self.spread.sum(self._difference.T @ slope)
        # Same as margin_gradient(θ)ᵀ slope without forming the (n, k) matrix.
        slope_a, slope_b = (slope * bound_slope(side @ theta, self.reward_bound) for side in (self.x_a, self.x_b))
        return self.spread.sum(self.x_a.T @ slope_a - self.x_b.T @ slope_b)

    def information(self, theta: Tensor, weight: Callable[[Tensor, AnyNoise], Tensor] = fisher_weight) -> Tensor:
        """Σ_i weight_i δg_i δg_iᵀ (k, k); by default the Fisher information of the private labels."""
        scaled = self.margin_gradient(theta) * weight(self.margin(theta), self.noise).sqrt()[:, None]
        return self.spread.sum(scaled.T @ scaled)


def check_labels(private_label: FeatureArray, num_pairs: int) -> Tensor:
    """(n,) float64 of ±1; ValueError otherwise."""
    label = as_double(private_label, "private_label", 1)
    if len(label) != num_pairs:
        raise ValueError(f"private_label must have {num_pairs} entries, one for each pair, got {len(label)}")
    check_signs(torch.as_tensor(private_label).cpu())
    return label


def pair_problem(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    noise: AnyNoise,
    basis: FeatureBasis,
    reward_bound: float | None,
    loss: str,
    spread: Spread = ALONE,
) -> PairProblem:
    """The problem of pairs of features; arguments and errors as in `fit_linear`."""
    first, second = as_double(phi_a, "phi_a", 2), as_double(phi_b, "phi_b", 2)
    return PairProblem(
        basis.coordinates(first),
        basis.coordinates(second),
        check_labels(private_label, len(first)),
        known_noise(noise, allow_zero=False),
        check_reward_bound(reward_bound),
        get_loss(loss),
        spread,
    )


def minimize(
    problem: PairProblem, ridge: float, start: Tensor, *, anchor: Tensor | None = None, tolerance: float = 1e-9
) -> Tensor:
    """Fisher scoring from `start` (k,), accelerated by L-BFGS corrections, with backtracking.

    The penalty is (λ/2)‖θ − anchor‖², the anchor (k,) being 0 by default. The direction is L-BFGS with the Cholesky
    factor of the scoring matrix as its initial Hessian: the first step is a scoring step, later ones pick up the
    difference between expected and observed curvature. A scoring matrix costs k gradients, so it is recomputed only
    after `_STEPS_PER_MATRIX` steps. Stops at a Newton decrement gᵀH⁻¹g/2 (nats over the data) of at most `tolerance`.
    """
    centre = torch.zeros_like(start) if anchor is None else anchor

    def objective(theta: Tensor) -> float:
        offset = theta - centre
        value = problem.total_loss(theta) + 0.5 * ridge * float(offset @ offset)
        return float(problem.spread.first(torch.tensor(value, dtype=torch.float64)))  # one number on all processes

    theta, identity = start.clone(), torch.eye(len(start), dtype=torch.float64)
    reached, gradient = objective(theta), problem.gradient(theta) + ridge * (theta - centre)
    memory: list[tuple[Tensor, Tensor]] = []
    factor: Tensor | None = None
    age = iterations = 0
    while True:
        if factor is None or age == _STEPS_PER_MATRIX:
            matrix = problem.information(theta, problem.loss.curvature) + ridge * identity
            factor, info = torch.linalg.cholesky_ex(matrix)
            if int(info) != 0:
                raise ValueError("the information matrix is not positive definite: raise ridge or lower num_components")
            memory, age = [], 0
        step = _direction(gradient, factor, memory)
        step, product = problem.spread.first(torch.cat([step, 0.5 * (gradient @ step)[None]])).split([len(step), 1])
        decrement = float(product)
        if decrement <= tolerance or iterations == _MAX_ITERATIONS:
            return theta
        size, reached = _backtrack(objective, theta, step, reached, decrement)
        if size == 0.0:
            if age == 0:
                return theta  # no descent left in floating point
            factor = None
            continue
        iterations, age = iterations + 1, age + 1
        theta = theta - size * step
        previous, gradient = gradient, problem.gradient(theta) + ridge * (theta - centre)
        if float(-size * step @ (gradient - previous)) > 0.0:
            memory.append((-size * step, gradient - previous))


def _direction(gradient: Tensor, factor: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
    """H⁻¹g by the two-loop recursion, the initial H given by its Cholesky factor; positive definite by sᵀy > 0."""
    vector, coefficients = gradient.clone(), []
    for change, slope_change in reversed(memory):
        coefficient = float(change @ vector) / float(change @ slope_change)
        coefficients.append(coefficient)
        vector -= coefficient * slope_change
    vector = torch.cholesky_solve(vector[:, None], factor)[:, 0]
    for (change, slope_change), coefficient in zip(memory, reversed(coefficients), strict=True):
        vector += change * (coefficient - float(slope_change @ vector) / float(change @ slope_change))
    return vector


def _backtrack(
    objective: Callable[[Tensor], float], theta: Tensor, step: Tensor, reached: float, decrement: float
) -> tuple[float, float]:
    """The largest 2^−j that satisfies Armijo's condition, with the new objective; (0, reached) if none does."""
    size = 1.0
    for _ in range(_MAX_HALVINGS):
        value = objective(theta - size * step)
        if value <= reached - _ARMIJO * size * 2.0 * decrement and value < reached:
            return size, value
        size *= 0.5
    return 0.0, reached


def ridge_in_units_of(
    loss: PreferenceLoss, ridge: float, noise: LabelNoise | LevelledNoise, spread: Spread = ALONE
) -> float:
    """The ridge that weighs as much against another loss as `ridge` against the private likelihood, at margin 0."""
    if loss.curvature is fisher_weight:
        return ridge
    zero = torch.zeros(len(noise) if isinstance(noise, LevelledNoise) else 1, dtype=torch.float64)
    by_loss, by_likelihood = (float(spread.sum(part(zero, noise).sum())) for part in (loss.curvature, fisher_weight))
    return ridge * (by_loss / by_likelihood)


def prior_of(loss: PreferenceLoss, ridge: float, noise: LabelNoise | LevelledNoise, spread: Spread = ALONE) -> float:
    """The precision of θ for which the `ridge` of a loss stands: what weighs as much against the likelihood."""
    if loss.name == "uncorrected":  # takes z for the truth: its θ has another scale
        return ridge
    return ridge / ridge_in_units_of(loss, 1.0, noise, spread)


def fit_linear(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    noise: AnyNoise,
    *,
    ridge: float,
    basis: FeatureBasis | None = None,
    reward_bound: float | None = None,
    loss: str = "private_likelihood",
    tolerance: float = 1e-9,
    spread: Spread = ALONE,
) -> LinearFit:
    """Fit w on pairs (φ_a, φ_b) (n, d) with private labels (n,) ±1, +1 where a is preferred; deterministic.

    `ridge` λ ≥ 0 acts in the coordinates of `basis` (default: the original ones), on the sum over pairs. ValueError for
    bad shapes, labels, ε, or a singular problem.
    """
    if not 0.0 <= ridge < float("inf"):
        raise ValueError(f"ridge must be a finite number of at least 0, got {ridge!r}")
    num_pairs = count_pairs(phi_a, phi_b, spread)
    basis = identity_basis(phi_a.shape[1]) if basis is None else basis
    problem = pair_problem(phi_a, phi_b, private_label, noise, basis, reward_bound, loss, spread)
    origin = torch.zeros(basis.num_components, dtype=torch.float64)
    theta = minimize(problem, ridge, origin, tolerance=tolerance)
    prior = prior_of(problem.loss, ridge, problem.noise, spread)
    information = problem.information(theta) + prior * torch.eye(len(theta), dtype=torch.float64)
    weight = basis.weight(theta)
    return LinearFit(
        weight, theta, basis, information, problem.noise, float(ridge), prior, reward_bound, loss, num_pairs
    )
