"""POKL Algorithm 2 on a finite class, exactly: many worlds at once, with the uncertainty of Definition 3.5 enumerated.

R worlds, N members of each world's class, S contexts, A actions, P pairs. Regret is J(π*) − J(π) by enumeration, not a
sample. Estimates and policies are refreshed every round at first and then every t/`REFRESH` rounds; in between the
policies are fixed, so that the rounds of a stretch are one multinomial draw. In the paper's text the bonus is clipped
at 1; the centred error reaches 2B, and so does the clip here unless told otherwise. On a finite class regret is bounded
in the end, once only the truth is left; the growth law is about the rounds before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import Estimate, bootstrap, standard_error
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation import growth
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Booleans,
    Counts,
    Integers,
    Pairs,
    all_pairs,
    factor,
    loss_values,
    private_labels,
)
from private_rlhf.validation.lab import COLOURS, Claim, Report, band, new_figure, within

SEED = 40
EPSILONS = (0.5, 1.0, 2.0, math.inf)
OPTIMISM = "optimism, c = 0.2"
NONE = "no exploration (both from pi1)"
REFRESH = 20
CONFIDENCE = 0.05  # δ of Theorem 5.2
RIDGE = 1.0  # λ of Definition 3.5, where Γ²/2 allows it

Exploration = Literal["optimism", "none", "uniform", "reference", "posterior"]
POSTERIOR_MEAN = "posterior_mean"


@dataclass(frozen=True)
class World:
    """members (R, N, S, A) in [0, bound], one of each world the truth, which is the reward (R, S, A) of `bandit`."""

    bandit: Bandit
    members: Array
    bound: float

    @property
    def pairs(self) -> Pairs:
        """Of the contexts and actions."""
        return all_pairs(*self.members.shape[2:])


@dataclass(frozen=True)
class Arm:
    """estimator: a name of `reward_models.losses`, or POSTERIOR_MEAN, the mean member given the private labels (uniform
    prior, likelihood of Eq. 9), whose Gibbs policy has the largest expected J. exploration, how the second response
    is drawn:

    - optimism: π² ∝ π¹ exp(b/kl_coef), c = `constant` in Γ_T, b at most `clip` (None: 2B);
    - none: b = 0, so π² = π¹ and both responses come from π¹;
    - uniform: π² = (1−γ_t) π¹ + γ_t uniform, γ_t = min(1, m/((2α−1)² t)), m = `mixture`;
    - reference: π² = π_ref;
    - posterior: π² = Σ_n w_n π_n, the Gibbs policy of a member drawn from that posterior (Thompson sampling of the
      second response); with POSTERIOR_MEAN.
    """

    name: str
    exploration: Exploration
    estimator: str = "private_least_squares"
    constant: float = 0.2
    mixture: float = 0.0
    clip: float | None = None


@dataclass(frozen=True)
class Trace:
    """At the ends of stretches `rounds` (K,): cumulative (K, R) regret of π² and π¹, promised = Σ 4 E_{π²} b²/kl_coef
    and eluder = Σ min(1, U(s_t, a²_t)²), U as of the last refresh. Per world (R,): failed, the share of rounds in which
    r̄ + b + c(s) >= r* was violated somewhere; saturated, the share of rounds and (s, a) with b at its clip. The last
    four are 0 without optimism.
    """

    arm: Arm
    epsilon: float
    rounds: Integers
    regret: Array
    regret_exploiting: Array
    promised: Array
    eluder: Array
    failed: Array
    saturated: Array


def grid_world(
    generator: np.random.Generator,
    worlds: int,
    *,
    side: int = 8,
    dimension: int = 2,
    bound: float = 1.0,
    kl_coef: float = 0.1,
    best_mass: float | None = 0.02,
) -> World:
    """Rewards linear in `dimension` random features, the parameter on a grid of side^dimension, one of them the truth.

    best_mass: what π_ref gives to the best response of every context, the others sharing the rest; None: uniform.
    """
    contexts = actions = 4
    axis = np.linspace(-1.0, 1.0, side)
    theta = np.stack(np.meshgrid(*[axis] * dimension, indexing="ij"), axis=-1).reshape(-1, dimension)
    features = generator.normal(size=(worlds, contexts, actions, dimension))
    values = np.einsum("nd,rsad->rnsa", theta, features)
    members = bound * (0.5 + 0.5 * values / np.abs(values).max(axis=(1, 2, 3), keepdims=True))
    truth = members[np.arange(worlds), generator.integers(0, len(theta), worlds)]
    reference = np.full(truth.shape, 1.0 / actions)
    if best_mass is not None:
        best = np.arange(actions) == truth.argmax(axis=-1)[..., None]
        reference = np.where(best, best_mass, (1.0 - best_mass) / (actions - 1))
    return World(Bandit(truth, np.log(reference), kl_coef), members, bound)


def confidence_radius(constant: float, bound: float, horizon: int, members: int, epsilon: float) -> float:
    """Γ_T = c e^B √log(T N/δ)/(2α−1)."""
    return constant * math.exp(bound) * math.sqrt(math.log(horizon * members / CONFIDENCE)) / factor(epsilon)


def proof_constant(bound: float) -> float:
    """The c for which Γ_T²/2 is the error bound of Lemma C.3: 4 (e^−B + 2 + e^B)/e^B."""
    return 4.0 * (math.exp(-bound) + 2.0 + math.exp(bound)) / math.exp(bound)


def uncertainty(centred: Array, margin: Array, counted: Array, inside: Booleans, ridge: float) -> Array:
    """U of Definition 3.5 by enumeration of the pairs inside F_t: (R, S, A).

    centred (R, N, S, A): members less their mean under π¹. margin (R, N, P); counted (R, P): comparisons so far;
    inside (R, N) bool. 0 where fewer than two members are left.
    """
    found = np.zeros((len(centred), *centred.shape[2:]))
    for world, chosen in enumerate(inside):
        values = centred[world, chosen]
        if len(values) < 2:
            continue
        root = margin[world, chosen] * np.sqrt(counted[world])
        gram = root @ root.T
        norm = np.diag(gram)
        scale = 1.0 / np.sqrt(ridge + np.maximum(norm[:, None] + norm[None] - 2.0 * gram, 0.0))
        flat = values.reshape(len(values), -1)
        gaps = np.abs(flat[:, None] - flat[None]) * scale[..., None]
        found[world] = gaps.max(axis=(0, 1)).reshape(found.shape[1:])
    return found


class Learner:
    """The state of Algorithm 2 in all worlds: counts so far, r̄, π¹, π², b and U."""

    def __init__(self, world: World, arm: Arm, epsilon: float, horizon: int) -> None:
        self.world, self.arm, self.epsilon = world, arm, epsilon
        self.margin = world.pairs.difference(world.members)
        loss = "private_likelihood" if arm.estimator == POSTERIOR_MEAN else arm.estimator
        self.plus_loss, self.minus_loss = loss_values(self.margin, epsilon, loss)
        shape = (len(world.members), self.margin.shape[2])
        self.counts = Counts(np.zeros(shape), np.zeros(shape))
        self.radius = confidence_radius(arm.constant, world.bound, horizon, world.members.shape[1], epsilon)
        # λ <= Γ²/2 is the theorem's; above Γ² the set F_t would be empty.
        self.ridge = min(RIDGE, 0.5 * self.radius**2)
        self.clip = 2.0 * world.bound if arm.clip is None else arm.clip
        self.exploit = np.broadcast_to(world.bandit.log_reference, world.bandit.reward.shape)
        self.explore = self.exploit
        self.bonus = np.zeros(world.bandit.reward.shape)
        self.uncertainty = np.zeros_like(self.bonus)
        self.estimate: Array | None = None

    def add(self, counts: Counts) -> None:
        """Labels of a stretch, (R, P)."""
        self.counts = Counts(self.counts.plus + counts.plus, self.counts.minus + counts.minus)

    def refresh(self, rounds: int) -> None:
        """Steps 8–10: r̄, π¹, b and π² after so many rounds."""
        world = self.world
        loss = (self.plus_loss @ self.counts.plus[..., None] + self.minus_loss @ self.counts.minus[..., None])[..., 0]
        best = loss.argmin(axis=1)
        self.estimate = world.members[np.arange(len(best)), best]
        if self.arm.estimator == POSTERIOR_MEAN:
            weight = np.exp(loss.min(axis=1, keepdims=True) - loss)
            weight /= weight.sum(axis=1, keepdims=True)
            self.estimate = np.einsum("rn,rnsa->rsa", weight, world.members)
        self.exploit = world.bandit.gibbs(self.estimate)
        if self.arm.exploration == "optimism":
            self._optimism(best)
            self.explore = Bandit(self.estimate, self.exploit, world.bandit.kl_coef).gibbs(self.bonus)
        elif self.arm.exploration == "uniform":
            share = min(1.0, self.arm.mixture / (factor(self.epsilon) ** 2 * rounds))
            self.explore = np.log((1.0 - share) * np.exp(self.exploit) + share / self.exploit.shape[-1])
        elif self.arm.exploration == "posterior":
            bandit = world.bandit
            policies = gibbs_log_policy(world.members, bandit.log_reference[:, None], bandit.kl_coef)
            mixed = np.einsum("rn,rnsa->rsa", weight, np.exp(policies))
            self.explore = np.log(mixed / mixed.sum(axis=-1, keepdims=True))
        elif self.arm.exploration == "none":
            self.explore = self.exploit

    def _optimism(self, best: Integers) -> None:
        counted, rows = self.counts.total, np.arange(len(best))
        apart = ((self.margin - self.margin[rows, best][:, None]) ** 2 @ counted[..., None])[..., 0]
        inside = apart + self.ridge <= self.radius**2
        mean = (np.exp(self.exploit)[:, None] * self.world.members).sum(axis=-1, keepdims=True)
        self.uncertainty = uncertainty(self.world.members - mean, self.margin, counted, inside, self.ridge)
        self.bonus = np.minimum(self.clip, self.radius * self.uncertainty)

    def violated(self) -> Array:
        """1 where r̄ + b + c(s) < r* somewhere, c(s) = E_{π¹}[r* − r̄], (R,) of 0 and 1."""
        if self.estimate is None:
            return np.zeros(len(self.bonus))
        error = self.world.bandit.reward - self.estimate
        centred = error - (np.exp(self.exploit) * error).sum(axis=-1, keepdims=True)
        return (centred > self.bonus + 1e-12).any(axis=(1, 2)).astype(np.float64)


def stretches(horizon: int, refresh: int = REFRESH) -> list[int]:
    """Lengths: 1 up to `refresh` rounds, then a `refresh`-th of the rounds so far; they add up to the horizon."""
    lengths, done = [], 0
    while done < horizon:
        lengths.append(min(max(1, done // refresh), horizon - done))
        done += lengths[-1]
    return lengths


def simulate(world: World, arm: Arm, epsilon: float, horizon: int, seed: int, refresh: int = REFRESH) -> Trace:
    """One arm in all worlds for `horizon` rounds; the same seed gives arms the same random stream."""
    generator = np.random.default_rng(seed)
    learner, pairs = Learner(world, arm, epsilon, horizon), world.pairs
    truth = pairs.difference(world.bandit.reward)
    kl_coef, worlds = world.bandit.kl_coef, len(world.members)
    totals: list[Array] = []
    running = np.zeros((4, worlds))
    failed, saturated = np.zeros((2, worlds))
    lengths = stretches(horizon, refresh)
    for length, start in zip(lengths, np.cumsum([0, *lengths[:-1]]), strict=True):
        if start > 0:
            learner.refresh(int(start))
        exploit, explore = np.exp(learner.exploit), np.exp(learner.explore)
        joint = (exploit[..., :, None] * explore[..., None, :]) / exploit.shape[1]
        drawn = _draw(generator, length, joint)
        compared = (drawn + drawn.swapaxes(2, 3))[:, pairs.context, pairs.first, pairs.second]
        learner.add(private_labels(generator, compared, truth, epsilon))
        promised = 4.0 / kl_coef * (explore * learner.bonus**2).sum(axis=-1).mean(axis=-1)
        eluder = (drawn.sum(axis=2) * np.minimum(1.0, learner.uncertainty**2)).sum(axis=(1, 2))
        gaps = [length * world.bandit.suboptimality(policy) for policy in (learner.explore, learner.exploit)]
        running = running + np.stack([*gaps, length * promised, eluder])
        totals.append(running)
        if arm.exploration == "optimism":
            failed += length * learner.violated()
            saturated += length * (learner.bonus >= learner.clip).mean(axis=(1, 2))
    regret, exploiting, promise, eluders = np.stack(totals, axis=1)
    return Trace(
        arm, epsilon, np.cumsum(lengths), regret, exploiting, promise, eluders, failed / horizon, saturated / horizon
    )


def _draw(generator: np.random.Generator, length: int, joint: Array) -> Integers:
    """Counts of each (s, a¹, a²) in `length` rounds, (R, S, A, A)."""
    flat = joint.reshape(len(joint), -1)
    return generator.multinomial(length, flat / flat.sum(axis=1, keepdims=True)).reshape(joint.shape)


def law(what: str, source: str, trace: Trace, curves: Array, seed: int) -> Claim:
    """The claim that the mean of `curves` (K, R) grows no faster than log T."""
    value = bootstrap(lambda values: growth.power(trace.rounds, values), curves, seed)
    paper = "log T" if source == "POKL Theorem 5.2" else ""
    return within(f"{what} grows no faster than log T", source, value, high=growth.LOGARITHMIC, paper=paper,
                  what="the power p of the nearest a + b (T^p - 1)/p (log T at p = 0) over the last two decades")


def privacy_claims(traces: Mapping[tuple[str, float], Trace], seed: int) -> Iterator[Claim]:
    """Dependence of regret on ε: largest over smallest of regret in the unit that a theorem names."""
    curves = np.stack([traces[OPTIMISM, epsilon].regret[-1] for epsilon in EPSILONS[:3]])

    def spread(scale: list[float]) -> Estimate:
        value = bootstrap(lambda values: float(np.ptp(np.log(values.mean(axis=1) / np.array(scale)))), curves, seed)
        return value.mapped(math.exp)

    for text, source, scale in (
        ("(2 alpha - 1)^-2", "POKL Theorem 5.2", [factor(epsilon) ** -2 for epsilon in EPSILONS[:3]]),
        ("(e^epsilon - 1)^-2", "POKL abstract", [math.expm1(epsilon) ** -2 for epsilon in EPSILONS[:3]]),
    ):
        yield within(f"Regret at the horizon is proportional to {text} from epsilon = 0.5 to 2", source, spread(scale),
                     high=2.0, what="largest / smallest over epsilon of regret in that unit")


def figure(traces: Mapping[tuple[str, float], Trace]) -> Figure:
    """Regret of π² against T, a panel an arm; bands: 95 % over worlds."""
    names = (OPTIMISM, NONE)
    drawing, axes = new_figure(len(names))
    for axis, name in zip(axes, names, strict=True):
        for place, epsilon in enumerate(EPSILONS):
            trace = traces[name, epsilon]
            half = 1.96 * standard_error(trace.regret)
            band(axis, trace.rounds, trace.regret.mean(axis=1), half, color=COLOURS[place], label=f"ε = {epsilon:g}")
        axis.set(xscale="log", xlabel="rounds T", title=f"regret of π², {name}", xlim=(100, None))
    axes[0].legend()
    return drawing


def run(quick: bool) -> Report:
    """Optimism and no exploration in the same worlds to 10⁶ rounds, bit-reproducible; `quick` takes fewer worlds."""
    world = grid_world(np.random.default_rng(SEED), 10 if quick else 100)
    arms = (Arm(OPTIMISM, "optimism"), Arm(NONE, "none"))
    traces = {(arm.name, e): simulate(world, arm, e, 1_000_000, SEED) for e in EPSILONS for arm in arms}
    bounded = [(e, traces[OPTIMISM, e]) for e in EPSILONS]
    growing = [law(f"Optimism (c = 0.2), epsilon = {e:g}: regret of pi2", "POKL Theorem 5.2", each, each.regret, SEED)
               for e, each in bounded]  # fmt: skip
    table = [{"arm": arm, "epsilon": e, "regret": each.regret[-1].mean()} for (arm, e), each in traces.items()]
    return Report("online", [*growing, *privacy_claims(traces, SEED)], {"regret": table}, {"regret": figure(traces)})
