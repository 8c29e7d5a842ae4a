"""Losses that regress log(π/π_ref) on r̂/kl_coef over the answers to each prompt, whoever drew them.

The Gibbs policy π ∝ π_ref·exp(r̂/kl_coef) is the policy whose residual r̂/kl_coef − log(π/π_ref) is one constant per
prompt, its log-normaliser. So the residual's variance over the answers to a prompt is 0 there, and nowhere besides if
the sampler draws every answer that π_ref can draw (VarGrad, Richter et al. 2020; GVPO, arXiv 2504.19599; trajectory
balance, arXiv 2503.18929).
"""

from __future__ import annotations

import torch
from torch.nn.functional import huber_loss


def variance_loss(
    log_ratios: torch.Tensor,
    scores: torch.Tensor,
    kl_coef: float,
    groups: torch.Tensor,
    weights: torch.Tensor | None = None,
    huber_delta: float | None = None,
) -> torch.Tensor:
    """Half the squared residual, centred within each group and summed over answers, without small-sample bias.

    Divided by B it is half the unbiased variance of a group, and on answers of π itself kl_coef times its gradient is
    RLOO's. A group of one answer adds 0.

    Args:
        log_ratios: (B,) float, log π(y|x) − log π_ref(y|x) of whole answers, nats; carries the gradient.
        scores: (B,) float, r̂.
        kl_coef: coefficient of KL(π‖π_ref) in J, > 0.
        groups: (B,) int64 in [0, B); answers with the same number answer the same prompt. A group lies whole in a call.
        weights: (B,) float ≥ 0 without gradient, as from `importance_weights`; default 1.
        huber_delta: nats, > 0; residuals beyond it count linearly (Huber). None: squares.

    Returns:
        () float, nats².
    """
    residuals = scores / kl_coef - log_ratios
    weights = torch.ones_like(residuals) if weights is None else weights

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values).index_add(0, groups, values)  # no more groups than answers

    weight = total(weights).clamp_min(torch.finfo(weights.dtype).tiny)
    centred = residuals - (total(weights * residuals) / weight)[groups]
    # The mean is of the same answers: 1 − Σw²/(Σw)², that is (G − 1)/G under equal weights, of the variance remains.
    share = 1 - total(weights.square()) / weight.square()
    correction = torch.where(share > 1e-6, 1 / share.clamp_min(1e-6), torch.zeros_like(share))
    zero = torch.zeros_like(centred)
    loss = 0.5 * centred.square() if huber_delta is None else huber_loss(centred, zero, "none", huber_delta)
    return (correction[groups] * weights * loss).sum()


@torch.no_grad()
def importance_weights(
    logprobs: torch.Tensor, drawn_logprobs: torch.Tensor, ages: torch.Tensor, max_age: int | None, clip: float
) -> torch.Tensor:
    """min(π/π_drawn, clip) of answers older than `max_age`, and 1 of the others.

    The optimum is the same under all positive weights; these bring the gradient of old answers closer to J's.

    Args:
        logprobs: (B,) log π(y|x), nats.
        drawn_logprobs: (B,) log-probability under the policy that drew the answer, nats.
        ages: (B,) int64, rounds of sampling since it was drawn.
        max_age: rounds; None: all weights are 1.
        clip: largest weight, > 0.

    Returns:
        (B,) float in [0, max(1, clip)].
    """
    if max_age is None:
        return torch.ones_like(logprobs)
    return torch.where(ages > max_age, (logprobs - drawn_logprobs).exp().clamp(max=clip), torch.ones_like(logprobs))
