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
from private_rlhf.reward_models.basis import FeatureArray
from private_rlhf.reward_models.bound import bounded_reward
from private_rlhf.reward_models.linear import LinearFit, minimize, pair_problem
from private_rlhf.reward_models.spread import ALONE, Spread
from private_rlhf.reward_models.uncertainty import CentredBonus
from torch import Tensor


@dataclass(frozen=True)
class EnsembleBonus(CentredBonus):
    """weight w (d,) of the reward itself, heads (H, d), both float64. ValueError for fewer than two heads."""

    weight: Tensor
    heads: Tensor
    reward_bound: float | None
    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads.ndim != 2 or len(self.heads) < 2 or self.heads.shape[1] != len(self.weight):
            raise ValueError(
                f"heads must be (H, {len(self.weight)}) with H of at least 2, got {tuple(self.heads.shape)}"
            )
        if not bool(torch.isfinite(self.heads).all()):
            raise ValueError("a head of the ensemble holds a non-finite weight; the fit failed")

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
    tolerance: float = 1e-4,
    numbers: Tensor | None = None,
    spread: Spread = ALONE,
) -> EnsembleBonus:
    """`num_heads` heads beside a `fit` to the same pairs, each started at its θ; deterministic in `seed`.

    `tolerance` is the Newton decrement in nats at which a head is done. With a `spread` each process brings the pairs
    that it holds, and says by `numbers` (m,) which of all pairs 0, 1, … they are. ValueError for fewer than two heads
    or a ridge of 0, which stands for no prior.
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
        theta, _ = minimize(problem.rows(rows), fit.ridge, fit.theta, anchor=anchor, tolerance=tolerance)
        heads.append(fit.basis.weight(theta))
    return EnsembleBonus(fit.weight, torch.stack(heads), fit.reward_bound, kappa)
