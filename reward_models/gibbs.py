"""The Gibbs policy π ∝ π_ref·exp(r̂/kl_coef) (PPKL Eq. 5) by self-normalised resampling of N draws from π_ref.

With w_i ∝ exp(r̂_i/kl_coef) its expectations are Σ w_i f_i and its KL is Σ w_i log(N·w_i): exact as N → ∞, and at
finite N an upper bound on the KL against π_ref.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import special


def gibbs_weights(scores: ArrayLike, kl_coef: float) -> np.ndarray:
    """softmax(scores/kl_coef) along the last axis; scores (…, N) are r̂ of draws from π_ref. ValueError: kl_coef is not
    above 0, or a score is not finite."""
    if not kl_coef > 0:
        raise ValueError(f"kl_coef must be above 0, got {kl_coef}")
    scores = np.asarray(scores, np.float64)
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite, got NaN or infinity: leave such draws out")
    return special.softmax(scores / kl_coef, axis=-1)


def gibbs_log_policy(utility: np.ndarray, log_reference: np.ndarray, kl_coef: float) -> np.ndarray:
    """log π with π ∝ π_ref·exp(utility/kl_coef), normalised along the last axis; the shapes broadcast. A utility or a
    reference of −∞ gives −∞; one action must be finite. ValueError: kl_coef not above 0."""
    if not kl_coef > 0:
        raise ValueError(f"kl_coef must be above 0, got {kl_coef}")
    return special.log_softmax(utility / kl_coef + log_reference, axis=-1)


def kl_from_uniform(weights: np.ndarray) -> np.ndarray:
    """Σ w log(N w) along the last axis, nats, in [0, log N]; 0·log 0 = 0."""
    count = weights.shape[-1]
    positive = np.where(weights > 0, weights, 1.0)
    return (weights * np.log(count * positive)).sum(axis=-1)
