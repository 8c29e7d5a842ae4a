"""The uncertainty of an estimated reward: the bonus Γ, for pessimism (r̄ − Γ) offline and optimism (r̄ + b) online.

A shift of the reward per prompt never matters to a policy, so every kind is the uncertainty of r(s, a) − E_{a'~μ}
r(s, a'), μ the reference policy: without that centring a bonus measures the ridge.

- Fisher: Γ = κ √(g̃ᵀ H⁻¹ g̃), g = ∂r/∂w = r'(u) φ, g̃ = g − mean_k g(s, a_k), H the expected information of the private
  labels plus λI: the posterior standard deviation. A fit w = Vθ claims no variance where `FeatureBasis` V drops a
  direction.
- Elliptical, PPKL Eq. 10: Γ = κ √c · e^{B/2}/(2α−1) · √(φ̃ᵀ Σ⁻¹ φ̃ · (log(N(τ)/δ)/n + τ)), an upper bound for rewards in
  an interval of width B. Σ = E_s Var_{a'~μ} φ(s, a') + (λ/n)I, N(τ) = (1/τ)^k, and g takes the place of φ. e^{B/2} is
  148 at B = 10; at B = 1 √c near 0.1 gives a useful Γ.
- Ensemble: the standard deviation over heads fitted to bootstrap samples, each around a draw of its own from the prior
  that the ridge stands for. Without those draws it would shrink to 0 where data are few.
- Monte-Carlo dropout, as PPKL's reference code: the standard deviation over masks, not centred. Prefer Fisher.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, mean_factor
from private_rlhf.lm.rows import Rows
from private_rlhf.reward_models.basis import FeatureBasis, identity_basis
from private_rlhf.reward_models.losses import bound_slope, bounded_reward, check_reward_bound
from private_rlhf.reward_models.model import RewardModel
from scipy.linalg.lapack import dpocon
from torch import Tensor, nn

if TYPE_CHECKING:
    from private_rlhf.reward_models.linear import LinearFit

MAX_CONDITION = 1e14


class RewardScore(NamedTuple):
    """`reward` r̄ (B,) and `bonus` Γ (B,) ≥ 0, in the unit of the reward."""

    reward: Tensor
    bonus: Tensor


class CentredBonus:
    """A reward with its bonus, from the features (B, f) that its reward model gives for a text: `weight` w (d,),
    `reward_bound` B and `kappa` κ ≥ 0. A kind defines `quantity` and `deviation`."""

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
    """The lower Cholesky factor (k, k) of a symmetric matrix that is safe to invert. ValueError unless it is positive
    definite with a condition in the 1-norm (LAPACK's estimate) of at most `MAX_CONDITION`."""
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

    def width(
        self, noise: LabelNoise | LevelledNoise, reward_bound: float, num_pairs: int, num_components: int
    ) -> float:
        """√c e^{B/2}/(2α−1) √(log(N/δ)/n + τ): Γ at κ = 1 where φ̃ᵀΣ⁻¹φ̃ = 1, in the unit of the reward."""
        tau = 1.0 / num_pairs if self.tau is None else self.tau
        covering = num_components * math.log(1.0 / tau) if self.log_covering is None else self.log_covering
        rate = (covering - math.log(self.delta)) / num_pairs + tau
        return math.sqrt(self.c * rate) * math.exp(reward_bound / 2.0) / mean_factor(noise)


@dataclass(frozen=True)
class EllipticalBonus(QuadraticBonus):
    """PPKL Eq. 10. weight (d,), basis V (d, k), covariance Σ + (λ/n)I (k, k): float64. ValueError for a covariance that
    cannot be inverted, or an unbounded reward.
    """

    weight: Tensor
    basis: FeatureBasis
    covariance: Tensor
    reward_bound: float | None
    noise: LabelNoise | LevelledNoise
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


def check_dropout(model: nn.Module) -> None:
    """Refuse with a ValueError a model without dropout in training mode, in its layers or by a rate in its config.
    Summary and classification heads do not count."""
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
    """A reward model whose `row_features` are (N, d + S) float32: φ without dropout, then S raw scores under dropout, a
    function of `seed` and the batch. ValueError for a model without dropout."""

    def __init__(
        self, model: nn.Module, *, reward_bound: float | None = None, samples: int = 10, seed: int = 0
    ) -> None:
        super().__init__(model, reward_bound=reward_bound)
        check_dropout(model)
        self.samples, self.seed = samples, seed

    def row_features(self, rows: Rows) -> Tensor:
        """φ and the draws, (N, d + S), of the sequences in `rows`, of which those that share a prompt share its masks;
        the draws carry no gradient."""
        read, score = super().row_features, super().raw_score_of
        features, device, training = read(rows), self.weight.device, self.model.training
        forked = torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type)
        self.model.train()
        try:
            with forked, torch.no_grad():
                torch.manual_seed(self.seed)
                draws = [score(read(rows)) for _ in range(self.samples)]
        finally:
            self.model.train(training)
        return torch.cat([features, torch.stack(draws, dim=-1)], dim=-1)

    def raw_score_of(self, features: Tensor) -> Tensor:
        """u = w·φ without dropout, (B, d + S) -> (B,) float32."""
        return super().raw_score_of(features[..., : len(self.weight)])


@dataclass(frozen=True)
class DropoutBonus(CentredBonus):
    """Reads the draws that `DropoutRewardModel.row_features` appends to weight (d,); nothing is centred. ValueError for
    fewer than two."""

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


Bonus = FisherBonus | EllipticalBonus | EnsembleBonus | DropoutBonus
BONUS_KINDS = ("fisher", "elliptical", "ensemble", "mc_dropout")


def bonus_kind(bonus: Bonus) -> str:
    """The name of a bonus's kind."""
    return BONUS_KINDS[(FisherBonus, EllipticalBonus, EnsembleBonus, DropoutBonus).index(type(bonus))]


def bonus_tensors(bonus: Bonus) -> dict[str, Tensor]:
    """Everything but `reward_bound` and `kappa`, which the metadata holds."""
    tensors, scalars = {"weight": bonus.weight}, {}
    if isinstance(bonus, QuadraticBonus):
        tensors |= {"basis": bonus.basis.matrix, bonus.matrix_name: getattr(bonus, bonus.matrix_name)}
    if isinstance(bonus, EllipticalBonus):
        scalars = {"epsilon": bonus.noise.epsilon, "num_pairs": bonus.num_pairs, **asdict(bonus.constants)}
    elif isinstance(bonus, EnsembleBonus):
        tensors["heads"] = bonus.heads
    elif isinstance(bonus, DropoutBonus):
        scalars = {"samples": bonus.samples, "seed": bonus.seed}
    for name, value in scalars.items():
        if value is not None:
            tensors[name] = torch.tensor(float(value), dtype=torch.float64)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def bonus_from_tensors(
    kind: str,
    tensors: dict[str, Tensor],
    reward_bound: float | None,
    kappa: float,
    noise: LabelNoise | LevelledNoise,
) -> Bonus:
    """The inverse of `bonus_tensors`, with `noise` as the metadata states it. KeyError for a missing tensor, ValueError
    for unusable statistics."""
    weight = tensors["weight"]
    if kind == "ensemble":
        return EnsembleBonus(weight, tensors["heads"], reward_bound, kappa)
    if kind == "mc_dropout":
        return DropoutBonus(weight, reward_bound, int(tensors["samples"]), int(tensors["seed"]), kappa)
    basis = FeatureBasis(tensors["basis"]) if "basis" in tensors else identity_basis(len(weight))  # of earlier versions
    if kind == "fisher":
        return FisherBonus(weight, basis, tensors["information"], reward_bound, kappa)
    names = {field.name for field in fields(EllipticalConstants)} & set(tensors)
    constants = EllipticalConstants(**{name: float(tensors[name]) for name in names})
    pairs = int(tensors["num_pairs"])
    return EllipticalBonus(weight, basis, tensors["covariance"], reward_bound, noise, pairs, constants, kappa)
