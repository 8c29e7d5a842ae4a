"""The formulas of PPO: rewards and advantages of tokens, clipped losses, and the coefficient of the KL penalty.

Losses are sums over tokens, so that shards and micro-batches add up to the whole batch's loss.
Shapes: B responses, C response tokens (right-padded); masks are 0/1 and of the shape of what they mask.
"""

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


@dataclass
class KlController:
    """Proportional control of log kl_coef (Ziegler et al. 2019, section 2.2); fixed when `target` is None.

    It sets the penalty that PPO learns from. J, in history, evaluation and report, is always taken at ppo.kl_coef.

    Attributes:
        value: current coefficient, kept in [lower, upper].
        target: nats per response, or None.
        horizon: responses over which an error of 20 % changes the coefficient by about 20 %.
    """

    value: float
    target: float | None
    horizon: int
    lower: float = 1e-4
    upper: float = 1e3

    def update(self, mean_kl: float, responses: int) -> None:
        """Adapts to the mean KL (nats) of `responses` fresh rollouts."""
        if self.target is None:
            return
        error = min(max(mean_kl / self.target - 1.0, -0.2), 0.2)
        self.value = min(max(self.value * (1.0 + error * responses / self.horizon), self.lower), self.upper)
