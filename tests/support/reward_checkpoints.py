"""Γ and metadata of small reward models: what the tests of checkpoints and bonuses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.lm.rows import make_rows
from private_rlhf.reward_models.basis import identity_basis
from private_rlhf.reward_models.checkpoint import RewardMetadata
from private_rlhf.reward_models.linear import pair_problem
from private_rlhf.reward_models.losses import bounded_reward
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.uncertainty import FisherBonus
from torch import Tensor

EPSILON, BOUND, RIDGE, PAIRS = 2.0, 4.0, 1.0, 50


def features(model: RewardModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """φ (N, f) of texts of token ids, each in a row of its own."""
    return model.row_features(make_rows(texts, 0, torch.device("cpu")))


def raw_scores(model: RewardModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """u (N,)."""
    return model.raw_score_of(features(model, texts))


def rewards(model: RewardModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """r(u) (N,)."""
    return bounded_reward(raw_scores(model, texts), model.reward_bound)


def metadata(**changes: Any) -> RewardMetadata:
    """Of a head that was fitted to private labels; with the statistics of `fisher_bonus` beside it."""
    fields: dict[str, Any] = {
        "noise": LabelNoise.of(EPSILON),
        "loss": "private_likelihood",
        "reward_bound": BOUND,
        "ridge": RIDGE,
        "n_pairs": PAIRS,
        "kappa": 0.5,
        "mode": "head",
        "num_layers": 2,
        "base_model": "tiny",
        "public": False,
    }
    return RewardMetadata(**fields | changes)


def fisher_bonus(weight: torch.Tensor, kappa: float = 0.5) -> FisherBonus:
    """Γ at a weight (d,), of pairs of random features."""
    basis, weight = identity_basis(len(weight)), weight.double()
    sides = torch.randn(2, PAIRS, len(weight), generator=torch.Generator().manual_seed(1))
    problem = pair_problem(*sides, torch.ones(PAIRS), EPSILON, basis, BOUND, "private_likelihood")
    return FisherBonus(weight, basis, problem.information(weight) + RIDGE * basis.matrix, BOUND, kappa)


def labelled_pairs(n: int = 400, d: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs (n, d) with labels (n,) from a known linear reward, privatised at ε = 1; all float64."""
    generator = torch.Generator().manual_seed(seed)
    phi_a, phi_b = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    margin = (phi_a - phi_b) @ torch.linspace(-0.5, 0.5, d, dtype=torch.float64)
    private = 0.5 + 0.5 * LabelNoise.of(1.0).factor * torch.tanh(margin / 2)
    label = (torch.rand(n, dtype=torch.float64, generator=generator) < private).double() * 2 - 1
    return phi_a, phi_b, label
