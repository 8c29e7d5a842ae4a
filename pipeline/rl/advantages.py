"""Per-token rewards, generalised advantage estimation and whitening, with explicit masks.

Shapes: B responses, C response tokens (right-padded). Masks are 0/1 and of the same shape as what they mask.
"""

from __future__ import annotations

import torch


def token_rewards(
    scores: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor, kl_coef: float, estimator: str
) -> torch.Tensor:
    """−kl_coef·KL̂_t on every token, and the score of the whole response on its last token.

    Args:
        scores: (B,) float32, r̂ of each response.
        log_ratio: (B, C) float32, log π(a_t) − log π_ref(a_t).
        mask: (B, C), at least one 1 per row.
        kl_coef: coefficient of KL(π‖π_ref).
        estimator: `k1` (log_ratio, unbiased) or `k3` (e^{−log_ratio} − 1 + log_ratio, non-negative).

    Returns:
        (B, C) float32, 0 where masked.
    """
    rewards = -kl_coef * kl_estimate(log_ratio, estimator) * mask
    last = mask.sum(dim=1).long() - 1
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return rewards


def kl_estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(π‖π_ref) from tokens of π (Schulman's k1 and k3), same shape as `log_ratio`.

    Raises:
        ValueError: another estimator.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"kl_estimator must be 'k1' or 'k3', got {estimator!r}")


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by GAE(λ) (Schulman et al. 2016, Eq. 16), the value after the last token being 0.

    Args:
        rewards, values, mask: (B, C).
        gamma: discount in (0, 1].
        lam: λ in [0, 1].

    Returns:
        (advantages, returns), each (B, C), 0 where masked; returns = advantages + values.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(following)
    for t in reversed(range(rewards.shape[1])):
        present = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following) * present
        next_value = values[:, t] * present
        advantages[:, t] = following
    return advantages, (advantages + values) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """`values` shifted and scaled to mean 0 and variance 1 over the unmasked entries; 0 where masked."""
    count = mask.sum().clamp_min(1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * torch.rsqrt(variance + epsilon) * mask
