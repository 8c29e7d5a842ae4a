"""PRL Lemma E.1, batched coverability: Σ_k E_{p_k} f_k against what was seen before each batch, by a search.

Sum of on-policy errors <= C B log₂(1 + CK/λ) + √(4 C log(1 + CK/λ) [2Kλ + Σ_k Σ_{t<[k]} E_{p_t} f_k²]), for laws p_k <=
C μ that are fixed within a batch and functions f_k in [0, 1]; [k] is the first episode of k's batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from private_rlhf.validation.lab import Claim, within, worst

from private_rlhf_lab.studies.private_rl.updates import PAPER, Array

STATES = 24
SHAPES = ((24, 1), (24, 20), (24, 400), (96, 50), (200, 5))  # batches, episodes a batch


class Ratio(NamedTuple):
    """Left side over right side, and over the right side without its batch term."""

    whole: float
    without_batch: float


def ratio(laws: Array, functions: Array, batch: int, spread: float = 1.0) -> Ratio:
    """laws p and functions f, one of each a batch, (M, X); spread: λ >= 1. C is the least for these laws."""
    cover = laws.max(axis=0).sum()  # min over μ of max p/μ: μ proportional to the envelope
    episodes = batch * len(laws)
    before = batch * (np.cumsum(laws, axis=0) - laws)  # Σ_{t<[k]} p_t
    training = batch * float((before * functions**2).sum())
    log = math.log(1.0 + cover * episodes / spread)
    root = math.sqrt(4.0 * cover * log * (2.0 * episodes * spread + training))
    left = batch * float((laws * functions).sum())
    return Ratio(left / (cover * batch * log / math.log(2.0) + root), left / root)


def fresh(batches: int) -> tuple[Array, Array]:
    """Every batch plays one new state, on which alone f errs, until none is left: nothing is learnt in between."""
    laws = np.eye(STATES)[np.arange(batches) % STATES]
    return laws, laws * (np.arange(batches) < STATES)[:, None]


def search(count: int, seed: int) -> list[Ratio]:
    """The new-state sequence of each of SHAPES and `count` random ones: laws concentrated on a few states, and f the
    indicator of the states that were played at most a random number of times before.
    """
    generator = np.random.default_rng(seed)
    found = [ratio(*fresh(batches), batch) for batches, batch in SHAPES]
    for _ in range(count):
        batches, batch = SHAPES[generator.integers(len(SHAPES))]
        laws = generator.dirichlet(np.full(STATES, 10.0 ** generator.uniform(-2.0, 0.5)), batches)
        before = batch * (np.cumsum(laws, axis=0) - laws)
        functions = (before <= 10.0 ** generator.uniform(-2.0, 3.0)).astype(np.float64)
        found.append(ratio(laws, functions, batch, 10.0 ** generator.uniform(0.0, 2.0)))
    return found


def claims(count: int, seed: int) -> Iterator[Claim]:
    """The lemma, and whether batching costs what its first term says."""
    found = search(count, seed)
    yield within("Batched coverability: the on-policy error is at most the lemma's bound", f"{PAPER} Lemma E.1",
                 worst(each.whole for each in found), high=1.0,
                 what=f"largest left side / right side over {len(found)} sequences")
    yield within("Without its batch term C B log(K) the lemma still holds, as it does for B = 1", f"{PAPER} Lemma E.1",
                 worst(each.without_batch for each in found), high=1.0, kind="reading",
                 what=f"largest left side / second term over {len(found)} sequences")
