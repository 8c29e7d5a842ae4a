"""Monte-Carlo dropout: Γ = κ · the standard deviation of the reward over dropout masks.

What the reference code of the PPKL paper does. On a model without dropout, such as the whole Llama family, its Γ is
exactly 0 and pessimism does nothing: such a model is refused. It is not centred by references either, because a mask
belongs to the positions of one text and cannot be shared with another; so it also measures doubt about a prompt's
common shift, which no policy depends on. Prefer `FisherBonus`; this one is here to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from private_rlhf.lm.rows import Rows
from private_rlhf.reward_models.bound import bounded_reward
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.uncertainty import CentredBonus
from torch import Tensor, nn


def has_dropout(model: nn.Module) -> bool:
    """True where any dropout is active in training mode: layers, or rates that only the config carries (those of
    summary and classification heads apart: a head without bias uses none).
    """
    if any(module.p > 0 for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config: Any = getattr(model, "config", None)
    return any(
        isinstance(rate, float) and rate > 0
        for name, rate in (config.to_dict() if config is not None else {}).items()
        if ("dropout" in name or name.endswith("pdrop")) and not name.startswith(("summary", "classifier"))
    )


def check_dropout(model: nn.Module) -> None:
    """ValueError for a model without active dropout."""
    if not has_dropout(model):
        raise ValueError(
            f"{type(model).__name__} has no active dropout, so the MC-dropout bonus would be 0 everywhere; "
            "use the fisher bonus instead"
        )


class DropoutRewardModel(RewardModel):
    """A reward model whose `features` are (B, d + S) float32: φ without dropout, then S raw scores under dropout.

    The draws are a function of `seed` and of the batch (masks are drawn for padded positions too); the global random
    state stays as it was. ValueError for a model without dropout.
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
        return torch.cat([read(), self._draws(read)], dim=-1)

    @torch.no_grad()
    def _draws(self, read: Callable[[], Tensor]) -> Tensor:
        device, training = self.weight.device, self.model.training
        self.model.train()
        try:
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(self.seed)
                stochastic = [read() for _ in range(self.samples)]
        finally:
            self.model.train(training)
        return torch.stack([super(DropoutRewardModel, self).raw_score_of(draw) for draw in stochastic], dim=-1)

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
            raise ValueError(
                f"features must be (B, {len(self.weight)} + {self.samples} draws), got {tuple(features.shape)}: "
                "compute them with DropoutRewardModel"
            )
        return self.kappa * bounded_reward(features[:, len(self.weight) :], self.reward_bound).std(-1)
