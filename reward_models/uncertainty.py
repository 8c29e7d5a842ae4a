"""The uncertainty of an estimated reward: the bonus Γ, for pessimism (r̄ − Γ) offline and optimism (r̄ + b) online.

A per-prompt shift of the reward never matters to a policy, so uncertainty is that of r(s, a) − E_{a'~μ} r(s, a'), with
μ the reference policy: every bonus is centred by reference completions. Without centring a bonus measures the ridge.

Every kind is a `CentredBonus`, used with either sign. Here the default, Fisher; `elliptical`, `ensemble` and `dropout`
hold the others. `FisherBonus` is Γ = κ √(g̃ᵀ H⁻¹ g̃), g = ∂r/∂w = r'(u) φ, g̃ = g − mean_k g(s, a_k),
H = Σ_i ω_i δg_i δg_iᵀ + λI with ω the expected information of the privatised labels: the posterior standard deviation
of the centred reward under the penalty of the fit.

About subspaces. A fit in a `FeatureBasis` V writes w = Vθ and penalises (λ/2)‖θ‖². Its posterior for w is V H_sub⁻¹ Vᵀ:
Γ² = (Vᵀg̃)ᵀ H_sub⁻¹ (Vᵀg̃). With a square V this equals g̃ᵀH⁻¹g̃ for H = V⁻ᵀ H_sub V⁻¹, the penalty being λ‖V⁻¹w‖².
With fewer components the fit holds w at exactly 0 across the dropped directions, so no variance is claimed there: the
bonus is that of the penalised fit, neither more nor less. Doubt in every direction takes `num_components=None`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.bound import bound_slope, bounded_reward
from private_rlhf.reward_models.linear import LinearFit
from scipy.linalg.lapack import dpocon
from torch import Tensor

MAX_CONDITION = 1e14


class RewardScore(NamedTuple):
    """`reward` r̄ (B,) and `bonus` Γ (B,) ≥ 0, in the unit of the reward."""

    reward: Tensor
    bonus: Tensor

    def pessimistic(self) -> Tensor:
        """r̄ − Γ (B,)."""
        return self.reward - self.bonus

    def optimistic(self) -> Tensor:
        """r̄ + Γ (B,)."""
        return self.reward + self.bonus


class CentredBonus:
    """A reward with its bonus, from what the `features` of its reward model gives for a text: (B, f).

    `weight` w (d,), `reward_bound` B and `kappa` κ identify the model that the bonus belongs to. A kind defines
    `quantity` and `deviation`; ValueError for a κ that is negative or not finite.
    """

    weight: Tensor
    reward_bound: float | None
    kappa: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.kappa < float("inf"):
            raise ValueError(f"kappa must be a finite number of at least 0, got {self.kappa!r}")

    def quantity(self, features: Tensor) -> Tensor:
        """The quantity that is centred, (..., f) float64 -> (..., m) float64."""
        raise NotImplementedError

    def deviation(self, features: Tensor, centred: Tensor) -> Tensor:
        """Γ (B,) of features (B, f) and their quantity less its mean over the references (B, m)."""
        raise NotImplementedError

    def reference_gradient(self, reference_features: Tensor) -> Tensor:
        """Mean quantity of K completions of the prompt by μ, (B, K, f) -> (B, m) float64; a function of the prompt."""
        if reference_features.ndim != 3 or reference_features.shape[1] == 0:
            shape = tuple(reference_features.shape)
            raise ValueError(f"reference_features must be (B, K, d) with K >= 1, got {shape}")
        return self.quantity(reference_features.detach().double()).mean(1)

    def score_centred(self, features: Tensor, reference_gradient: Tensor) -> RewardScore:
        """`score` with the result of `reference_gradient` (B, m) given; the reward is r̄(s, a), not centred. float32."""
        features = features.detach().double()
        quantity = self.quantity(features)
        if quantity.shape != reference_gradient.shape:
            raise ValueError(
                f"features {tuple(features.shape)} and reference {tuple(reference_gradient.shape)} must belong to the "
                "same prompts"
            )
        weight = self.weight.to(features)
        reward = bounded_reward(features[..., : len(weight)] @ weight, self.reward_bound)
        bonus = self.deviation(features, quantity - reference_gradient.to(features.device))
        return RewardScore(reward.float(), bonus.float())

    def score(self, features: Tensor, reference_features: Tensor) -> RewardScore:
        """(B, f) and (B, K, f) -> reward (B,), bonus (B,), float32. K ≥ 8 keeps the noise of the centring small."""
        return self.score_centred(features, self.reference_gradient(reference_features))


class QuadraticBonus(CentredBonus):
    """Γ = width · √(g̃ᵀ M⁻¹ g̃), g̃ the centred gradient of the reward in w, M (k, k) in coordinates of `basis`."""

    basis: FeatureBasis
    matrix_name: ClassVar[str]
    """The field that holds M."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.factor

    @cached_property
    def factor(self) -> Tensor:
        """The lower Cholesky factor of M (k, k)."""
        return definite_factor(getattr(self, self.matrix_name), self.matrix_name)

    @property
    def width(self) -> float:
        """Γ where g̃ᵀ M⁻¹ g̃ = 1."""
        return self.kappa

    def quantity(self, features: Tensor) -> Tensor:
        """g = r'(w·φ) φ, (..., d) -> (..., d) float64."""
        return reward_gradient(features, self.weight, self.reward_bound)

    def deviation(self, features: Tensor, centred: Tensor) -> Tensor:
        """Γ of the centred gradient, whatever the features."""
        return self.bonus(centred)

    def bonus(self, g_centred: Tensor) -> Tensor:
        """Γ (B,) float64 of g̃ (B, d)."""
        coordinates = self.basis.coordinates(g_centred)
        whitened = torch.linalg.solve_triangular(self.factor.to(coordinates.device), coordinates.T, upper=False)
        return self.width * torch.linalg.vector_norm(whitened, dim=0)


def reward_gradient(features: Tensor, weight: Tensor, reward_bound: float | None) -> Tensor:
    """g = ∂r/∂w = r'(w·φ) φ, (..., d) -> (..., d) float64; weight (d,) float64."""
    features = features.detach().double()
    return bound_slope(features @ weight.to(features.device), reward_bound)[..., None] * features


@dataclass(frozen=True)
class FisherBonus(QuadraticBonus):
    """Γ = κ √(g̃ᵀ H⁻¹ g̃). weight (d,), basis V (d, k), information H (k, k): all float64. ValueError if H is
    unusable.
    """

    weight: Tensor
    basis: FeatureBasis
    information: Tensor
    reward_bound: float | None
    kappa: float = 1.0
    matrix_name = "information"

    @classmethod
    def from_fit(cls, fit: LinearFit, kappa: float = 1.0) -> FisherBonus:
        """The bonus of a linear fit, in its basis and with its ridge."""
        return cls(fit.weight, fit.basis, fit.information, fit.reward_bound, kappa)


def definite_factor(matrix: Tensor, name: str) -> Tensor:
    """The lower Cholesky factor (k, k) of a symmetric matrix that is safe to invert.

    ValueError for a matrix that is not finite, not positive definite, or whose condition in the 1-norm (LAPACK's
    estimate from the factor) exceeds `MAX_CONDITION`: beyond it a float64 solve has no digit left.
    """
    remedy = "use a larger ridge or fewer components"
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"the {name} matrix is not positive definite: it is not finite; check the features")
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        raise ValueError(f"the {name} matrix is not positive definite (at row {int(info)} of {len(matrix)}); {remedy}")
    norm = float(torch.linalg.matrix_norm(matrix, 1))
    reciprocal, _ = dpocon(factor.cpu().numpy(), norm, uplo="L")
    if reciprocal * MAX_CONDITION < 1.0:
        raise ValueError(f"the {name} matrix has condition {1.0 / max(reciprocal, 1e-300):.1e}; {remedy}")
    return factor
