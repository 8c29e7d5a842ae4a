"""Other uncertainties: the sandwich is the Fisher covariance where the likelihood is right, and counts copies once."""

from __future__ import annotations

import torch
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf_lab.benches import gamma_variants as bench


def fitted(copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sandwich, inverse information) of 6,000 labels at ε = 2, each there `copies` times in one cluster."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 3, generator=generator, dtype=torch.float64)
    coins = torch.rand(2, 6000, generator=generator, dtype=torch.float64)
    label = torch.where(coins[0] < torch.sigmoid(x @ torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)), 1.0, -1.0)
    kept = torch.where(coins[1] < 0.8807970779778823, label, -label)  # e²/(1 + e²)
    chosen = (x * kept[:, None] / 2).repeat_interleave(copies, dim=0)
    fit = fit_linear(chosen, -chosen, torch.ones(len(chosen)), 2.0, ridge=1e-6)
    clusters = torch.arange(6000).repeat_interleave(copies)
    return bench.sandwich(fit, chosen, -chosen, clusters), torch.linalg.inv(fit.information)


def test_the_sandwich_is_the_fisher_covariance_of_independent_labels_and_counts_copies_once() -> None:
    """Relative error of 6,000 squared scores: about 2 %."""
    once, fisher = fitted(1)
    assert torch.allclose(once.diagonal(), fisher.diagonal(), rtol=0.1)
    twice, flattered = fitted(2)
    assert torch.allclose(twice, once, rtol=1e-3, atol=1e-9)
    assert torch.allclose(flattered.diagonal(), fisher.diagonal() / 2, rtol=1e-3)
