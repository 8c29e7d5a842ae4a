"""Losses over groups of answers to one prompt, for draws of any policy; they are least at the Gibbs policy.

With β = kl_coef and the log-ratio l = log(π/π_ref) of an answer, the Gibbs policy has r̂/β − l constant over a prompt's
answers. Each loss takes the log-ratios (G, K) of K answers to each of G prompts and their `utilities` (G, K), and
returns a mean. The two likelihoods need draws of π_ref.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from private_rlhf.rl.regression import variance_loss
from torch import Tensor
from torch.nn.functional import logsigmoid


def utilities(score: Tensor, kl_coef: float) -> Tensor:
    """Return r̂/β, shifted so that its exponential has mean 1 over all draws of a prompt; score (…, N)."""
    utility = score / kl_coef
    return utility - utility.logsumexp(-1, keepdim=True) + math.log(score.shape[-1])


def variance(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return half the variance of r̂/β − l within a group (GVPO, VarGrad); REBEL over all pairs has this gradient."""
    groups = torch.arange(len(utility), device=utility.device).repeat_interleave(utility.shape[1])
    return variance_loss(log_ratio.flatten(), utility.flatten(), 1.0, groups) / utility.numel()


def huber(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return `variance` with residuals beyond a nat counted linearly (gvpo.huber_delta = 1)."""
    groups = torch.arange(len(utility), device=utility.device).repeat_interleave(utility.shape[1])
    return variance_loss(log_ratio.flatten(), utility.flatten(), 1.0, groups, huber_delta=1.0) / utility.numel()


def listwise(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return the cross-entropy of softmax(l) against softmax(r̂/β) over a group."""
    return -(utility.softmax(dim=1) * log_ratio.log_softmax(dim=1)).sum(dim=1).mean()


def weighted(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return −Σ w·log π with w = exp(utility)/K: the likelihood of the Gibbs policy's answers."""
    return -(utility.exp() * log_ratio).mean()


def centred(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return a loss with gradient −Σ (w − e^l/K)·∇ log π: weighted likelihood with a baseline; e^l is cut at 20."""
    return -((utility.exp() - log_ratio.detach().exp().clamp_max(20.0)) * log_ratio).mean()


def rebel(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return the mean squared difference of r̂/β − l over disjoint pairs (REBEL)."""
    residual = utility - log_ratio
    return (residual[:, 0::2] - residual[:, 1::2]).square().mean()


def soft_dpo(log_ratio: Tensor, utility: Tensor) -> Tensor:
    """Return DPO's loss over disjoint pairs with the preference probabilities of r̂/β as labels."""
    margin, gap = (values[:, 0::2] - values[:, 1::2] for values in (log_ratio, utility))
    prefers = gap.sigmoid()
    return -(prefers * logsigmoid(margin) + (1 - prefers) * logsigmoid(-margin)).mean()


def prefix_variance(log_ratio: Tensor, values: Sequence[Tensor], size: int) -> Tensor:
    """Return half the variance of V − l over all prefixes of a prompt's answers, which the Gibbs policy has at 0 too.

    V is the expected utility of an answer after each of its tokens. The whole answer weighs 1, its prefixes 1 together.

    Args:
        log_ratio: (B, C) log(π/π_ref) by token, right-padded; carries the gradient.
        values: B of (T,) float32, V after each token; T ≥ 1.
        size: answers in a group, which stand together.
    """
    total = log_ratio.new_zeros(())
    for start in range(0, len(values), size):
        group = range(start, start + size)
        residual = torch.cat([values[i] - log_ratio[i, : len(values[i])].cumsum(0) for i in group])
        weight = torch.cat([_prefix_weights(len(values[i])) for i in group])
        mean = (weight * residual).sum() / weight.sum()
        total = total + 0.5 * (weight * (residual - mean).square()).sum()
    return total / len(values)


def _prefix_weights(count: int) -> Tensor:
    return torch.cat([torch.full((count - 1,), 1 / max(1, count - 1)), torch.ones(1)])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "variance": variance,
    "listwise": listwise,
    "weighted": weighted,
    "centred": centred,
    "rebel": rebel,
    "soft_dpo": soft_dpo,
}
