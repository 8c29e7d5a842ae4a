"""The posterior of the reward after some rounds: r̄ in a fixed basis, and its information matrix.

The fit is the private MLE (or private least squares) of all rounds, by Fisher scoring from the weights of the round
before. It reads only released answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.linear import PairProblem, minimize
from private_rlhf.reward_models.losses import bound_slope, bounded_reward, check_signs, get_loss
from private_rlhf.reward_models.ridge import MARGIN_SCALE, ridge_by_evidence, ridge_from_margin_scale, ridge_in_units_of
from torch import Tensor


@dataclass(frozen=True)
class Posterior:
    """theta (k,) and the inverse covariance information (k, k) = Σ ω δg δgᵀ + λI of the fit, float64; ridge λ."""

    theta: Tensor
    information: Tensor
    ridge: float
    noise: LabelNoise
    reward_bound: float | None
    kl_coef: float

    def reward(self, x: Tensor) -> Tensor:
        """r̄ (…) of coordinates (…, k)."""
        return bounded_reward(x @ self.theta, self.reward_bound)

    def gradient(self, x: Tensor) -> Tensor:
        """∂r̄/∂θ (…, k)."""
        return bound_slope(x @ self.theta, self.reward_bound)[..., None] * x

    def policy(self, x: Tensor, log_ratio: Tensor | float = 0.0) -> Tensor:
        """π¹ ∝ π_ref·exp(r̄/kl_coef) among draws of a policy π, log_ratio = log π_ref/π (M, N): (M, N, k) -> (M, N)."""
        return torch.softmax(self.reward(x) / self.kl_coef + log_ratio, dim=-1)

    def pessimistic_policy(self, x: Tensor, kappa: float, log_ratio: Tensor | float = 0.0) -> Tensor:
        """∝ π_ref·exp((r̄ − Γ)/kl_coef), Γ = κ·√(g̃ᵀH⁻¹g̃) centred by π_ref (PPKL Algorithm 1): (M, N, k) -> (M, N)."""
        reference = torch.softmax(torch.zeros(x.shape[:2], dtype=torch.float64) + log_ratio, dim=-1)
        reward = self.reward(x) - self._spread(x, kappa, reference)
        return torch.softmax(reward / self.kl_coef + log_ratio, dim=-1)

    def bonus(self, x: Tensor, kappa: float, log_ratio: Tensor | float = 0.0) -> Tensor:
        """b = κ·√(g̃ᵀH⁻¹g̃), centred by π¹ (POKL Algorithm 2, step 9): (M, N, k) -> (M, N)."""
        return self._spread(x, kappa, self.policy(x, log_ratio))

    def _spread(self, x: Tensor, kappa: float, centre: Tensor) -> Tensor:
        gradient = self.gradient(x)
        centred = gradient - (centre[..., None] * gradient).sum(dim=1, keepdim=True)
        factor = torch.linalg.cholesky(self.information)
        flat = torch.linalg.solve_triangular(factor, centred.reshape(-1, centred.shape[-1]).T, upper=False)
        return kappa * torch.linalg.vector_norm(flat, dim=0).reshape(x.shape[:2])


@dataclass
class Learner:
    """All answers so far, and the posterior that follows. noise, reward_bound, kl_coef, loss: as the recipe has them.
    ridge: λ if it is given; None: that of the largest marginal likelihood of all answers so far."""

    components: int
    noise: LabelNoise
    reward_bound: float | None
    kl_coef: float
    loss: str = "private_likelihood"
    ridge: float | None = None
    _first: list[Tensor] = field(default_factory=list, repr=False)
    _second: list[Tensor] = field(default_factory=list, repr=False)
    _labels: list[Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        ridge = self.ridge or ridge_from_margin_scale(MARGIN_SCALE, self.components)
        eye = torch.eye(self.components, dtype=torch.float64)
        start = torch.zeros(self.components, dtype=torch.float64)
        self.posterior = Posterior(start, ridge * eye, ridge, self.noise, self.reward_bound, self.kl_coef)

    def __len__(self) -> int:
        return sum(map(len, self._labels))

    def add(self, first: Tensor, second: Tensor, label: Tensor) -> Posterior:
        """Answers of a round: coordinates (n, k) of both responses, private labels (n,) ±1 (+1 prefers the first).

        ValueError for other labels; the posterior is then as it was.
        """
        check_signs(label)
        self._first.append(first.double())
        self._second.append(second.double())
        self._labels.append(label.double())
        if not len(self):
            return self.posterior
        x_a, x_b, z = (torch.cat(rows) for rows in (self._first, self._second, self._labels))
        loss = get_loss(self.loss)
        ridge = self.ridge or ridge_by_evidence(x_a, x_b, z, self.noise, self.reward_bound, self.posterior.ridge)
        problem = PairProblem(x_a, x_b, z, self.noise, self.reward_bound, loss)
        theta, _ = minimize(problem, ridge_in_units_of(loss, ridge, self.noise), self.posterior.theta, tolerance=1e-6)
        information = problem.information(theta)
        information.diagonal().add_(ridge)
        self.posterior = Posterior(theta, information, ridge, self.noise, self.reward_bound, self.kl_coef)
        return self.posterior
