"""The uncertainty of an estimated reward: the bonus Γ, for pessimism (r̄ − Γ) offline and optimism (r̄ + b) online.

A per-prompt shift of the reward never matters to a policy, so uncertainty is that of r(s, a) − E_{a'~μ} r(s, a'), with
μ the reference policy: every bonus is centred by reference completions. Without centring a bonus measures the ridge.

Every kind is a `CentredBonus`, used with either sign. The default is Fisher: Γ = κ √(g̃ᵀ H⁻¹ g̃), g = ∂r/∂w = r'(u) φ,
g̃ = g − mean_k g(s, a_k), H = Σ_i ω_i δg_i δg_iᵀ + λI with ω the expected information of the privatised labels: the
posterior standard deviation of the centred reward under the penalty of the fit.

A fit in a `FeatureBasis` V writes w = Vθ and penalises (λ/2)‖θ‖². Its posterior for w is V H_sub⁻¹ Vᵀ, so that
Γ² = (Vᵀg̃)ᵀ H_sub⁻¹ (Vᵀg̃). The fit holds w at exactly 0 across directions that V drops, and no variance is claimed
there. Doubt in every direction takes `num_components=None`.

The paper's bonus for the linear class (PPKL Eq. 10), with its constants exposed, is

    Γ = κ √c · e^{B/2}/(2α−1) · √( φ̃ᵀ Σ⁻¹ φ̃ · ( log(N(τ)/δ)/n + τ ) )

Rewards lie in an interval of width B. D²_F of Definition 3.2, read with the reward centred per prompt, is φ̃ᵀΣ⁻¹φ̃ with
φ̃ = φ(s, a) − E_{a'~μ} φ(s, a') and Σ = E_s Var_{a'~μ} φ(s, a'): a mean per sample, not the sum over the data (n stands
in the other factor). A bounded reward is linearised at the fit, so that g takes the place of φ. Σ comes from pairs
whose responses were both drawn from μ, where E[½ δφ δφᵀ] = Σ. A ridge λ of a fit to n pairs is λ/n per sample, and
Σ + (λ/n)I is what is inverted. N(τ) = (1/τ)^k for k coordinates (the paper's choice for the linear class), τ = 1/n and
c = 1 by default: an upper bound and not an estimate. e^{B/2} is 148 at B = 10; at B = 1 √c near 0.1 gives a useful Γ.

An ensemble of heads measures the standard deviation of the centred reward over fits to bootstrap samples of the pairs.
A plain bootstrap under a ridge shrinks to 0 where data are few, just where Γ should be largest. So the penalty of head
k is (λ/2)‖θ − θ_k⁰‖² with a θ_k⁰ ~ N(0, I/λ) of its own, a draw from the prior that the ridge stands for. To first
order, Var θ_k = H⁻¹JH⁻¹ + λH⁻² with J the information of the labels and H = J + λI, which is H⁻¹: Fisher's, without its
Gaussian approximation.

Monte-Carlo dropout is what the reference code of the PPKL paper does: the standard deviation over dropout masks. On a
model without dropout, such as the Llama family, it is exactly 0: such a model is refused. A mask belongs to the
positions of one text, so nothing is centred, and doubt about a prompt's common shift is measured too. Prefer Fisher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.lm.rows import Rows
from private_rlhf.reward_models.basis import ALONE, FeatureArray, FeatureBasis, Spread
from private_rlhf.reward_models.linear import LinearFit, minimize, pair_problem
from private_rlhf.reward_models.losses import bound_slope, bounded_reward, check_reward_bound
from private_rlhf.reward_models.model import RewardModel
from scipy.linalg.lapack import dpocon
from torch import Tensor, nn

MAX_CONDITION = 1e14
BLOCK = 1024


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
    """A reward with its bonus, from the features (B, f) that its reward model gives for a text.

    `weight` w (d,), `reward_bound` B and `kappa` κ ≥ 0 identify the model. A kind defines `quantity` and `deviation`.
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
            raise ValueError(f"reference_features must be (B, K >= 1, d), got {tuple(reference_features.shape)}")
        return self.quantity(reference_features.detach().double()).mean(1)

    def score_centred(self, features: Tensor, reference_gradient: Tensor) -> RewardScore:
        """`score` with the result of `reference_gradient` (B, m) given; the reward is r̄(s, a), not centred. float32."""
        features = features.detach().double()
        quantity = self.quantity(features)
        if quantity.shape != reference_gradient.shape:
            shapes = f"{tuple(quantity.shape)} and {tuple(reference_gradient.shape)}"
            raise ValueError(f"features and reference must belong to the same prompts, got {shapes}")
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
        """Γ (B,) float64 of g̃ (B, d), whatever the features."""
        coordinates = self.basis.coordinates(centred)
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

    ValueError for a matrix that is not positive definite, or whose condition in the 1-norm (LAPACK's estimate from the
    factor) exceeds `MAX_CONDITION`: beyond it a float64 solve has no digit left.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"the {name} matrix is not positive definite, it is not finite: check the features")
    factor, info = torch.linalg.cholesky_ex(matrix)
    where = f"not positive definite (at row {int(info)} of {len(matrix)})" if int(info) else ""
    if not where:
        norm = float(torch.linalg.matrix_norm(matrix, 1))
        reciprocal, _ = dpocon(factor.cpu().numpy(), norm, uplo="L")
        if reciprocal * MAX_CONDITION < 1.0:
            where = f"of condition {1.0 / max(reciprocal, 1e-300):.1e}"
    if where:
        raise ValueError(f"the {name} matrix is {where}: use a larger ridge or fewer components")
    return factor


@dataclass(frozen=True)
class EllipticalConstants:
    """`c` > 0; `delta` in (0, 1), the probability of failure; `tau` in (0, 1) of the covering (None: 1/n);
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
    cannot be inverted, or an unbounded reward.
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
            raise ValueError("reward_bound must be a number, got None: the constant of the elliptical bonus is e^(B/2)")
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

    ValueError as for `EllipticalBonus`, and without pairs.
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


@dataclass(frozen=True)
class EnsembleBonus(CentredBonus):
    """weight w (d,) of the reward itself, heads (H ≥ 2, d), both float64."""

    weight: Tensor
    heads: Tensor
    reward_bound: float | None
    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads.ndim != 2 or len(self.heads) < 2 or self.heads.shape[1] != len(self.weight):
            raise ValueError(f"heads must be (at least 2, {len(self.weight)}), got {tuple(self.heads.shape)}")
        if not bool(torch.isfinite(self.heads).all()):
            raise ValueError("heads must be finite, got a weight that is not: the fit failed")

    def quantity(self, features: Tensor) -> Tensor:
        """The reward by each head, (..., d) -> (..., H)."""
        return bounded_reward(features @ self.heads.to(features).T, self.reward_bound)

    def deviation(self, features: Tensor, centred: Tensor) -> Tensor:
        """κ times the standard deviation over the heads."""
        return self.kappa * centred.std(-1)


def fit_ensemble(
    fit: LinearFit,
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    *,
    num_heads: int = 8,
    seed: int = 0,
    kappa: float = 1.0,
    numbers: Tensor | None = None,
    spread: Spread = ALONE,
) -> EnsembleBonus:
    """`num_heads` heads beside a `fit` to the same pairs, each started at its θ; deterministic in `seed`.

    numbers: (m,) which of all pairs 0, 1, … this process holds. ValueError for fewer than two heads or a ridge of 0,
    which does not stand for a prior.
    """
    if num_heads < 2:
        raise ValueError(f"num_heads must be at least 2, got {num_heads}: one head has no spread")
    if not fit.ridge > 0.0:
        raise ValueError(f"ridge must be a finite number above 0, got {fit.ridge!r}")
    problem = pair_problem(phi_a, phi_b, private_label, fit.noise, fit.basis, fit.reward_bound, fit.loss, spread)
    generator, heads = torch.Generator().manual_seed(seed), []
    for _ in range(num_heads):
        drawn = torch.randint(fit.num_pairs, (fit.num_pairs,), generator=generator).bincount(minlength=fit.num_pairs)
        rows = torch.arange(len(problem)).repeat_interleave(drawn if numbers is None else drawn[numbers])
        anchor = torch.randn(len(fit.theta), dtype=torch.float64, generator=generator) / fit.ridge**0.5
        theta, _ = minimize(problem.rows(rows), fit.ridge, fit.theta, anchor=anchor, tolerance=1e-4)
        heads.append(fit.basis.weight(theta))
    return EnsembleBonus(fit.weight, torch.stack(heads), fit.reward_bound, kappa)


def check_dropout(model: nn.Module) -> None:
    """ValueError for a model in which training mode switches on no dropout: neither a layer, nor a rate that only the
    config carries (those of summary and classification heads apart: a head without bias uses none).
    """
    config: Any = getattr(model, "config", None)
    rates = [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    rates += [
        rate
        for name, rate in (config.to_dict() if config is not None else {}).items()
        if ("dropout" in name or name.endswith("pdrop")) and not name.startswith(("summary", "classifier"))
    ]
    if not any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise ValueError(
            f"{type(model).__name__} has no active dropout, so the MC-dropout bonus would be 0 everywhere: "
            "use the fisher bonus instead"
        )


class DropoutRewardModel(RewardModel):
    """A reward model whose `features` are (B, d + S) float32: φ without dropout, then S raw scores under dropout.

    The draws are a function of `seed` and of the batch; the global random state stays as it was. ValueError for a model
    without dropout.
    """

    def __init__(
        self, model: nn.Module, *, reward_bound: float | None = None, samples: int = 10, seed: int = 0
    ) -> None:
        super().__init__(model, reward_bound=reward_bound)
        check_dropout(model)
        self.samples, self.seed = samples, seed

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """φ and the draws, (B, d + S); the draws carry no gradient."""
        return self._with_draws(lambda: super(DropoutRewardModel, self).features(input_ids, attention_mask))

    def row_features(self, rows: Rows) -> Tensor:
        """The same of N sequences in rows, (N, d + S); sequences that share a prompt share its masks."""
        return self._with_draws(lambda: super(DropoutRewardModel, self).row_features(rows))

    def _with_draws(self, read: Callable[[], Tensor]) -> Tensor:
        features, device, training = read(), self.weight.device, self.model.training
        forked = torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type)
        self.model.train()
        try:
            with forked, torch.no_grad():
                torch.manual_seed(self.seed)
                draws = [super(DropoutRewardModel, self).raw_score_of(read()) for _ in range(self.samples)]
        finally:
            self.model.train(training)
        return torch.cat([features, torch.stack(draws, dim=-1)], dim=-1)

    def raw_score_of(self, features: Tensor) -> Tensor:
        """u = w·φ without dropout, (B, d + S) -> (B,) float32."""
        return super().raw_score_of(features[..., : len(self.weight)])


@dataclass(frozen=True)
class DropoutBonus(CentredBonus):
    """Reads the draws that `DropoutRewardModel.features` appends: features are (B, d + S) and nothing is centred.

    weight (d,); ValueError for fewer than two draws.
    """

    weight: Tensor
    reward_bound: float | None
    samples: int = 10
    seed: int = 0
    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, got {self.samples}")

    def quantity(self, features: Tensor) -> Tensor:
        """Nothing, (..., d + S) -> (..., 0)."""
        return features[..., :0]

    def deviation(self, features: Tensor, centred: Tensor) -> Tensor:
        """κ times the standard deviation of the bounded draws."""
        if features.shape[1] != len(self.weight) + self.samples:
            shape = f"(B, {len(self.weight)} + {self.samples} draws), got {tuple(features.shape)}"
            raise ValueError(f"features must be {shape}: compute them with DropoutRewardModel")
        return self.kappa * bounded_reward(features[:, len(self.weight) :], self.reward_bound).std(-1)
