"""Private RL (PRL, "Towards Differentially Private Reinforcement Learning with General Function Approximation"),
Algorithm 2, exactly: Appendix D's deterministic MDP with one outcome reward and 243 hypotheses.

A hypothesis f is drawn with probability ∝ exp(exponent · (η f₁ − summed losses)) before each batch of episodes; the
draws are (ε, 1e-5)-joint DP by zCDP. Axes: F hypotheses, X contexts, Q action sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.accounting.conversions import advanced_composition, zcdp_rho
from private_rlhf.core.stats import Estimate, bootstrap, percentile_interval, standard_error
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.bandits import slope_of_mean
from private_rlhf.validation.lab import COLOURS, Claim, Report, Row, band, new_figure, within

PAPER = "PRL"
DELTA = 1e-5
HORIZON = 4
SEQUENCES = 2**HORIZON  # action sequences, a₁ the most significant bit
CONTEXTS = np.array(list(itertools.product((0, 1), repeat=6)))  # (64, 6), columns x₁ … x₆
HYPOTHESES = np.array(list(itertools.product(range(3), repeat=1 + HORIZON)))  # (243, 5): gate, rule of each stage
TARGETS = {"easy": (0, 0, 1, 0, 1), "hard": (2, 2, 1, 2, 1)}
PUBLISHED = {"easy": (13, 24, 37, 127), "hard": (31, 34, 87, 218)}  # Table 1
OPTIMISM = 3.0  # η; the paper gives no number, and 0.5 to 5 give the same plateaus
EPISODES, BATCH = 500, 5  # the equal batch whose non-private plateaus come nearest to Table 1
CEILING = 1.33  # a plateau is reproduced if its whole interval lies within this factor of the published one
ARMS = (("non-private, no batch", 1, None), ("non-private, batched", BATCH, None),
        ("private, eps = 8", BATCH, 8.0), ("private, eps = 5", BATCH, 5.0))  # fmt: skip
Array = np.ndarray


@dataclass(frozen=True)
class OutcomeProblem:
    """One hidden target. first_value: (F,) f̄₁. predicted: (F, X, Q) R^(f)(τ). reward: (X, Q) in {0, 1}. played: (F, X)
    the sequence of the greedy policy. losses: (X·Q, F) uint8, (R^(f)(τ) − r)². regret: (F,) J* − J(π_f)."""

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


def target_sequences() -> Array:
    """The action sequence that each hypothesis prescribes in each context along its own prefix: (F, X, H) in {0, 1}."""
    x = CONTEXTS
    actions = np.zeros((len(HYPOTHESES), len(x), HORIZON), dtype=int)
    for stage in range(HORIZON):
        previous = actions[:, :, stage - 1] if stage else np.zeros(actions.shape[:2], dtype=int)
        parity = actions[:, :, :stage].sum(axis=2) % 2
        rules = np.stack([np.broadcast_to(x[:, 0] ^ x[:, 1], previous.shape), x[:, 2] ^ previous, parity ^ x[:, 3]])
        actions[:, :, stage] = np.take_along_axis(rules, HYPOTHESES[None, :, 1 + stage, None], axis=0)[0]
    return actions


def predictions() -> tuple[Array, Array, Array]:
    """f̄₁ (F,), R^(f)(τ) (F, X, Q) and the sequence that π_f plays (F, X), a tie taking action 0. f_h is 1 where the
    gate is on and prefix and action follow the hypothesis, so R^(f)(τ) (PRL section 3.2) telescopes to f_H."""
    gate = gates(CONTEXTS)[HYPOTHESES[:, 0]]
    sequence = target_sequences() @ 2 ** np.arange(HORIZON)[::-1]
    predicted = gate[..., None] * (sequence[..., None] == np.arange(SEQUENCES))
    return gate.mean(axis=1), predicted, gate * sequence


def problem(name: str) -> OutcomeProblem:
    """The easy or the hard instance."""
    first, predicted, played = predictions()
    target = int((np.array(TARGETS[name]) == HYPOTHESES).all(axis=1).argmax())
    reward = predicted[target]
    losses = ((predicted - reward) ** 2).reshape(len(HYPOTHESES), -1).T
    earned = np.take_along_axis(np.broadcast_to(reward, predicted.shape), played[:, :, None], axis=2)[:, :, 0]
    best = reward.max(axis=1).mean()
    return OutcomeProblem(
        name, first, predicted, reward, played, np.ascontiguousarray(losses, np.uint8), best - earned.mean(axis=1)
    )


def outcome_losses() -> Array:
    """(R^(f)(τ) − r)² of every hypothesis for every context, action sequence and outcome: (243, 64, 16, 2)."""
    return (predictions()[1][..., None] - np.arange(2)) ** 2


def outcome_sensitivity() -> int:
    """Largest |ΔS(f)| in Appendix D when one trajectory, with any outcome, replaces another: exhausted."""
    losses = outcome_losses().reshape(len(HYPOTHESES), -1)
    return int((losses.max(axis=1) - losses.min(axis=1)).max())


def draw_tightness(exponent: float, episodes: int = 60) -> float:
    """Largest exact |log ratio| of one draw over neighbours, against the promised 2·exponent·Δ with Δ = 1. Each of some
    random trajectories on the easy instance is replaced by every other one."""
    world = problem("easy")
    rng = np.random.default_rng(31)
    losses = np.unique(outcome_losses().reshape(len(HYPOTHESES), -1).T, axis=0)  # (types, F)
    rows = rng.integers(len(world.losses), size=episodes)
    present = np.unique(world.losses[rows], axis=0).astype(int)
    score = OPTIMISM * world.first_value - world.losses[rows].sum(axis=0, dtype=int)
    flat = np.zeros(len(score))
    before = gibbs_log_policy(score, flat, 1.0 / exponent)
    worst = 0.0
    for old in present:
        after = gibbs_log_policy(score + old - losses, flat, 1.0 / exponent)
        worst = max(worst, float(np.abs(after - before).max()))
    return worst / (2.0 * exponent)


def appendix_step(epsilon: float, updates: int) -> float:
    """ε₀ = ε/√(2M log(1/δ)) of PRL Appendix E.1, which drops the second term of its Lemma E.2."""
    return epsilon / math.sqrt(2.0 * updates * math.log(1.0 / DELTA))


def private_exponent(sizes: Sequence[int], epsilon: float | None) -> float:
    """x of P(f) ∝ exp(x·S(f)) for (ε, 1e-5)-joint DP of all draws at sensitivity 1: each is 2x-bounded range. The first
    draw reads no data. ∞ without privacy."""
    if epsilon is None:
        return math.inf
    return math.sqrt(8.0 * zcdp_rho(epsilon, DELTA) / (len(sizes) - 1)) / 2.0


def draw(scores: Array, exponent: float, rng: np.random.Generator) -> Array:
    """One index per row of `scores` (n, f), P(j) ∝ exp(exponent·score_j), by Gumbel noise in double precision: for
    measuring, not for releasing. exponent ∞: the largest score, ties broken uniformly."""
    noise = rng.gumbel(size=scores.shape)
    if math.isinf(exponent):
        noise[scores < scores.max(axis=1, keepdims=True)] = -np.inf
        return noise.argmax(axis=1)
    return (exponent * scores + noise).argmax(axis=1)


def batch_sizes(episodes: int, batch: int) -> list[int]:
    """Equal batches; the last may be shorter. f is drawn before each, the first time without data."""
    return [min(batch, episodes - start) for start in range(0, episodes, batch)]


def play(world: OutcomeProblem, sizes: Sequence[int], exponent: float, runs: int, rng: np.random.Generator) -> Array:
    """Algorithm 2, `runs` runs at once: (runs, K) float32, the expected regret J* − J(π_k) summed over episodes."""
    regret, total, start = np.empty((runs, sum(sizes)), dtype=np.float32), np.zeros((runs, len(HYPOTHESES)), int), 0
    for size in sizes:
        hypotheses = draw(OPTIMISM * world.first_value - total, exponent, rng)
        regret[:, start : start + size] = world.regret[hypotheses, None]
        contexts = rng.integers(len(CONTEXTS), size=(runs, size))
        total += world.losses[contexts * SEQUENCES + world.played[hypotheses[:, None], contexts]].sum(axis=1, dtype=int)
        start += size
    return np.cumsum(regret, axis=1)


def plateaus(cumulative: Array) -> Array:
    """First episode (1 … K) by which 95 % of the final value is reached, along the last axis."""
    return np.asarray((cumulative >= 0.95 * cumulative[..., -1:]).argmax(axis=-1) + 1)


def table_one(runs: int, seed: int) -> dict[tuple[str, int], Array]:
    """(instance, column of Table 1) to its curves (runs, 500); ε is the total of all draws."""
    curves = {}
    for column, (_, batch, epsilon) in enumerate(ARMS):
        sizes = batch_sizes(EPISODES, batch)
        for name in PUBLISHED:
            rng = np.random.default_rng([seed, column, *name.encode()])
            curves[name, column] = play(problem(name), sizes, private_exponent(sizes, epsilon), runs, rng)
    return curves


def plateau(curves: Array, seed: int, resamples: int = 400) -> Estimate:
    """Plateau of the mean of curves (runs, K) with its 95 % percentile bootstrap over runs."""
    runs = len(curves)
    weights = np.random.default_rng(seed).multinomial(runs, np.full(runs, 1.0 / runs), resamples) / runs
    return percentile_interval(float(plateaus(curves.mean(axis=0))), plateaus(weights @ curves), runs)


def growth(name: str, episodes: Sequence[int], runs: int, seed: int) -> Estimate:
    """Slope of log mean regret on log K at ε = 8, B = K^(3/5) ε^(−2/5)."""
    world, final = problem(name), []
    for number in episodes:
        sizes = batch_sizes(number, round((number**1.5 / 8.0) ** 0.4))
        rng = np.random.default_rng([seed, number, *name.encode()])
        final.append(play(world, sizes, private_exponent(sizes, 8.0), runs, rng)[:, -1])
    return bootstrap(slope_of_mean(np.array(episodes)), np.stack(final).astype(float), seed)


def privacy_claims() -> Iterator[Claim]:
    """The sensitivity, the loss of one draw, and the composition."""
    step = appendix_step(8.0, EPISODES // BATCH)
    yield within("Algorithm 2: replacing a trajectory changes the score by at most (H+1)^2 = 25 (Appendix D's class)",
                 f"{PAPER} Appendix E.2", outcome_sensitivity(), high=(HORIZON + 1) ** 2,
                 what="largest change over all hypotheses, trajectories and outcomes")
    yield within("One draw of the exponential mechanism loses at most 2 * exponent * sensitivity",
                 "McSherry and Talwar; enumeration of neighbours", max(draw_tightness(x) for x in (0.1, 0.5, 2.0)),
                 high=1.0 + 1e-9, kind="control", what="largest exact loss / bound over every replaced trajectory")
    yield within("eps0 = eps / sqrt(2 M log(1/delta)) composes to eps by the paper's own Lemma E.2",
                 f"{PAPER} Appendix E.1, at eps = 8, M = 100, delta = 1e-5",
                 advanced_composition(step, EPISODES // BATCH, DELTA), high=8.0, what="total by Lemma E.2, both terms")


def plateau_claims(curves: Mapping[tuple[str, int], Array], seed: int) -> Iterator[Claim]:
    """Table 1, cell by cell; in the private ones ε is the total."""
    for (name, column), each in curves.items():
        published = PUBLISHED[name][column]
        yield within(f"{ARMS[column][0]}, {name}: the regret curve reaches its plateau at episode {published}",
                     f"{PAPER} Table 1", plateau(each, seed) / published, low=1.0 / CEILING, high=CEILING,
                     paper=f"1: episode {published} (no seeds given; B = 5 chosen to come nearest)",
                     what="plateau of the mean curve / published")


def figure(curves: Mapping[tuple[str, int], Array]) -> Figure:
    """PRL Figure 1 with ε in total: mean cumulative expected regret, 95 % bands of the mean, two instances."""
    drawing, axes = new_figure(2)
    for axis, name in zip(axes, PUBLISHED, strict=True):
        for column, (label, *_) in enumerate(ARMS):
            runs = curves[name, column].T
            band(axis, np.arange(1, len(runs) + 1), runs.mean(axis=1), 1.96 * standard_error(runs),
                 color=COLOURS[column], label=label)  # fmt: skip
        axis.set(title=name, xlabel="episode", ylabel="cumulative regret (simulated)")
    axes[0].legend()
    return drawing


def run(quick: bool) -> Report:
    """The privacy of a draw, Table 1, Figure 1 and the rate of Theorem 3.4; `quick` takes fewer runs and episodes."""
    seed = 50
    curves = table_one(200 if quick else 600, seed)
    episodes = (2_000, 8_000, 32_000, 128_000)[: 3 if quick else 4]
    rates = [within(f"Regret under joint DP at epsilon = 8 grows no faster than K^(3/5): Algorithm 2, {name} instance",
                    f"{PAPER} Theorem 3.4", growth(name, episodes, 12, seed), high=0.65,
                    what=f"the exponent from {episodes[0]} to {episodes[-1]}, with .05 for logarithms of K")
             for name in PUBLISHED]  # fmt: skip
    rows: list[Row] = [{"environment": name, "method": ARMS[column][0], "published": PUBLISHED[name][column],
                        "plateau": int(plateaus(each.mean(axis=0))), "regret": float(each[:, -1].mean())}
                       for (name, column), each in curves.items()]  # fmt: skip
    return Report("private_rl", [*privacy_claims(), *plateau_claims(curves, seed), *rates], {"table_1": rows},
                  {"figure_1": figure(curves)})  # fmt: skip
