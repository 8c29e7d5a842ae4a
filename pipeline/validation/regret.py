"""POKL Algorithm 2 on a finite class, exactly: many worlds at once, the uncertainty of Definition 3.5 enumerated.

R worlds, N members of each world's class, S contexts, A actions, P pairs. Estimates and policies are refreshed every
round at first, then every t/`REFRESH` rounds; in between, the rounds are one multinomial draw. The paper clips the
bonus at 1; here the clip is 2B by default, which the centred error reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import Estimate, bootstrap, standard_error
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
ESTIMATOR = "private_least_squares"


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
class Trace:
    """rounds (K,): ends of stretches. regret (K, R): cumulative, of π²."""

    rounds: Integers
    regret: Array


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
    best_mass: what π_ref gives to the best response of every context; None: uniform."""
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


def uncertainty(centred: Array, margin: Array, counted: Array, inside: Booleans, ridge: float) -> Array:
    """U of Definition 3.5 by enumeration of the pairs inside F_t: (R, S, A); 0 where fewer than two members are left.
    centred (R, N, S, A): members less their mean under π¹. margin (R, N, P); counted (R, P): comparisons so far; inside
    (R, N) bool."""
    largest = np.zeros((len(centred), *centred.shape[2:]))
    for world, members in enumerate(inside):
        values = centred[world, members]
        if len(values) < 2:
            continue
        root = margin[world, members] * np.sqrt(counted[world])
        gram = root @ root.T
        norm = np.diag(gram)
        scale = 1.0 / np.sqrt(ridge + np.maximum(norm[:, None] + norm[None] - 2.0 * gram, 0.0))
        flat = values.reshape(len(values), -1)
        gaps = np.abs(flat[:, None] - flat[None]) * scale[..., None]
        largest[world] = gaps.max(axis=(0, 1)).reshape(largest.shape[1:])
    return largest


class Learner:
    """The state of Algorithm 2 in all worlds: counts so far, r̄, π¹, π², b and U.

    constant: c in Γ_T; 0 explores nothing, so that π² = π¹. clip: of b; None: 2B. loss: of `reward_models.losses`.
    """

    def __init__(
        self,
        world: World,
        epsilon: float,
        horizon: int,
        constant: float = 0.2,
        clip: float | None = None,
        loss: str = ESTIMATOR,
    ) -> None:
        self.world, self.epsilon, self.constant = world, epsilon, constant
        self.margin = world.pairs.difference(world.members)
        self.plus_loss, self.minus_loss = loss_values(self.margin, epsilon, loss)
        shape = (len(world.members), self.margin.shape[2])
        self.counts = Counts(np.zeros(shape), np.zeros(shape))
        self.radius = confidence_radius(constant, world.bound, horizon, world.members.shape[1], epsilon)
        # λ <= Γ²/2 is the theorem's; above Γ² the set F_t would be empty.
        self.ridge = min(RIDGE, 0.5 * self.radius**2)
        self.clip = 2.0 * world.bound if clip is None else clip
        self.exploit = np.broadcast_to(world.bandit.log_reference, world.bandit.reward.shape)
        self.explore = self.exploit
        self.bonus = np.zeros(world.bandit.reward.shape)
        self.uncertainty = np.zeros_like(self.bonus)

    def add(self, counts: Counts) -> None:
        """Labels of a stretch, (R, P)."""
        self.counts = Counts(self.counts.plus + counts.plus, self.counts.minus + counts.minus)

    def refresh(self, rounds: int) -> None:
        """Steps 8–10: r̄, π¹, b and π² after so many rounds."""
        loss = (self.plus_loss @ self.counts.plus[..., None] + self.minus_loss @ self.counts.minus[..., None])[..., 0]
        self.estimate = self.estimated(loss)
        self.exploit = self.world.bandit.gibbs(self.estimate)
        self.explore = self.second_policy(loss, rounds)

    def estimated(self, loss: Array) -> Array:
        """r̄ (R, S, A) from the summed losses (R, N) of the members."""
        return np.asarray(self.world.members[np.arange(len(loss)), loss.argmin(axis=1)])

    def second_policy(self, loss: Array, rounds: int) -> Array:
        """log π² ∝ log π¹ + b/kl_coef, (R, S, A), with the bonus of Definition 3.5."""
        if not self.constant:
            return self.exploit
        counted, best = self.counts.total, self.margin[np.arange(len(loss)), loss.argmin(axis=1)][:, None]
        apart = ((self.margin - best) ** 2 @ counted[..., None])[..., 0]
        inside = apart + self.ridge <= self.radius**2
        mean = (np.exp(self.exploit)[:, None] * self.world.members).sum(axis=-1, keepdims=True)
        self.uncertainty = uncertainty(self.world.members - mean, self.margin, counted, inside, self.ridge)
        self.bonus = np.minimum(self.clip, self.radius * self.uncertainty)
        return Bandit(self.estimate, self.exploit, self.world.bandit.kl_coef).gibbs(self.bonus)


def stretches(horizon: int, refresh: int = REFRESH) -> list[int]:
    """Lengths: 1 up to `refresh` rounds, then a `refresh`-th of the rounds so far; they add up to the horizon."""
    lengths, total = [], 0
    while total < horizon:
        lengths.append(min(max(1, total // refresh), horizon - total))
        total += lengths[-1]
    return lengths


def play(learner: Learner, lengths: list[int], seed: int) -> Iterator[tuple[int, Integers]]:
    """Plays stretch after stretch: (its length, counts of each (s, a¹, a²) in it, (R, S, A, A)), before π is refreshed.

    The same seed gives learners the same random stream.
    """
    generator, world, pairs = np.random.default_rng(seed), learner.world, learner.world.pairs
    truth, epsilon = pairs.difference(world.bandit.reward), learner.epsilon
    for length, start in zip(lengths, np.cumsum([0, *lengths[:-1]]), strict=True):
        if start > 0:
            learner.refresh(int(start))
        joint = np.exp(learner.exploit)[..., :, None] * np.exp(learner.explore)[..., None, :] / world.members.shape[2]
        flat = joint.reshape(len(joint), -1)
        responses = generator.multinomial(length, flat / flat.sum(axis=1, keepdims=True)).reshape(joint.shape)
        compared = (responses + responses.swapaxes(2, 3))[:, pairs.context, pairs.first, pairs.second]
        learner.add(private_labels(generator, compared, truth, epsilon))
        yield length, responses


def simulate(world: World, epsilon: float, horizon: int, seed: int, constant: float = 0.2) -> Trace:
    """Algorithm 2 in all worlds for `horizon` rounds; constant: of `Learner`."""
    learner, lengths = Learner(world, epsilon, horizon, constant), stretches(horizon)
    regret = [length * world.bandit.suboptimality(learner.explore) for length, _ in play(learner, lengths, seed)]
    return Trace(np.cumsum(lengths), np.cumsum(regret, axis=0))


def law(what: str, source: str, rounds: Integers, curves: Array, seed: int) -> Claim:
    """The claim that the mean of `curves` (K, R) grows no faster than log T."""
    value = bootstrap(lambda values: growth.power(rounds, values), curves, seed)
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
    traces = {(arm, e): simulate(world, e, 1_000_000, SEED, constant)
              for e in EPSILONS for arm, constant in ((OPTIMISM, 0.2), (NONE, 0.0))}  # fmt: skip
    growing = [law(f"Optimism (c = 0.2), epsilon = {e:g}: regret of pi2", "POKL Theorem 5.2",
                   traces[OPTIMISM, e].rounds, traces[OPTIMISM, e].regret, SEED) for e in EPSILONS]  # fmt: skip
    table = [{"arm": arm, "epsilon": e, "regret": each.regret[-1].mean()} for (arm, e), each in traces.items()]
    return Report("online", [*growing, *privacy_claims(traces, SEED)], {"regret": table}, {"regret": figure(traces)})
