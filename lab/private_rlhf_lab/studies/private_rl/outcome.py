"""PRL Appendix D: a deterministic MDP with one outcome reward and 243 nonlinear hypotheses, enumerated; Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from private_rlhf.validation.outcome_rewards import (
    CONTEXTS,
    HORIZON,
    HYPOTHESES,
    OPTIMISM,
    SEQUENCES,
    OutcomeProblem,
    draw,
    gates,
    target_sequences,
)
from private_rlhf.validation.outcome_rewards import PUBLISHED as PUBLISHED
from private_rlhf.validation.outcome_rewards import TARGETS as TARGETS
from private_rlhf.validation.outcome_rewards import problem as problem

from private_rlhf_lab.studies.private_rl.updates import DELTA, Array, Memory, Schedule


def value_tables() -> list[Array]:
    """f_h for h = 1 … H, (F, X, 2^(h−1) prefixes, 2): 1 iff the gate is on and (prefix, a) follows the hypothesis."""
    actions = target_sequences()
    gate = gates(CONTEXTS)[HYPOTHESES[:, 0]]
    tables, prefix = [], np.zeros(actions.shape[:2], dtype=int)
    for stage in range(HORIZON):
        table = np.zeros((*actions.shape[:2], 2**stage, 2), dtype=np.int8)
        rows = np.indices(prefix.shape)
        table[rows[0], rows[1], prefix, actions[:, :, stage]] = gate
        tables.append(table)
        prefix = 2 * prefix + actions[:, :, stage]
    return tables


def outcome_model(tables: Sequence[Array]) -> Array:
    """R^(f)(τ) = Σ_h [f_h(s_h, a_h) − max_a f_{h+1}(s_{h+1}, a)] (PRL section 3.2), (F, X, Q), for any value tables."""
    total = np.zeros((*tables[0].shape[:2], SEQUENCES), dtype=tables[0].dtype)
    sequence = np.arange(SEQUENCES)
    for stage, table in enumerate(tables):
        prefix = sequence >> (HORIZON - stage)
        total += table[:, :, prefix, (sequence >> (HORIZON - 1 - stage)) & 1]
        if stage:
            total -= table.max(axis=3)[:, :, prefix]
    return total


def greedy_sequences(tables: Sequence[Array]) -> Array:
    """The sequence played by π_f in each context, (F, X); a tie takes action 0."""
    prefix = np.zeros(tables[0].shape[:2], dtype=int)
    rows = np.indices(prefix.shape)
    for table in tables:
        prefix = 2 * prefix + table.argmax(axis=3)[rows[0], rows[1], prefix]
    return prefix


def regret_curves(
    world: OutcomeProblem,
    schedule: Schedule,
    exponent: float,
    runs: int,
    rng: np.random.Generator,
    optimism: float = OPTIMISM,
) -> Array:
    """Algorithm 2, `runs` runs at once: (runs, K) the expected regret J* − J(π_k) of each episode.

    The regret of the policy that is played, not of its realised outcomes: less noise, same mean.
    """
    regret = np.empty((runs, schedule.episodes), dtype=np.float32)
    memory, start = Memory(schedule.window, (runs, len(HYPOTHESES))), 0
    for size in schedule.sizes:
        chosen = draw(optimism * world.first_value - memory.total, exponent, rng)
        regret[:, start : start + size] = world.regret[chosen, None]
        contexts = rng.integers(len(CONTEXTS), size=(runs, size))
        rows = contexts * SEQUENCES + world.played[chosen[:, None], contexts]
        memory.add(world.losses[rows].sum(axis=1, dtype=np.int32))
        start += size
    return regret


def theory_batch(episodes: int, epsilon: float, sensitivity: float, complexity: float, failure: float = 0.05) -> int:
    """B = K^{3/5} Δ^{2/5} (log |F|K/α)^{2/5} (log 1/δ)^{1/5} / ((ε C)^{2/5} of PRL Appendix E.2, constant 1."""
    log_class = np.log(len(HYPOTHESES) * episodes / failure)
    batch = (episodes**3 * (sensitivity * log_class) ** 2 * -np.log(DELTA) / (epsilon * complexity) ** 2) ** 0.2
    return max(1, round(float(batch)))


def complexity(episodes: int, failure: float = 0.05) -> float:
    """C = H C'_cov log(1 + KH/κ), κ = H³ log(|F|K/α) (PRL Appendix E.2), C'_cov by enumeration.

    In a deterministic MDP with fixed s₁ coverability is the number of state-action pairs that some greedy policy
    reaches at the stage where they are most; C'_cov is its mean over s₁.
    """
    played = greedy_sequences(value_tables())
    reached = np.array([[len(set(column >> (HORIZON - 1 - h))) for h in range(HORIZON)] for column in played.T])
    kappa = HORIZON**3 * np.log(len(HYPOTHESES) * episodes / failure)
    return float(HORIZON * reached.max(axis=1).mean() * np.log1p(episodes * HORIZON / kappa))
