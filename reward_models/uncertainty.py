"""How uncertain an estimated reward is: the bonus Γ, for pessimism (r̄ − Γ) offline and optimism (r̄ + b) online.

A per-prompt shift of the reward never matters to a policy, so uncertainty is that of r(s, a) − E_{a'~μ} r(s, a'), with
μ the reference policy: every bonus is centred by reference completions. Without centring a bonus measures the ridge.

`FisherBonus` is Γ = κ √(g̃ᵀ H⁻¹ g̃), g = ∂r/∂w = r'(u) φ, g̃ = g − mean_k g(s, a_k), H = Σ_i ω_i δg_i δg_iᵀ + λI with
ω the expected information of the privatised labels: the posterior standard deviation of the centred reward under the
fit's own penalty.

About subspaces. A fit in a `FeatureBasis` V writes w = Vθ and penalises (λ/2)‖θ‖². Its posterior for w is V H_sub⁻¹ Vᵀ:
Γ² = (Vᵀg̃)ᵀ H_sub⁻¹ (Vᵀg̃). With a square V this equals g̃ᵀH⁻¹g̃ for H = V⁻ᵀ H_sub V⁻¹, the penalty being λ‖V⁻¹w‖².
With fewer components the fit holds w at exactly 0 across the dropped directions, so no variance is claimed there: the
bonus is that of the penalised fit, neither more nor less. Whoever wants doubt in every direction fits with
`num_components=None`; `outside_share` tells how much of a batch of features the fit cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from scipy.linalg.lapack import dpocon
from torch import Tensor, nn

from reward_models.basis import FeatureBasis, identity_basis
from reward_models.bound import bound_slope, bounded_reward, check_reward_bound
from reward_models.linear import LinearFit
from reward_models.losses import check_epsilon, fisher_weight

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


class Uncertainty(Protocol):
    """A reward with a bonus from last-layer features."""

    def score(self, features: Tensor, reference_features: Tensor) -> RewardScore:
        """features (B, d), reference_features (B, K, d): K completions of the same prompts from the reference
        policy.
        """
        ...


class FisherAccumulator:
    """Streams Σ ω_i δg_i δg_iᵀ over batches of pairs, in float64, at a fixed weight w.

    Use it after LoRA or full training, or for data too large for memory. Several processes each `update` with their own
    pairs and then `all_reduce` once.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        epsilon: float,
        ridge: float,
        reward_bound: float | None = None,
        basis: FeatureBasis | None = None,
    ) -> None:
        if not 0.0 < ridge < float("inf"):
            raise ValueError(f"ridge must be a finite number above 0, not {ridge!r}")
        self.weight = weight.detach().to(torch.float64)
        self.basis = identity_basis(len(weight)) if basis is None else basis
        self.epsilon = check_epsilon(epsilon, allow_zero=False)
        self.ridge = float(ridge)
        self.reward_bound = check_reward_bound(reward_bound)
        size = self.basis.num_components
        self._gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
        self._count = torch.zeros((), dtype=torch.float64, device=weight.device)

    @property
    def num_pairs(self) -> int:
        """Pairs seen (by all processes, after `all_reduce`)."""
        return int(self._count)

    def update(self, phi_a: Tensor, phi_b: Tensor) -> None:
        """Add pairs, features (B, d) each, any float dtype. The order within a pair does not matter, nor does its
        label.
        """
        phi_a, phi_b = phi_a.detach().to(torch.float64), phi_b.detach().to(torch.float64)
        if phi_a.shape != phi_b.shape or phi_a.ndim != 2 or phi_a.shape[1] != len(self.weight):
            raise ValueError(
                f"features have shapes {tuple(phi_a.shape)} and {tuple(phi_b.shape)}, not (B, {len(self.weight)}) twice"
            )
        raw_a, raw_b = phi_a @ self.weight, phi_b @ self.weight
        margin = bounded_reward(raw_a, self.reward_bound) - bounded_reward(raw_b, self.reward_bound)
        slope_a, slope_b = bound_slope(raw_a, self.reward_bound), bound_slope(raw_b, self.reward_bound)
        difference = self.basis.coordinates(slope_a[:, None] * phi_a - slope_b[:, None] * phi_b)
        scaled = difference * fisher_weight(margin, self.epsilon).sqrt()[:, None]
        self._gram += scaled.T @ scaled
        self._count += len(phi_a)

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Add up over processes; `reduce_sum` maps a tensor to its sum over them (accelerator.reduce with "sum",
        say).
        """
        self._gram = reduce_sum(self._gram)
        self._count = reduce_sum(self._count)

    def bonus(self, kappa: float = 1.0) -> FisherBonus:
        """The finished statistics."""
        penalty = self.ridge * torch.eye(len(self._gram), dtype=torch.float64, device=self._gram.device)
        return FisherBonus(
            weight=self.weight,
            basis=self.basis,
            information=self._gram + penalty,
            reward_bound=self.reward_bound,
            kappa=kappa,
        )


@dataclass(frozen=True)
class FisherBonus:
    """Γ = κ √(g̃ᵀ H⁻¹ g̃). weight (d,), basis V (d, k), information H (k, k): all float64. ValueError if H is
    unusable.
    """

    weight: Tensor
    basis: FeatureBasis
    information: Tensor
    reward_bound: float | None
    kappa: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.kappa < float("inf"):
            raise ValueError(f"kappa must be a finite number of at least 0, not {self.kappa!r}")
        factor, info = torch.linalg.cholesky_ex(self.information)
        remedy = "use a larger ridge or fewer components"
        if int(info) != 0 or not bool(torch.isfinite(factor).all()):
            raise ValueError(f"the information matrix is not positive definite; {remedy}")
        norm = float(torch.linalg.matrix_norm(self.information, 1))
        reciprocal, _ = dpocon(factor.cpu().numpy(), norm, uplo="L")
        if reciprocal * MAX_CONDITION < 1.0:
            raise ValueError(f"the information matrix has condition {1.0 / max(reciprocal, 1e-300):.1e}; {remedy}")
        object.__setattr__(self, "_factor", factor)

    @classmethod
    def from_fit(cls, fit: LinearFit, kappa: float = 1.0) -> FisherBonus:
        """The bonus of a linear fit, in the fit's own basis and with its own ridge."""
        return cls(fit.weight, fit.basis, fit.information, fit.reward_bound, kappa)

    def gradient(self, features: Tensor) -> Tensor:
        """g = r'(w·φ) φ, (..., d) -> (..., d) float64."""
        features = features.detach().to(torch.float64)
        weight = self.weight.to(features.device)
        return bound_slope(features @ weight, self.reward_bound)[..., None] * features

    def reference_gradient(self, reference_features: Tensor) -> Tensor:
        """mean_k g(s, a_k), (B, K, d) -> (B, d) float64: depends on the prompt alone, so it can be kept."""
        if reference_features.ndim != 3 or reference_features.shape[1] == 0:
            raise ValueError(f"reference_features must be (B, K, d) with K >= 1, not {tuple(reference_features.shape)}")
        return self.gradient(reference_features).mean(1)

    def bonus(self, g_centred: Tensor) -> Tensor:
        """κ √(g̃ᵀ H⁻¹ g̃), (B, d) -> (B,) float64."""
        factor: Tensor = self._factor  # type: ignore[attr-defined]
        coordinates = self.basis.coordinates(g_centred)
        whitened = torch.linalg.solve_triangular(factor.to(coordinates.device), coordinates.T, upper=False)
        return self.kappa * torch.linalg.vector_norm(whitened, dim=0)

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

    def outside_share(self, g_centred: Tensor) -> float:
        """Share of ‖g̃‖² across the directions that the basis dropped, in [0, 1]: what the fit cannot see, (B, d)."""
        orthonormal, _ = torch.linalg.qr(self.basis.matrix)
        gradient = g_centred.to(torch.float64)
        total = float(gradient.square().sum())
        inside = float((gradient @ orthonormal.to(gradient.device)).square().sum())
        return max(0.0, 1.0 - inside / total) if total > 0 else 0.0


def has_dropout(model: nn.Module) -> bool:
    """Whether any dropout in the model is active in training mode (layers, or rates that only the config carries)."""
    if any(module.p > 0 for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config = getattr(model, "config", None)
    rates = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    return any(
        isinstance(rate, float) and rate > 0
        for name, rate in rates.items()
        if "dropout" in name or name.endswith("pdrop")
    )


class McDropout:
    """Spread of a score over dropout masks: Γ = κ · standard deviation over `samples` stochastic passes.

    Refused (ValueError) on a model without dropout, such as the Llama family, where it would be exactly 0. It is not
    centred by references: a mask cannot be shared between a completion and its references.
    """

    def __init__(self, model: nn.Module, *, samples: int = 10, kappa: float = 1.0) -> None:
        if not has_dropout(model):
            raise ValueError(
                f"{type(model).__name__} has no active dropout, so the MC-dropout bonus would be 0 everywhere; "
                "use the fisher bonus instead"
            )
        if samples < 2:
            raise ValueError(f"samples must be at least 2, not {samples}")
        self.model, self.samples, self.kappa = model, samples, kappa

    @torch.no_grad()
    def score_with(self, score: Callable[[], Tensor]) -> RewardScore:
        """Call `score` () -> (B,) repeatedly in training mode; mean and κ · standard deviation. The mode is
        restored.
        """
        training = self.model.training
        self.model.train()
        try:
            draws = torch.stack([score().float() for _ in range(self.samples)])
        finally:
            self.model.train(training)
        return RewardScore(draws.mean(0), self.kappa * draws.std(0))
