"""Which pairs to ask: all strategies behind one interface, and none that sees anything but released answers.

`choose(strategy, belief, x, questions, …)` gets the candidates' coordinates x (M, N, k), N draws of π_ref for each of M
prompts, and names `questions` pairs of them. The designs look at many pairs of the whole pool and take the best of them
one by one, counting those already taken as answered; the others draw prompts evenly and two answers to each.

    passive   both answers from π_ref
    pokl      a¹ ~ π¹, a² ∝ π¹·exp(b/kl_coef) (POKL Algorithm 2, steps 3 and 10)
    mixture   a¹ ~ π¹, a² ~ (1−γ)π¹ + γ·π_ref, γ = min(1, m/((2α−1)²t)), t questions so far
    duel      the two answers of the highest r̄ + b
    fisher    D-optimal: the largest log det of the information of the *privatised* answers (compare arXiv 2502.04354)
    policy    V-optimal for J: the smallest variance of r̄ among the answers of the Gibbs policy

For `policy`: to second order J(π*) − J(π̄) = Σ_s Var_π(r̄ − r*)/(2·kl_coef), so the expected loss is tr(H⁻¹Σ)/(2·kl_coef)
with Σ = E_s Cov_π(g), π = π¹ and g = ∂r̄/∂θ. A pair of information ω lowers it by ω‖Σ^½H⁻¹δg‖²/(1 + ω δgᵀH⁻¹δg).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from pipeline.online.belief import Belief
from reward_models.losses import fisher_weight

Strategy = Literal["passive", "pokl", "mixture", "duel", "fisher", "policy"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DESIGNS: tuple[Strategy, ...] = ("fisher", "policy")
PAIRS_LOOKED_AT = 8192
"""By a design, at most and at random."""


def choose(
    strategy: Strategy,
    belief: Belief,
    x: Tensor,
    questions: int,
    generator: torch.Generator,
    *,
    asked: int = 0,
    kappa: float = 1.0,
    mixture: float = 100.0,
    log_ratio: Tensor | float = 0.0,
) -> Tensor:
    """Pairs to ask, (questions, 3) int64: prompt, one answer, another. asked: questions so far. mixture: m.
    log_ratio: as in `Belief.policy`, where the candidates are another policy's.

    ValueError for fewer than two answers per prompt, or for a design that is to find more pairs than there are.
    """
    if x.shape[1] < 2:
        raise ValueError("a question needs two answers to a prompt")
    if strategy in DESIGNS:
        looks_at = log_ratio if strategy == "policy" else None
        return _design(belief, x, questions, generator, looks_at)
    prompts = _evenly(len(x), questions, generator)
    if strategy == "duel":
        best = (belief.reward(x) + belief.bonus(x, kappa, log_ratio)).topk(2, dim=-1).indices[prompts]
        return torch.cat([prompts[:, None], best], dim=1)
    flat = torch.full(x.shape[:2], 1.0 / x.shape[1], dtype=torch.float64)
    first = second = flat
    if strategy != "passive":
        first = belief.policy(x, log_ratio)
    if strategy == "pokl":
        second = torch.softmax(first.log() + belief.bonus(x, kappa, log_ratio) / belief.kl_coef, dim=-1)
    elif strategy == "mixture":
        share = min(1.0, mixture / (belief.noise.factor**2 * max(1, asked)))
        second = (1.0 - share) * first + share * flat
    one = torch.multinomial(first[prompts], 1, generator=generator)
    rest = second[prompts].clamp_min(1e-300).scatter(1, one, 0.0)  # two different answers
    return torch.cat([prompts[:, None], one, torch.multinomial(rest, 1, generator=generator)], dim=1)


def _evenly(prompts: int, questions: int, generator: torch.Generator) -> Tensor:
    """(questions,) numbers of prompts, each as often as the others but for one."""
    rounds = -(-questions // prompts)
    return torch.cat([torch.randperm(prompts, generator=generator) for _ in range(rounds)])[:questions]


def _design(
    belief: Belief, x: Tensor, questions: int, generator: torch.Generator, log_ratio: Tensor | float | None
) -> Tensor:
    """log_ratio: None for `fisher`. Greedy, with the rank-one update of H⁻¹ by each pair that was taken."""
    pairs = _some_pairs(x, generator)
    if questions > len(pairs):
        raise ValueError(f"there are {len(pairs)} pairs for {questions} questions")
    reward, gradient = belief.reward(x), belief.gradient(x)
    prompt, one, other = pairs.T
    difference = gradient[prompt, one] - gradient[prompt, other]
    weight = fisher_weight(reward[prompt, one] - reward[prompt, other], belief.noise)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(belief.information))
    solved = difference @ inverse  # (n, k): H⁻¹ δg of every pair
    leverage = (solved * difference).sum(dim=1)
    root = None if log_ratio is None else _policy_root(belief, x, gradient, log_ratio)
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


def pairs_looked_at(prompts: int, answers: int) -> int:
    """How many pairs a design chooses among."""
    return min(PAIRS_LOOKED_AT, prompts * math.comb(answers, 2))


def _some_pairs(x: Tensor, generator: torch.Generator) -> Tensor:
    """(n, 3): pairs of different answers, at most `PAIRS_LOOKED_AT`, at random."""
    prompts, answers = x.shape[:2]
    upper = torch.triu_indices(answers, answers, offset=1)
    total = prompts * upper.shape[1]
    picked = torch.randperm(total, generator=generator)[: pairs_looked_at(prompts, answers)]
    return torch.stack([picked // upper.shape[1], *upper[:, picked % upper.shape[1]]], dim=1)


def _policy_root(belief: Belief, x: Tensor, gradient: Tensor, log_ratio: Tensor | float) -> Tensor:
    """Σ^½ (k, k), Σ = E_s Cov_{π¹}(g)."""
    policy = belief.policy(x, log_ratio)[..., None]
    centred = (gradient - (policy * gradient).sum(dim=1, keepdim=True)) * policy.sqrt()
    flat = centred.reshape(-1, centred.shape[-1])
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(x))
    return vectors * values.clamp_min(0.0).sqrt()
