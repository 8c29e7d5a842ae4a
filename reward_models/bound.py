"""The smooth reward bound r = (B/2)·tanh(2u/B), which keeps rewards in [−B/2, B/2] and slopes positive.

u is the raw score of the checkpoint's linear head; r ≈ u near 0. A hard clamp would have zero gradient outside the
interval. `reward_bound` B > 0 is the width of the interval; None means unbounded (r = u).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_reward_bound(reward_bound: float | None) -> float | None:
    """Return `reward_bound` if it is None or a positive finite width; ValueError otherwise."""
    if reward_bound is None:
        return None
    value = float(reward_bound)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"reward_bound must be a positive width B (rewards in [-B/2, B/2]) or None, got {reward_bound!r}"
        )
    return value


def bounded_reward(raw_score: Tensor, reward_bound: float | None) -> Tensor:
    """r = (B/2)·tanh(2u/B), same shape as `raw_score`; half types are widened to float32."""
    raw_score = raw_score if raw_score.dtype == torch.float64 else raw_score.float()
    bound = check_reward_bound(reward_bound)
    if bound is None:
        return raw_score
    return (bound / 2.0) * torch.tanh(raw_score * (2.0 / bound))


def bound_slope(raw_score: Tensor, reward_bound: float | None) -> Tensor:
    """dr/du = 1/cosh²(2u/B) in (0, 1], same shape; written with sigmoids so that it keeps its relative precision."""
    raw_score = raw_score if raw_score.dtype == torch.float64 else raw_score.float()
    bound = check_reward_bound(reward_bound)
    if bound is None:
        return torch.ones_like(raw_score)
    scaled = raw_score * (4.0 / bound)
    return 4.0 * torch.sigmoid(scaled) * torch.sigmoid(-scaled)
