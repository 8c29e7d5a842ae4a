"""An ensemble of heads on the same features: Γ = κ · the standard deviation of the centred reward over the heads.

Each head is the linear fit to a bootstrap sample of the pairs. A plain bootstrap under a ridge shows the noise of the
labels but not the doubt that the ridge hides: where data are few it shrinks to 0 just where the bonus should be
largest. So the penalty of head k is (λ/2)‖θ − θ_k⁰‖² with a θ_k⁰ ~ N(0, I/λ) of its own, a draw from the prior that the
ridge stands for. Then, to first order, Var θ_k = H⁻¹JH⁻¹ + λH⁻² with J the information of the labels and H = J + λI,
and that is H⁻¹: what `FisherBonus` computes in closed form, here without its Gaussian approximation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from private_rlhf.core.noise import LabelNoise, Noise
from private_rlhf.reward_models.basis import FeatureArray, FeatureBasis, as_double, count_pairs, identity_basis
from private_rlhf.reward_models.bound import bounded_reward, check_reward_bound
from private_rlhf.reward_models.linear import PairProblem, check_labels, minimize
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.spread import ALONE, Spread
from private_rlhf.reward_models.uncertainty import RewardScore, check_kappa, check_references
from torch import Tensor


@dataclass(frozen=True)
class EnsembleBonus:
    """weight w (d,) of the reward itself, heads (H, d), both float64. ValueError for fewer than two heads."""

    weight: Tensor
    heads: Tensor
    reward_bound: float | None
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_kappa(self.kappa)
        if self.heads.ndim != 2 or len(self.heads) < 2 or self.heads.shape[1] != len(self.weight):
            raise ValueError(
                f"heads must be (H, {len(self.weight)}) with H of at least 2, not {tuple(self.heads.shape)}"
            )
        if not bool(torch.isfinite(self.heads).all()):
            raise ValueError("a head of the ensemble holds a non-finite weight; the fit failed")

    def head_rewards(self, features: Tensor) -> Tensor:
        """(..., d) -> (..., H) float64."""
        heads = self.heads.to(device=features.device, dtype=torch.float64)
        return bounded_reward(features.detach().to(torch.float64) @ heads.T, self.reward_bound)

    def reference_gradient(self, reference_features: Tensor) -> Tensor:
        """Mean reward of the completions by each head, (B, K, d) -> (B, H) float64."""
        check_references(reference_features)
        return self.head_rewards(reference_features).mean(1)

    def score_centred(self, features: Tensor, reference_gradient: Tensor) -> RewardScore:
        """Like `score`, with the mean reward of the completions by each head given (B, H)."""
        if reference_gradient.shape != (len(features), len(self.heads)):
            raise ValueError(
                f"features {tuple(features.shape)} and reference {tuple(reference_gradient.shape)} must belong to the "
                "same prompts"
            )
        weight = self.weight.to(device=features.device, dtype=torch.float64)
        reward = bounded_reward(features.detach().to(torch.float64) @ weight, self.reward_bound)
        spread = (self.head_rewards(features) - reference_gradient.to(features.device)).std(-1)
        return RewardScore(reward.float(), (self.kappa * spread).float())

    def score(self, features: Tensor, reference_features: Tensor) -> RewardScore:
        """(B, d) and (B, K, d) -> reward (B,), bonus (B,), float32."""
        return self.score_centred(features, self.reference_gradient(reference_features))


def fit_ensemble(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    private_label: FeatureArray,
    noise: Noise,
    *,
    weight: Tensor,
    ridge: float,
    basis: FeatureBasis | None = None,
    start: Tensor | None = None,
    reward_bound: float | None = None,
    loss: str = "private_likelihood",
    num_heads: int = 8,
    seed: int = 0,
    kappa: float = 1.0,
    tolerance: float = 1e-4,
    numbers: Tensor | None = None,
    spread: Spread = ALONE,
) -> EnsembleBonus:
    """`num_heads` heads on pairs (φ_a, φ_b); arguments as in `fit_linear`, deterministic in `seed`.

    `weight` w (d,) is the reward's own; `start` θ (k,) is where every head starts (the fit's θ; default 0), `tolerance`
    the Newton decrement in nats at which a head is done. With a `spread` each process brings the pairs that it holds,
    and says by `numbers` (m,) which of all pairs 0, 1, … they are. ValueError for fewer than two heads or a ridge of 0,
    which stands for no prior.
    """
    noise = LabelNoise.of(noise, allow_zero=False)
    if num_heads < 2:
        raise ValueError(f"num_heads must be at least 2, not {num_heads}: one head has no spread")
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be a finite number above 0, not {ridge!r}")
    first, second = as_double(phi_a, "phi_a", 2), as_double(phi_b, "phi_b", 2)
    label = check_labels(private_label, len(first))
    basis = identity_basis(first.shape[1]) if basis is None else basis
    x_a, x_b = basis.coordinates(first), basis.coordinates(second)
    bound, chosen = check_reward_bound(reward_bound), get_loss(loss)
    generator = torch.Generator().manual_seed(seed)
    origin = torch.zeros(basis.num_components, dtype=torch.float64) if start is None else start.to(torch.float64)
    heads = []
    count = count_pairs(first, second, spread)
    for _ in range(num_heads):
        drawn = torch.randint(count, (count,), generator=generator).bincount(minlength=count)
        rows = torch.arange(len(label)).repeat_interleave(drawn if numbers is None else drawn[numbers])
        anchor = torch.randn(len(origin), dtype=torch.float64, generator=generator) / ridge**0.5
        problem = PairProblem(x_a[rows], x_b[rows], label[rows], noise, bound, chosen, spread)
        theta, _ = minimize(problem, ridge, origin, anchor=anchor, tolerance=tolerance)
        heads.append(basis.weight(theta))
    return EnsembleBonus(weight.detach().to(device="cpu", dtype=torch.float64), torch.stack(heads), bound, kappa)
