"""The paper's bonus for the linear class, with its constants exposed (PPKL Eq. 10).

    Γ = κ √c · e^{B/2}/(2α−1) · √( φ̃ᵀ Σ⁻¹ φ̃ · ( log(N(τ)/δ)/n + τ ) )

Rewards lie in an interval of width B. For the class u = w·φ the quantity D²_F of Definition 3.2, read with the reward
centred per prompt, is φ̃ᵀΣ⁻¹φ̃ with φ̃ = φ(s, a) − E_{a'~μ} φ(s, a') and Σ = E_s Var_{a'~μ} φ(s, a'): a mean per
sample, not the sum over the data (n stands in the other factor). A bounded reward is linearised at the fit, so that
g = r'(u)φ takes the place of φ. Σ comes from pairs whose responses were both drawn from μ, where E[½ δφ δφᵀ] = Σ.
A ridge λ of a fit to n pairs is λ/n per sample, and Σ + (λ/n)I is what is inverted.

The constants are those of a proof. N(τ) = (1/τ)^k for k coordinates (the paper's choice for the linear class),
τ = 1/n and c = 1 by default: a Γ that is an upper bound and not an estimate. Its e^{B/2} is 148 at B = 10 against the
Fisher bonus, which needs no such factor; at B = 1 √c near 0.1 gives a useful size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.bound import check_reward_bound
from private_rlhf.reward_models.linear import LinearFit
from private_rlhf.reward_models.spread import ALONE, Spread
from private_rlhf.reward_models.uncertainty import QuadraticBonus, reward_gradient
from torch import Tensor

BLOCK = 1024


@dataclass(frozen=True)
class EllipticalConstants:
    """`c` > 0 of the bound; `delta` in (0, 1), its failure probability; `tau` in (0, 1) of the covering (None: 1/n);
    `log_covering` = log N(τ) ≥ 0 (None: k log(1/τ)). ValueError otherwise.
    """

    c: float = 1.0
    delta: float = 0.05
    tau: float | None = None
    log_covering: float | None = None

    def __post_init__(self) -> None:
        covering = 0.0 if self.log_covering is None else self.log_covering
        radius = 0.5 if self.tau is None else self.tau
        if not (0 < self.c < math.inf and 0 < self.delta < 1 and 0 < radius < 1 and 0 <= covering < math.inf):
            raise ValueError(f"constants must have c > 0, delta and tau in (0, 1), log_covering >= 0, got {self}")

    def width(self, noise: LabelNoise, reward_bound: float, num_pairs: int, num_components: int) -> float:
        """√c e^{B/2}/(2α−1) √(log(N/δ)/n + τ): Γ at κ = 1 where φ̃ᵀΣ⁻¹φ̃ = 1, in the unit of the reward."""
        tau = 1.0 / num_pairs if self.tau is None else self.tau
        covering = num_components * math.log(1.0 / tau) if self.log_covering is None else self.log_covering
        rate = (covering - math.log(self.delta)) / num_pairs + tau
        return math.sqrt(self.c * rate) * math.exp(reward_bound / 2.0) / noise.factor


@dataclass(frozen=True)
class EllipticalBonus(QuadraticBonus):
    """PPKL Eq. 10. weight (d,), basis V (d, k), covariance Σ + (λ/n)I (k, k): float64. ValueError for a covariance that
    cannot be inverted, or an unbounded reward (the bound has no e^{B/2} then).
    """

    weight: Tensor
    basis: FeatureBasis
    covariance: Tensor
    reward_bound: float | None
    noise: LabelNoise
    num_pairs: int
    constants: EllipticalConstants = field(default_factory=EllipticalConstants)
    kappa: float = 1.0
    matrix_name = "covariance"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.width

    @property
    def width(self) -> float:
        bound = check_reward_bound(self.reward_bound)
        if bound is None:
            raise ValueError("the elliptical bonus needs a reward_bound: its constant is e^(B/2)")
        return self.kappa * self.constants.width(self.noise, bound, self.num_pairs, self.basis.num_components)


def elliptical_bonus(
    fit: LinearFit,
    phi_a: Tensor,
    phi_b: Tensor,
    kappa: float = 1.0,
    constants: EllipticalConstants | None = None,
    spread: Spread = ALONE,
) -> EllipticalBonus:
    """Γ of a linear fit, Σ being that of pairs (φ_a, φ_b) of responses that μ drew, features (n, d) of any float dtype.

    Order and label of a pair do not matter. With a `spread` each process brings the pairs that it holds. ValueError as
    for `EllipticalBonus`, and without pairs.
    """
    size = fit.basis.num_components
    total = torch.zeros(size, size, dtype=torch.float64)
    for first, second in zip(phi_a.split(BLOCK), phi_b.split(BLOCK), strict=True):
        gradient_a, gradient_b = (reward_gradient(side, fit.weight, fit.reward_bound) for side in (first, second))
        rows = fit.basis.coordinates(gradient_a - gradient_b).cpu() / math.sqrt(2.0)
        total += rows.T @ rows
    count = int(spread.sum(torch.tensor(float(len(phi_a)))))
    if count == 0:
        raise ValueError("the covariance has no pairs: give some")
    covariance = spread.sum(total) / count
    covariance.diagonal().add_(fit.ridge / count)
    return EllipticalBonus(
        fit.weight, fit.basis, covariance, fit.reward_bound, fit.noise, count, constants or EllipticalConstants(), kappa
    )
