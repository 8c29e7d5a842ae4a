"""The posterior of the reward after some rounds: r̄ in a fixed basis, and its information matrix.

The fit is the private MLE (or private least squares) of all rounds, by Fisher scoring from the weights of the round
before. It reads only released answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, joined, mean_factor
from private_rlhf.reward_models.linear import PairProblem, minimize, ridge_in_units_of
from private_rlhf.reward_models.losses import bound_slope, bounded_reward, check_signs, get_loss
from private_rlhf.reward_models.ridge import MARGIN_SCALE, ridge_by_evidence, ridge_from_margin_scale
from torch import Tensor


@dataclass(frozen=True)
class Posterior:
    """The fit θ (k,) and its inverse covariance `information` (k, k) = Σ ω δg δgᵀ + λI, both float64, with ridge λ.
    noise: of the next answer, at the largest ε."""

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

    def bonus(self, x: Tensor, kappa: float, log_ratio: Tensor | float = 0.0) -> Tensor:
        """b = κ·√(g̃ᵀH⁻¹g̃), centred by π¹ (POKL Algorithm 2, step 9): (M, N, k) -> (M, N)."""
        return kappa * self.spread(x, self.policy(x, log_ratio))

    def spread(self, x: Tensor, centre: Tensor) -> Tensor:
        """√(g̃ᵀH⁻¹g̃) (M, N) of coordinates (M, N, k), centred by a policy (M, N)."""
        gradient = self.gradient(x)
        centred = gradient - (centre[..., None] * gradient).sum(dim=1, keepdim=True)
        factor = torch.linalg.cholesky(self.information)
        flat = torch.linalg.solve_triangular(factor, centred.reshape(-1, centred.shape[-1]).T, upper=False)
        return torch.linalg.vector_norm(flat, dim=0).reshape(x.shape[:2])


@dataclass
class Learner:
    """All answers so far, and the posterior that follows. noise: of these, so of none at the start.
    ridge: λ; None: that of the largest marginal likelihood so far. The others are as the recipe has them."""

    components: int
    noise: LabelNoise | LevelledNoise
    reward_bound: float | None
    kl_coef: float
    loss: str = "private_likelihood"
    ridge: float | None = None
    _rounds: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        ridge = self.ridge or ridge_from_margin_scale(MARGIN_SCALE, self.components)
        eye = torch.eye(self.components, dtype=torch.float64)
        largest = self.noise.levels[-1] if isinstance(self.noise, LevelledNoise) else self.noise
        self.posterior = Posterior(0.0 * eye[0], ridge * eye, ridge, largest, self.reward_bound, self.kl_coef)

    def __len__(self) -> int:
        return sum(len(label) for *_, label in self._rounds)

    @property
    def worth(self) -> float:
        """The number of answers at the largest ε that carry, at margin 0, as much as those so far."""
        return len(self) and len(self) * (mean_factor(self.noise) / self.posterior.noise.factor) ** 2

    def add(
        self, first: Tensor, second: Tensor, label: Tensor, noise: LabelNoise | LevelledNoise | None = None
    ) -> Posterior:
        """Answers of a round: coordinates (n, k) of both responses, private labels (n,) ±1 (+1 prefers the first), and
        their noise where each has its own. ValueError for other labels; the posterior is then as it was."""
        check_signs(label)
        self.noise = self.noise if noise is None else joined(self.noise, noise)
        self._rounds.append((first.double(), second.double(), label.double()))
        if not len(self):
            return self.posterior
        (x_a, x_b, z), loss = map(torch.cat, zip(*self._rounds, strict=True)), get_loss(self.loss)
        ridge = self.ridge or ridge_by_evidence(x_a, x_b, z, self.noise, self.reward_bound, self.posterior.ridge)
        problem = PairProblem(x_a, x_b, z, self.noise, self.reward_bound, loss)
        theta = minimize(problem, ridge_in_units_of(loss, ridge, self.noise), self.posterior.theta, tolerance=1e-6)
        information = problem.information(theta) + ridge * torch.eye(self.components, dtype=torch.float64)
        self.posterior = replace(self.posterior, theta=theta, information=information, ridge=ridge)
        return self.posterior
