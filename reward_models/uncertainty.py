"""How uncertain an estimated reward is: the bonus Γ, for pessimism (r̄ − Γ) offline and optimism (r̄ + b) online.

A per-prompt shift of the reward never matters to a policy, so uncertainty is that of r(s, a) − E_{a'~μ} r(s, a'), with
μ the reference policy: every bonus is centred by reference completions. Without centring a bonus measures the ridge.

Every kind of bonus has the one interface `Uncertainty`: `score(features, reference_features) -> (reward, bonus)`, used
with either sign. Here the default, Fisher; `elliptical`, `ensemble` and `dropout` hold the others.

`FisherBonus` is Γ = κ √(g̃ᵀ H⁻¹ g̃), g = ∂r/∂w = r'(u) φ, g̃ = g − mean_k g(s, a_k), H = Σ_i ω_i δg_i δg_iᵀ + λI with
ω the expected information of the privatised labels: the posterior standard deviation of the centred reward under the
fit's own penalty.

About subspaces. A fit in a `FeatureBasis` V writes w = Vθ and penalises (λ/2)‖θ‖². Its posterior for w is V H_sub⁻¹ Vᵀ:
Γ² = (Vᵀg̃)ᵀ H_sub⁻¹ (Vᵀg̃). With a square V this equals g̃ᵀH⁻¹g̃ for H = V⁻ᵀ H_sub V⁻¹, the penalty being λ‖V⁻¹w‖².
With fewer components the fit holds w at exactly 0 across the dropped directions, so no variance is claimed there: the
bonus is that of the penalised fit, neither more nor less. Whoever wants doubt in every direction fits with
`num_components=None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from private_rlhf.core.noise import LabelNoise, Noise
from private_rlhf.reward_models.basis import FeatureBasis, identity_basis
from private_rlhf.reward_models.bound import bound_slope, bounded_reward, check_reward_bound
from private_rlhf.reward_models.gram import BLOCK, StreamedGram, definite_factor
from private_rlhf.reward_models.linear import LinearFit
from private_rlhf.reward_models.losses import fisher_weight
from torch import Tensor


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


class Uncertainty(Protocol):
    """A reward with a bonus, from what the reward model's `features` returns for a text: (B, f), mostly last-layer
    features.

    `weight` (d,), `reward_bound` B and `kappa` identify the model that the bonus belongs to.
    """

    @property
    def weight(self) -> Tensor: ...

    @property
    def reward_bound(self) -> float | None: ...

    @property
    def kappa(self) -> float: ...

    def score(self, features: Tensor, reference_features: Tensor) -> RewardScore:
        """features (B, f), reference_features (B, K, f): K completions of the same prompts from the reference
        policy.
        """
        ...

    def reference_gradient(self, reference_features: Tensor) -> Tensor:
        """What centring needs of the references, (B, K, f) -> (B, m): for a linearised bonus their mean gradient. It
        depends on the prompt alone, so it can be kept.
        """
        ...

    def score_centred(self, features: Tensor, reference_gradient: Tensor) -> RewardScore:
        """`score` with the result of `reference_gradient` (B, m) given."""
        ...


class LinearizedBonus:
    """What bonuses share that are a norm of the centred gradient g̃ of the reward in w."""

    weight: Tensor
    reward_bound: float | None

    def bonus(self, g_centred: Tensor) -> Tensor:
        """Γ (B,) float64 of g̃ (B, d)."""
        raise NotImplementedError

    def gradient(self, features: Tensor) -> Tensor:
        """g = r'(w·φ) φ, (..., d) -> (..., d) float64."""
        features = features.detach().to(torch.float64)
        weight = self.weight.to(features.device)
        return bound_slope(features @ weight, self.reward_bound)[..., None] * features

    def reference_gradient(self, reference_features: Tensor) -> Tensor:
        """mean_k g(s, a_k), (B, K, d) -> (B, d) float64: depends on the prompt alone, so it can be kept."""
        check_references(reference_features)
        return self.gradient(reference_features).mean(1)

    def score_centred(self, features: Tensor, reference_gradient: Tensor) -> RewardScore:
        """Like `score` with mean_k g given (B, d); the reward is r̄(s, a) itself, not centred. float32."""
        if features.shape != reference_gradient.shape:
            raise ValueError(
                f"features {tuple(features.shape)} and reference {tuple(reference_gradient.shape)} must belong to the "
                "same prompts"
            )
        weight = self.weight.to(features.device)
        reward = bounded_reward(features.detach().to(torch.float64) @ weight, self.reward_bound)
        gradient = self.gradient(features) - reference_gradient.to(features.device)
        return RewardScore(reward.float(), self.bonus(gradient).float())

    def score(self, features: Tensor, reference_features: Tensor) -> RewardScore:
        """(B, d) and (B, K, d) -> reward (B,), bonus (B,), float32. K ≥ 8 keeps the noise of the centring small."""
        return self.score_centred(features, self.reference_gradient(reference_features))


def check_references(reference_features: Tensor) -> None:
    """ValueError unless (B, K, f) with K ≥ 1."""
    if reference_features.ndim != 3 or reference_features.shape[1] == 0:
        raise ValueError(f"reference_features must be (B, K, d) with K >= 1, not {tuple(reference_features.shape)}")


def check_kappa(kappa: float) -> None:
    """ValueError unless 0 ≤ κ < ∞."""
    if not 0.0 <= kappa < float("inf"):
        raise ValueError(f"kappa must be a finite number of at least 0, not {kappa!r}")


class PairGradients:
    """δg = ∂Δ/∂w of pairs at a fixed weight w, in the coordinates of a basis: what accumulators stream."""

    def __init__(self, weight: Tensor, reward_bound: float | None, basis: FeatureBasis | None) -> None:
        self.weight = weight.detach().to(torch.float64)
        self.reward_bound = check_reward_bound(reward_bound)
        self.basis = identity_basis(len(weight)) if basis is None else basis

    def blocks(self, phi_a: Tensor, phi_b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(margin (m,), δg (m, k)) float64 of at most `BLOCK` pairs at a time; features (B, d) of any float dtype, and
        on any device. ValueError for features of the wrong shape.
        """
        if phi_a.shape != phi_b.shape or phi_a.ndim != 2 or phi_a.shape[1] != len(self.weight):
            raise ValueError(
                f"features have shapes {tuple(phi_a.shape)} and {tuple(phi_b.shape)}, not (B, {len(self.weight)}) twice"
            )
        for first, second in zip(phi_a.detach().split(BLOCK), phi_b.detach().split(BLOCK), strict=True):
            first, second = first.to(self.weight), second.to(self.weight)
            raw_a, raw_b = first @ self.weight, second @ self.weight
            margin = bounded_reward(raw_a, self.reward_bound) - bounded_reward(raw_b, self.reward_bound)
            slope_a, slope_b = bound_slope(raw_a, self.reward_bound), bound_slope(raw_b, self.reward_bound)
            yield margin, self.basis.coordinates(slope_a[:, None] * first - slope_b[:, None] * second)


class FisherAccumulator:
    """Streams Σ ω_i δg_i δg_iᵀ over batches of pairs, at a fixed weight w (`StreamedGram` has the dtypes).

    Use it after LoRA or full training, or for data too large for memory. Several processes each `update` with their own
    pairs and then `all_reduce` once.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        noise: Noise,
        ridge: float,
        reward_bound: float | None = None,
        basis: FeatureBasis | None = None,
        product_dtype: torch.dtype = torch.float64,
    ) -> None:
        if not 0.0 < ridge < float("inf"):
            raise ValueError(f"ridge must be a finite number above 0, not {ridge!r}")
        self.pairs = PairGradients(weight, reward_bound, basis)
        self.noise = LabelNoise.of(noise, allow_zero=False)
        self.ridge = float(ridge)
        self.gram = StreamedGram(self.pairs.basis.num_components, weight.device, product_dtype)

    @property
    def num_pairs(self) -> int:
        """Pairs seen (by all processes, after `all_reduce`)."""
        return int(self.gram.count)

    def update(self, phi_a: Tensor, phi_b: Tensor) -> None:
        """Add pairs, features (B, d) each, any float dtype. The order within a pair does not matter, nor does its
        label.
        """
        for margin, difference in self.pairs.blocks(phi_a, phi_b):
            self.gram.add(difference * fisher_weight(margin, self.noise).sqrt()[:, None], len(margin))

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Add up over processes; `reduce_sum` maps a tensor to its sum over them (accelerator.reduce with "sum",
        say).
        """
        self.gram.all_reduce(reduce_sum)

    def bonus(self, kappa: float = 1.0) -> FisherBonus:
        """The finished statistics."""
        information = self.gram.total.clone()
        information.diagonal().add_(self.ridge)
        return FisherBonus(
            weight=self.pairs.weight,
            basis=self.pairs.basis,
            information=information,
            reward_bound=self.pairs.reward_bound,
            kappa=kappa,
        )


@dataclass(frozen=True)
class FisherBonus(LinearizedBonus):
    """Γ = κ √(g̃ᵀ H⁻¹ g̃). weight (d,), basis V (d, k), information H (k, k): all float64. ValueError if H is
    unusable.
    """

    weight: Tensor
    basis: FeatureBasis
    information: Tensor
    reward_bound: float | None
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_kappa(self.kappa)
        object.__setattr__(self, "_factor", definite_factor(self.information, "information"))

    @classmethod
    def from_fit(cls, fit: LinearFit, kappa: float = 1.0) -> FisherBonus:
        """The bonus of a linear fit, in the fit's own basis and with its own ridge."""
        return cls(fit.weight, fit.basis, fit.information, fit.reward_bound, kappa)

    def bonus(self, g_centred: Tensor) -> Tensor:
        """κ √(g̃ᵀ H⁻¹ g̃), (B, d) -> (B,) float64."""
        factor: Tensor = self._factor  # type: ignore[attr-defined]
        coordinates = self.basis.coordinates(g_centred)
        whitened = torch.linalg.solve_triangular(factor.to(coordinates.device), coordinates.T, upper=False)
        return self.kappa * torch.linalg.vector_norm(whitened, dim=0)
