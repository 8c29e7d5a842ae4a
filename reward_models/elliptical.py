"""The paper's bonus for the linear class, with its constants exposed (PPKL Eq. 10).

    Γ = κ √c · e^{B/2}/(2α−1) · √( φ̃ᵀ Σ⁻¹ φ̃ · ( log(N(τ)/δ)/n + τ ) )

Rewards lie in an interval of width B. For the class u = w·φ the quantity D²_F of Definition 3.2, read with the reward
centred per prompt, is φ̃ᵀΣ⁻¹φ̃ with φ̃ = φ(s, a) − E_{a'~μ} φ(s, a') and Σ = E_s Var_{a'~μ} φ(s, a'): a mean per
sample, not the sum over the data (n stands in the other factor). A bounded reward is linearised at the fit, so that
g = r'(u)φ takes the place of φ. Σ comes from pairs whose responses were both drawn from μ, where E[½ δφ δφᵀ] = Σ.
A ridge λ of a fit to n pairs is λ/n per sample, and Σ + (λ/n)I is what is inverted.

The constants are those of a proof. N(τ) = (1/τ)^k for k coordinates (the paper's own choice for the linear class),
τ = 1/n and c = 1 unless given: a Γ that is an upper bound and no estimate. Its e^{B/2} is 148 at B = 10 against the
Fisher bonus, which needs no such factor; at B = 1 √c near 0.1 gives a useful size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from private_rlhf.core.noise import LabelNoise, Noise
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.bound import check_reward_bound
from private_rlhf.reward_models.gram import StreamedGram, definite_factor
from private_rlhf.reward_models.uncertainty import LinearizedBonus, PairGradients, check_kappa
from torch import Tensor


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
        if not 0.0 < self.c < math.inf:
            raise ValueError(f"c must be a finite number above 0, not {self.c!r}")
        for name in ("delta", "tau"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
        if self.log_covering is not None and not 0.0 <= self.log_covering < math.inf:
            raise ValueError(f"log_covering must be a finite number of at least 0, not {self.log_covering!r}")

    def width(self, noise: LabelNoise, reward_bound: float, num_pairs: int, num_components: int) -> float:
        """√c e^{B/2}/(2α−1) √(log(N/δ)/n + τ): Γ at κ = 1 where φ̃ᵀΣ⁻¹φ̃ = 1, in the unit of the reward."""
        tau = 1.0 / num_pairs if self.tau is None else self.tau
        covering = num_components * math.log(1.0 / tau) if self.log_covering is None else self.log_covering
        rate = (covering - math.log(self.delta)) / num_pairs + tau
        return math.sqrt(self.c * rate) * math.exp(reward_bound / 2.0) / noise.factor


class EllipticalAccumulator:
    """Streams Σ over pairs at a fixed weight w; used like `FisherAccumulator`."""

    def __init__(
        self,
        weight: Tensor,
        *,
        noise: Noise,
        ridge: float,
        reward_bound: float | None,
        basis: FeatureBasis | None = None,
        product_dtype: torch.dtype = torch.float64,
    ) -> None:
        if not 0.0 <= ridge < float("inf"):
            raise ValueError(f"ridge must be a finite number of at least 0, not {ridge!r}")
        self.pairs = PairGradients(weight, reward_bound, basis)
        self.noise = LabelNoise.of(noise, allow_zero=False)
        self.ridge = float(ridge)
        self.gram = StreamedGram(self.pairs.basis.num_components, weight.device, product_dtype)

    def update(self, phi_a: Tensor, phi_b: Tensor) -> None:
        """Add pairs of responses that μ drew, features (B, d) each; order and label do not matter."""
        for margin, difference in self.pairs.blocks(phi_a, phi_b):
            self.gram.add(difference / math.sqrt(2.0), len(margin))

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Add up over processes, as in `FisherAccumulator`."""
        self.gram.all_reduce(reduce_sum)

    def bonus(
        self, kappa: float = 1.0, *, constants: EllipticalConstants | None = None, num_pairs: int | None = None
    ) -> EllipticalBonus:
        """The finished statistics; `num_pairs` n is that of the fit (None: as many as were added)."""
        count = int(self.gram.count)
        if count == 0:
            raise ValueError("nothing was added to the covariance; update with pairs first")
        pairs = count if num_pairs is None else num_pairs
        covariance = self.gram.total / count
        covariance.diagonal().add_(self.ridge / pairs)
        return EllipticalBonus(
            weight=self.pairs.weight,
            basis=self.pairs.basis,
            covariance=covariance,
            reward_bound=self.pairs.reward_bound,
            noise=self.noise,
            num_pairs=pairs,
            constants=constants or EllipticalConstants(),
            kappa=kappa,
        )


@dataclass(frozen=True)
class EllipticalBonus(LinearizedBonus):
    """PPKL Eq. 10. weight (d,), basis V (d, k), covariance Σ + (λ/n)I (k, k): float64. ValueError for a covariance that
    cannot be inverted, or an unbounded reward (the bound has no e^{B/2} then).
    """

    weight: Tensor
    basis: FeatureBasis
    covariance: Tensor
    reward_bound: float | None
    noise: LabelNoise
    num_pairs: int
    constants: EllipticalConstants
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_kappa(self.kappa)
        bound = check_reward_bound(self.reward_bound)
        if bound is None:
            raise ValueError("the elliptical bonus needs a reward_bound: its constant is e^(B/2)")
        width = self.constants.width(self.noise, bound, self.num_pairs, self.basis.num_components)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "_factor", definite_factor(self.covariance, "covariance"))

    def bonus(self, g_centred: Tensor) -> Tensor:
        """κ · width · √(g̃ᵀ Σ⁻¹ g̃), (B, d) -> (B,) float64."""
        factor: Tensor = self._factor  # type: ignore[attr-defined]
        width: float = self.width  # type: ignore[attr-defined]
        coordinates = self.basis.coordinates(g_centred)
        whitened = torch.linalg.solve_triangular(factor.to(coordinates.device), coordinates.T, upper=False)
        return self.kappa * width * torch.linalg.vector_norm(whitened, dim=0)
