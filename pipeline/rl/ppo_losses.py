"""PPO's clipped losses as sums over tokens, so that shards and micro-batches add up to the whole batch's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the unmasked tokens of a micro-batch; divide by the global token count for means."""

    loss: torch.Tensor
    clipped: torch.Tensor
    approx_kl: torch.Tensor


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_range: float,
) -> PolicyLoss:
    """−min(ρA, clip(ρ, 1−c, 1+c)A) summed over tokens (Schulman et al. 2017, Eq. 7), ρ = π/π_old.

    All inputs (B, C); `approx_kl` sums the k3 estimate of KL(π_old‖π).
    """
    log_ratio = (logprobs - old_logprobs) * mask
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    return PolicyLoss(
        loss=-(torch.minimum(unclipped, clipped) * mask).sum(),
        clipped=(((ratio - 1).abs() > clip_range) * mask).sum().detach(),
        approx_kl=((ratio - 1 - log_ratio) * mask).sum().detach(),
    )


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """½·max((V−R)², (clip(V, V_old ± c)−R)²) summed over tokens; all inputs (B, C)."""
    bounded = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * (torch.maximum((values - returns).square(), (bounded - returns).square()) * mask).sum()
