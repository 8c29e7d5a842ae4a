"""PRL Appendix D: a deterministic MDP with one outcome reward and 243 nonlinear hypotheses, enumerated; Algorithm 2."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from private_rlhf_lab.studies.private_rl.updates import DELTA, Array, Memory, Schedule, draw

HORIZON = 4
SEQUENCES = 2**HORIZON  # action sequences, a₁ the most significant bit
CONTEXTS = np.array(list(itertools.product((0, 1), repeat=6)))  # (64, 6), columns x₁ … x₆
HYPOTHESES = np.array(list(itertools.product(range(3), repeat=1 + HORIZON)))  # (243, 5): gate, rule of each stage
TARGETS = {"easy": (0, 0, 1, 0, 1), "hard": (2, 2, 1, 2, 1)}
PUBLISHED = {"easy": (13, 24, 37, 127), "hard": (31, 34, 87, 218)}  # Table 1
OPTIMISM = 3.0  # η; the paper gives no number, and 0.5 to 5 give the same plateaus


@dataclass(frozen=True)
class OutcomeProblem:
    """One hidden target. F = 243 hypotheses, X = 64 contexts, Q = 16 action sequences.

    first_value: (F,) f̄₁. predicted: (F, X, Q) R^(f)(τ). reward: (X, Q) in {0, 1}. played: (F, X) the sequence of the
    greedy policy. losses: (X·Q, F) uint8, (R^(f)(τ) − r)² of the trajectory at its true reward. regret: (F,) J* −
    J(π_f).
    """

    name: str
    first_value: Array
    predicted: Array
    reward: Array
    played: Array
    losses: Array
    regret: Array


def gates(x: Array) -> Array:
    """g₀, g₁, g₂ at contexts (X, 6): (3, X)."""
    return np.stack([np.ones(len(x), dtype=int), x[:, 4] ^ x[:, 5], x[:, 0] ^ x[:, 2] ^ x[:, 4]])


def target_sequences(hypotheses: Array = HYPOTHESES) -> Array:
    """The action sequence that each hypothesis prescribes in each context along its own prefix: (F, X, H) in {0, 1}."""
    x = CONTEXTS
    actions = np.zeros((len(hypotheses), len(x), HORIZON), dtype=int)
    for stage in range(HORIZON):
        previous = actions[:, :, stage - 1] if stage else np.zeros(actions.shape[:2], dtype=int)
        parity = actions[:, :, :stage].sum(axis=2) % 2
        rules = np.stack([np.broadcast_to(x[:, 0] ^ x[:, 1], previous.shape), x[:, 2] ^ previous, parity ^ x[:, 3]])
        actions[:, :, stage] = np.take_along_axis(rules, hypotheses[None, :, 1 + stage, None], axis=0)[0]
    return actions


def value_tables(hypotheses: Array = HYPOTHESES) -> list[Array]:
    """f_h for h = 1 … H, (F, X, 2^(h−1) prefixes, 2): 1 iff the gate is on and (prefix, a) follows the hypothesis."""
    actions = target_sequences(hypotheses)
    gate = gates(CONTEXTS)[hypotheses[:, 0]]
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


def problem(name: str) -> OutcomeProblem:
    """The easy or the hard instance."""
    tables = value_tables()
    predicted, played = outcome_model(tables), greedy_sequences(tables)
    target = int((np.array(TARGETS[name]) == HYPOTHESES).all(axis=1).argmax())
    reward = predicted[target]
    losses = ((predicted - reward) ** 2).reshape(len(HYPOTHESES), -1).T
    earned = np.take_along_axis(np.broadcast_to(reward, predicted.shape), played[:, :, None], axis=2)[:, :, 0]
    best = reward.max(axis=1).mean()
    first = tables[0].max(axis=(2, 3)).mean(axis=1)
    return OutcomeProblem(
        name, first, predicted, reward, played, np.ascontiguousarray(losses, np.uint8), best - earned.mean(axis=1)
    )


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
