"""The MDPs and classes on which Algorithm 1 runs: random complete ones, and one with a one-parameter class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from private_rlhf_lab.studies.private_rl.general import Instances, backup
from private_rlhf_lab.studies.private_rl.updates import Array

STATES, ACTIONS, HORIZON = 4, 2, 3
SIZES = (32, 16, 8)
ARMS, CONTEXTS = 33, 3


def random_worlds(count: int, seed: int) -> Instances:
    """Random MDPs, H = 3, S = 4, A = 2, with classes of 32 × 16 × 8 closed under the Bellman operator.

    F₃ holds R₃ = Q*₃ and random functions; F_h for h < 3 holds T_h f of every f in F_{h+1}, and as many random ones.
    So Assumption 2.1 is true, and Q* is in F.
    """
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.ones(STATES), size=(count, HORIZON, STATES, ACTIONS))
    reward = rng.uniform(0.0, 1.0 / HORIZON, size=(count, HORIZON, STATES, ACTIONS))
    bare = Instances(transition, reward, ())
    classes: list[Array] = []
    for stage in reversed(range(HORIZON)):
        ahead = classes[0].max(axis=3) if classes else np.zeros((count, 1, STATES))
        closed = backup(bare, stage, ahead)
        left = (HORIZON - stage) / HORIZON  # the largest reward that is still to come
        extra = rng.uniform(0.0, left, size=(count, SIZES[stage] - closed.shape[1], STATES, ACTIONS))
        classes.insert(0, np.concatenate([closed, extra], axis=1))
    return Instances(transition, reward, tuple(classes))


def parameters(members: int) -> Array:
    """Centres of `members` equal parts of [0, 1]: every θ is within 1/(2·members) of one."""
    return (np.arange(members) + 0.5) / members


def family(theta: Array) -> Array:
    """f_θ(s, a) = ½(1 − |a/32 − c_s(θ)|), c = θ, 1 − θ, |2θ − 1| in states 0, 1, 2: (f, 3, 33) in [0, ½].

    |f_θ − f_θ'| ≤ |θ − θ'|, so parameters spaced by 2β give a β-cover in the supremum norm.
    """
    centres = np.stack([theta, 1.0 - theta, np.abs(2.0 * theta - 1.0)], axis=1)
    return 0.5 * (1.0 - np.abs(np.linspace(0.0, 1.0, ARMS) - centres[:, :, None]))


def covered_worlds(members: int, count: int) -> Instances:
    """H = 2, the infinite class {T₁f_θ} × {f_θ}, θ in [0, 1], replaced by its cover with `members` values of θ each.

    `count` instances that differ in θ*, spread over [0, 1] by the golden ratio and so in no cover. R₂ = f_θ*; R₁ is a
    small preference among the actions, whose moves differ. The infinite class is complete: T₁ maps F₂ onto F₁, and T₂
    maps to R₂. T₁ is a contraction, so both factors are β-covers at β = 1/(2·members).
    """
    rng = np.random.default_rng(11)
    moves = rng.dirichlet(np.ones(CONTEXTS), size=(2, CONTEXTS, ARMS))
    truths = (np.arange(1, count + 1) * (5.0**0.5 - 1.0) / 2.0) % 1.0
    reward = np.empty((count, 2, CONTEXTS, ARMS))
    reward[:, 0] = rng.uniform(0.0, 0.1, size=(CONTEXTS, ARMS))
    reward[:, 1] = family(truths)
    last = np.broadcast_to(family(parameters(members)), (count, members, CONTEXTS, ARMS))
    world = Instances(np.broadcast_to(moves, (count, *moves.shape)), reward, (last, last))
    return replace(world, classes=(backup(world, 0, last.max(axis=3)), last))
