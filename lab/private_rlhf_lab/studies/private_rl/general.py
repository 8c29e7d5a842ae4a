"""PRL Algorithm 1 on small stochastic MDPs: Bellman-error loss with its infimum correction, exact expected regret.

Axes: i instances, j runs of each, h stages, s and t states, a actions, f members of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from private_rlhf_lab.studies.private_rl.updates import Array, Schedule, draw


@dataclass(frozen=True)
class Instances:
    """MDPs with start state 0 and a product class F = F₁ × … × F_H each.

    transition: (i, H, s, a, t). reward: (i, H, s, a) in [0, 1/H], so that they sum to at most 1. classes: H arrays
    (i, f, s, a) with values in [0, 1].
    """

    transition: Array
    reward: Array
    classes: tuple[Array, ...]

    @property
    def horizon(self) -> int:
        """H."""
        return len(self.classes)

    def next_values(self, stage: int) -> Array:
        """max_a f_{h+1}(t, a) of every f_{h+1}, (i, f, t); one zero function after the last stage."""
        if stage + 1 == self.horizon:
            return np.zeros((len(self.reward), 1, self.reward.shape[2]))
        return self.classes[stage + 1].max(axis=3)


def backup(instances: Instances, stage: int, values: Array) -> Array:
    """T_h: R_h(s, a) + E_t v(t) for values (i, f, t): (i, f, s, a)."""
    expected = np.einsum("isat,ift->ifsa", instances.transition[:, stage], values)
    return instances.reward[:, None, stage] + expected


def squares(instances: Instances, stage: int) -> Array:
    """(f_h(s, a) − R_h(s, a) − max f_{h+1}(t, ·))² of every transition: (i, f_h · f_{h+1}, s · a · t)."""
    targets = instances.reward[:, None, stage, :, :, None] + instances.next_values(stage)[:, :, None, None, :]
    gaps = instances.classes[stage][:, :, None, :, :, None] - targets[:, None]
    return (gaps**2).reshape(len(gaps), gaps.shape[1] * gaps.shape[2], -1)


def bellman_loss(errors: Sequence[Array]) -> Array:
    """L^BE (PRL section 3.1): Σ_h E_h(f_h, f_{h+1}) − Σ_h min_{f'_h} E_h(f'_h, f_{h+1}).

    errors: H arrays (n, f_h, f_{h+1}), the last with one column. The infimum over F splits because F is a product.
    Returns (n, f_1, …, f_H).
    """
    horizon = len(errors)
    total = np.zeros((1,) * (horizon + 1))
    for stage, error in enumerate(errors):
        excess = error - error.min(axis=1, keepdims=True)
        shape = [len(error)] + [1] * horizon
        shape[1 + stage] = error.shape[1]
        if stage + 1 < horizon:
            shape[2 + stage] = error.shape[2]
        total = total + excess.reshape(shape)
    return total


def evaluate(instances: Instances, actions: Sequence[Array]) -> Array:
    """J(π) of deterministic policies, actions[h] (i, j, s): (i, j)."""
    i = np.arange(len(instances.reward))[:, None, None]
    s = np.arange(instances.reward.shape[2])[None, None, :]
    value = np.zeros(actions[0].shape)
    for stage in reversed(range(instances.horizon)):
        a = actions[stage]
        ahead = np.einsum("ijst,ijt->ijs", instances.transition[:, stage][i, s, a], value)
        value = instances.reward[:, stage][i, s, a] + ahead
    return value[:, :, 0]


def optimum(instances: Instances) -> Array:
    """J* by dynamic programming: (i,)."""
    values = np.zeros((len(instances.reward), 1, instances.reward.shape[2]))
    for stage in reversed(range(instances.horizon)):
        values = backup(instances, stage, values).max(axis=3)
    return values[:, 0, 0]


def episodes(instances: Instances, actions: Sequence[Array], size: int, rng: np.random.Generator) -> list[Array]:
    """How often `size` episodes of each policy used each transition: H arrays (i, j, s, a, t).

    Drawn as multinomials stage by stage, which has the law of the sum over episodes.
    """
    i = np.arange(len(instances.reward))[:, None, None]
    s = np.arange(instances.reward.shape[2])[None, None, :]
    j = np.arange(actions[0].shape[1])[None, :, None]
    shape = instances.transition.shape[2:]
    here = np.zeros(actions[0].shape, dtype=np.int64)
    here[:, :, 0] = size
    counts = []
    for stage, a in enumerate(actions):
        moves = rng.multinomial(here, instances.transition[:, stage][i, s, a])
        used = np.zeros((*here.shape[:2], *shape))
        used[i, j, s, a] = moves
        counts.append(used)
        here = moves.sum(axis=2)
    return counts


def cumulative_regret(
    instances: Instances,
    schedule: Schedule,
    exponent: Array,
    optimism: float,
    runs: int,
    rng: np.random.Generator,
) -> Array:
    """Algorithm 1 under one exponent per instance (i,), all finite or all ∞: regret after each batch, (i, j, batches).

    ValueError for a schedule with a window: every update scores all data here.
    """
    if schedule.window is not None:
        raise ValueError(f"Algorithm 1 is run on all data, got a window of {schedule.window}")
    count, horizon = len(instances.reward), instances.horizon
    tables = [squares(instances, stage) for stage in range(horizon)]
    greedy = [each.argmax(axis=3) for each in instances.classes]
    sizes = [each.shape[1] for each in instances.classes]
    first = instances.classes[0][:, :, 0].max(axis=2)  # f₁(s₁), (i, f₁)
    scale = np.repeat(exponent, runs)
    finite = bool(np.isfinite(scale).all())
    best, spent = optimum(instances)[:, None], np.zeros((count, runs))
    errors = [np.zeros((count, runs, sizes[h], 1 if h + 1 == horizon else sizes[h + 1])) for h in range(horizon)]
    history = []
    for size in schedule.sizes:
        loss = bellman_loss([each.reshape(count * runs, *each.shape[2:]) for each in errors])
        score = optimism * np.repeat(first, runs, axis=0).reshape(-1, sizes[0], *[1] * (horizon - 1)) - loss
        flat = score.reshape(count * runs, -1)
        chosen = draw(flat * scale[:, None] if finite else flat, 1.0 if finite else np.inf, rng)
        members = np.unravel_index(chosen, sizes)
        actions = [g[np.arange(count)[:, None], m.reshape(count, runs)] for g, m in zip(greedy, members, strict=True)]
        spent = spent + size * (best - evaluate(instances, actions))
        history.append(spent)
        for stage, used in enumerate(episodes(instances, actions, size, rng)):
            rows = used.reshape(count, runs, -1).transpose(0, 2, 1)
            errors[stage] += (tables[stage] @ rows).transpose(0, 2, 1).reshape(errors[stage].shape)
    return np.stack(history, axis=2)


def step_sensitivity(functions: Array, next_values: Array, largest_reward: float) -> float:
    """sup over f, f', g and two transitions of d(f', g) − d(f, g), d the change of (f(s, a) − r − g(t))².

    functions: (f, s, a). next_values: (g, t). The two transitions are (s, a, r, t), removed, and (s', a', r', t'),
    added; any of them, with any reward in [0, largest_reward]. The squares of y = r + g(t) cancel, so the change is
    linear in each y and its largest value lies at the ends of the range of y: enumerated.
    """
    flat = functions.reshape(len(functions), -1)
    plus, minus = flat[:, None] + flat[None], flat[:, None] - flat[None]  # (f', f, s·a)
    worst = -np.inf
    for value in next_values:
        ends = (value.min(), value.max() + largest_reward)
        slopes = [minus * (plus - 2.0 * y) for y in ends]
        added = np.maximum(*slopes).max(axis=2)
        removed = np.maximum(*(-slope for slope in slopes)).max(axis=2)
        worst = max(worst, float((added + removed).max()))
    return worst


def sensitivities(instances: Instances) -> Array:
    """Δ of the score, proved: (i,). At most 8H by PRL Appendix E.1.

    Replacing a trajectory moves Σ_h E_h(f) by Σ_h d_h(f), and min_{f'} E_h(f', f_{h+1}) by at most d_h(f'₀, f_{h+1}),
    f'₀ being the minimiser before (and the reverse for the other sign). So |ΔS(f)| is at most
    Σ_h sup_{f', f, g} [d_h(f', g) − d_h(f, g)] whatever the other trajectories: `step_sensitivity`.
    """
    found = np.zeros(len(instances.reward))
    for stage in range(instances.horizon):
        ahead = instances.next_values(stage)
        for i in range(len(found)):
            found[i] += step_sensitivity(instances.classes[stage][i], ahead[i], 1.0 / instances.horizon)
    return found
