"""Strategies that choose the pairs to ask, behind one interface; each sees only released answers.

`choose(strategy, posterior, x, pairs, questions, …)` gets the candidates' coordinates x (M, N, k), N draws of π_ref for
each of M prompts, and names `questions` of their open pairs, which it closes: each pair is asked once, since a second
draw about it would cost another ε. The designs look at many pairs of the whole pool and take the best of them one by
one, counting those already taken as answered; the others draw prompts evenly and two answers to each.

    passive   both answers from π_ref
    pokl      a¹ ~ π¹, a² ∝ π¹·exp(b/kl_coef) (POKL Algorithm 2, steps 3 and 10)
    mixture   a¹ ~ π¹, a² ~ (1−γ)π¹ + γ·π_ref, γ = min(1, m/((2α−1)²t)), t questions so far
    duel      the open pair of the highest sum of r̄ + b
    fisher    D-optimal: the largest log det of the information of the *privatised* answers (compare arXiv 2502.04354)
    policy    V-optimal for J: the smallest variance of r̄ among the answers of the Gibbs policy

For `policy`: to second order J(π*) − J(π̄) = Σ_s Var_π(r̄ − r*)/(2·kl_coef), so the expected loss is
tr(H⁻¹Σ)/(2·kl_coef) with Σ = E_s Cov_π(g), π = π¹ and g = ∂r̄/∂θ. A pair of information ω lowers it by ω‖Σ^½H⁻¹δg‖²/(1
+ ω δgᵀH⁻¹δg).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from private_rlhf.online.pool import OpenPairs
from private_rlhf.online.posterior import Posterior
from private_rlhf.reward_models.losses import fisher_weight
from torch import Tensor

Strategy = Literal["passive", "pokl", "mixture", "duel", "fisher", "policy"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DESIGNS: tuple[Strategy, ...] = ("fisher", "policy")
PAIRS_LOOKED_AT = 8192
"""By a design, at most and at random."""


def choose(
    strategy: Strategy,
    posterior: Posterior,
    x: Tensor,
    pairs: OpenPairs,
    questions: int,
    generator: torch.Generator,
    *,
    asked: float = 0,
    kappa: float = 1.0,
    mixture: float = 100.0,
    log_ratio: Tensor | float = 0.0,
) -> Tensor:
    """Pairs to ask, (questions, 3) int64: prompt, one answer, another; closed in `pairs`. asked: questions so far, as
    `Learner.worth`. mixture: m. log_ratio: as in `Posterior.policy`, where the candidates are another policy's.

    ValueError where fewer pairs are open, or a design looks at fewer.
    """
    if questions > (most := min(len(pairs), PAIRS_LOOKED_AT) if strategy in DESIGNS else len(pairs)):
        raise ValueError(f"there are {most} pairs for {questions} questions")
    if strategy in DESIGNS:
        listed = pairs.listed()
        listed = listed[torch.randperm(len(listed), generator=generator)[:PAIRS_LOOKED_AT]]
        picked = _design(posterior, x, listed, questions, log_ratio if strategy == "policy" else None)
        pairs.close(picked)
        return picked
    flat = torch.full(x.shape[:2], 1.0 / x.shape[1], dtype=torch.float64)
    first = second = flat
    if strategy == "duel":
        value = posterior.reward(x) + posterior.bonus(x, kappa, log_ratio)
    elif strategy != "passive":
        first = posterior.policy(x, log_ratio)
    if strategy == "pokl":
        second = torch.softmax(first.log() + posterior.bonus(x, kappa, log_ratio) / posterior.kl_coef, dim=-1)
    elif strategy == "mixture":
        share = min(1.0, mixture / (posterior.noise.factor**2 * max(1, asked)))
        second = (1.0 - share) * first + share * flat
    first, second = pairs.merged(first), pairs.merged(second)
    chosen: list[Tensor] = []
    while questions:  # one pair a prompt each time, and pairs that were taken are closed before the next
        prompts = pairs.free.any(dim=2).any(dim=1).nonzero()[:, 0]
        prompts = prompts[torch.randperm(len(prompts), generator=generator)[:questions]]
        free = pairs.free[prompts]
        if strategy == "duel":
            one, other = _best_pair(value[prompts], free)
        else:
            one = _draw(first[prompts], free.any(dim=2), generator)
            other = _draw(second[prompts], free[torch.arange(len(prompts)), one], generator)
        chosen.append(torch.stack([prompts, one, other], dim=1))
        pairs.close(chosen[-1])
        questions -= len(prompts)
    return torch.cat(chosen)


def _draw(weights: Tensor, allowed: Tensor, generator: torch.Generator) -> Tensor:
    """(n,) places drawn by weights (n, N) among the allowed ones of each row, of which there is one or more."""
    return torch.multinomial(weights.clamp_min(1e-300) * allowed, 1, generator=generator)[:, 0]


def _best_pair(value: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """(n,), (n,): of each row's free pairs (n, N, N) the one of the largest sum of values (n, N), the better first."""
    count = value.shape[1]
    total = (value[:, :, None] + value[:, None, :]).masked_fill(~free, -math.inf)
    best = total.flatten(1).argmax(dim=1)
    one, other = best // count, best % count
    rows = torch.arange(len(value))
    turned = value[rows, one] < value[rows, other]
    return torch.where(turned, other, one), torch.where(turned, one, other)


def by_information(posterior: Posterior, x: Tensor, picked: Tensor) -> Tensor:
    """The picked pairs (n, 3) as `fisher` takes them one by one: the most informative first."""
    return _design(posterior, x, picked, len(picked), None)


def _design(posterior: Posterior, x: Tensor, pairs: Tensor, questions: int, log_ratio: Tensor | float | None) -> Tensor:
    """log_ratio: None for `fisher`. Greedy, with the rank-one update of H⁻¹ by each pair that was taken."""
    reward, gradient = posterior.reward(x), posterior.gradient(x)
    prompt, one, other = pairs.T
    difference = gradient[prompt, one] - gradient[prompt, other]
    weight = fisher_weight(reward[prompt, one] - reward[prompt, other], posterior.noise)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(posterior.information))
    solved = difference @ inverse  # (n, k): H⁻¹ δg of every pair
    leverage = (solved * difference).sum(dim=1)
    root = None if log_ratio is None else _policy_root(posterior, x, gradient, log_ratio)
    seen = solved @ root if root is not None else None
    free = torch.ones(len(pairs), dtype=torch.bool)
    taken = []
    for _ in range(questions):
        gain = weight * (leverage if seen is None else (seen**2).sum(dim=1) / (1.0 + weight * leverage))
        pick = int(torch.where(free, gain, -1.0).argmax())
        taken.append(pick)
        free[pick] = False
        step = solved[pick].clone()
        scale = weight[pick] / (1.0 + weight[pick] * leverage[pick])
        along = difference @ step
        if seen is not None and root is not None:
            seen.addr_(along, step @ root, alpha=-float(scale))
        solved.addr_(along, step, alpha=-float(scale))
        leverage = leverage - scale * along**2
    return pairs[torch.tensor(taken)]


def _policy_root(posterior: Posterior, x: Tensor, gradient: Tensor, log_ratio: Tensor | float) -> Tensor:
    """Σ^½ (k, k), Σ = E_s Cov_{π¹}(g)."""
    policy = posterior.policy(x, log_ratio)[..., None]
    centred = (gradient - (policy * gradient).sum(dim=1, keepdim=True)) * policy.sqrt()
    flat = centred.reshape(-1, centred.shape[-1])
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(x))
    return vectors * values.clamp_min(0.0).sqrt()
