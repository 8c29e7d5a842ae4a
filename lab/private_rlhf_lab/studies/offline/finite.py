"""PPKL Algorithm 1 whole on a finite class, the concentrability of Definition 3.2, and τ-nets of an infinite class.

Definition 3.2 as typeset takes the infimum over the bias b inside, at one (s, a): b(s) = g(s, a) − h(s, a) makes it
zero. The proofs use b(s) = E_{a ~ π_ref}[g − h], and so does everything here: D²(s, a) is the largest squared
difference of two members, centred by π_ref, over the mean variance of that difference under π_ref.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import bootstrap, ratio_of_means, wilson
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Booleans,
    Counts,
    all_pairs,
    expected_counts,
    factor,
    offline_counts,
    slope_of_mean,
    total_loss,
)
from private_rlhf.validation.lab import Claim, within

CONTEXTS, ACTIONS = 4, 4
MEMBERS = 128
BOUND = 1.0  # rewards lie in [0, BOUND]
CONFIDENCE = 0.05  # δ of the theorem
CONSTANT = 1.0  # c of Eq. 10
EPSILONS = (0.5, 1.0, 2.0, math.inf)
NETS = (0.2, 0.1, 0.05, 0.025)


def centred(values: Array, log_policy: Array) -> Array:
    """values − E_{a ~ policy} values along the last axis."""
    return np.asarray(values - (np.exp(log_policy) * values).sum(axis=-1, keepdims=True))


def typeset_concentrability(members: Array) -> float:
    """Largest numerator inf_b (g − h − b)² of Definition 3.2 as typeset, over all g, h, s, a: members (N, S, A).

    b(s) may be any number in [−B, B]; the infimum is the squared distance of g − h from that interval.
    """
    gap = np.abs(members[:, None] - members[None]).max()
    return float(max(0.0, gap - BOUND) ** 2)


def concentrability(members: Array, log_reference: Array) -> Array:
    """D²(s, a; π_ref) by enumeration of all pairs of members, (N, S, A) -> (S, A)."""
    first, second = np.triu_indices(len(members), 1)
    difference = centred(members[first] - members[second], log_reference)
    variance = (np.exp(log_reference) * difference**2).sum(axis=-1).mean(axis=-1)
    distinct = variance > 1e-15  # two members that differ by a shift per context are the same reward
    return np.asarray((difference[distinct] ** 2 / variance[distinct, None, None]).max(axis=0))


def bonus(
    concentration: Array, epsilon: float, comparisons: float, log_cover: float, constant: float, net: float = 0.0
) -> Array:
    """Γ_n of Eq. 10: √(D² c e^B/(2α−1)² (log(N(τ)/δ)/n + τ)), shape of `concentration`; rewards in [0, BOUND]."""
    rate = (log_cover - math.log(CONFIDENCE)) / comparisons + net
    return np.asarray(np.sqrt(concentration * constant * math.exp(BOUND) / factor(epsilon) ** 2 * rate))


def finite_class(generator: np.random.Generator) -> tuple[Bandit, Array]:
    """A truth in [0.2, 0.8] and members at distances 2^−u, u uniform in [0, 7]: something to tell apart at every n.

    members (N, S, A), the truth first; π_ref is not uniform.
    """
    truth = generator.uniform(0.2, 0.8, (CONTEXTS, ACTIONS))
    scale = 2.0 ** -generator.uniform(0.0, 7.0, (MEMBERS - 1, 1, 1))
    others = np.clip(truth + scale * generator.uniform(-0.5, 0.5, (MEMBERS - 1, CONTEXTS, ACTIONS)), 0.0, BOUND)
    logits = 0.7 * generator.normal(size=(CONTEXTS, ACTIONS))
    log_reference = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Bandit(truth, log_reference, 0.5), np.concatenate([truth[None], others])


@dataclass(frozen=True)
class Whole:
    """Algorithm 1 at one ε: comparisons (K,); subopt, plain (without Γ) and promised, 4 E_{π*} Γ²/kl_coef, (K, R);
    covered: whether |r̄ − r* − b(s)| ≤ Γ at every (s, a), (K, R); below: whether the reward that the policy is made of
    is, r̂ − b(s) ≤ r* everywhere, (K, R).
    """

    epsilon: float
    comparisons: Array
    subopt: Array
    plain: Array
    promised: Array
    covered: Booleans
    below: Booleans


def algorithm(repetitions: int, seed: int, sizes: tuple[float, ...] = (1e2, 1e3, 1e4, 1e5)) -> list[Whole]:
    """Algorithm 1 on the finite class, one instance a call; `sizes` are of (2α−1)² n."""
    generator = np.random.default_rng(seed)
    bandit, members = finite_class(generator)
    pairs = all_pairs(CONTEXTS, ACTIONS)
    margin = pairs.difference(members)
    concentration = concentrability(members, bandit.log_reference)
    best = np.exp(bandit.gibbs(bandit.reward))
    made = []
    for epsilon in EPSILONS:
        comparisons = np.round(np.array(sizes) / factor(epsilon) ** 2)
        columns: list[list[Array]] = [[], [], [], [], []]
        for number in comparisons:
            counts = offline_counts(generator, bandit, int(number), repetitions, epsilon)
            found = members[total_loss(counts, margin, epsilon).argmin(axis=1)]
            gamma = bonus(concentration, epsilon, number, math.log(MEMBERS), CONSTANT)
            pessimistic = found - gamma
            error = centred(found - bandit.reward, bandit.log_reference)
            promised = 4.0 / bandit.kl_coef * (best * gamma**2).sum(axis=1).mean()
            values = (
                bandit.suboptimality(bandit.gibbs(pessimistic)),
                bandit.suboptimality(bandit.gibbs(found)),
                np.full(repetitions, promised),
                (np.abs(error) <= gamma).all(axis=(1, 2)),
                (error + pessimistic - found <= 1e-12).all(axis=(1, 2)),
            )
            for column, value in zip(columns, values, strict=True):
                column.append(np.asarray(value))
        subopt, plain, promise, covered, below = (np.stack(column) for column in columns)
        events = (covered.astype(np.bool_), below.astype(np.bool_))
        made.append(Whole(epsilon, comparisons, subopt, plain, promise, *events))
    return made


def lemma_b2(pairs: int, seed: int) -> Array:
    """[J(π*) − J(π_g)]/(E_{π*}(g − r*)²/kl_coef) of random problems with g ≤ r*, (pairs,): Lemma B.2 says at most 1.

    It is at most ½. With f = g − r* and π_t ∝ π* exp(t f/kl_coef), J(π*) − J(π_g) = kl_coef·KL(π_1‖π*), which is
    ∫₀¹ t Var_{π_t}(f) dt/kl_coef; and E_{π_t} f² falls in t because f² falls in f where f <= 0. Half of the errors
    sit on one action, and small ones on a rare action come close.
    """
    generator = np.random.default_rng(seed)
    actions = 4
    reward = generator.uniform(0.0, 3.0, (pairs, 1, actions))
    reference = 1e-4 + (1.0 - actions * 1e-4) * generator.dirichlet(np.full(actions, 0.5), (pairs, 1))
    error = generator.uniform(0.5, 1.5, (pairs, 1, actions)) * 10.0 ** generator.uniform(-2.0, 1.0, (pairs, 1, 1))
    error[::2, :, 1:] = 0.0
    bandit = Bandit(reward, np.log(reference), 1.0)
    gap = bandit.suboptimality(bandit.gibbs(reward - error))
    return np.asarray(gap / (np.exp(bandit.gibbs(reward)) * error**2).sum(axis=(1, 2)))


def curve_members(theta: Array) -> Array:
    """r_θ(s, a) = ½ + ½ sin(ω_sa θ + φ_sa) in [0, 1], θ in [0, 1] (n,) -> (n, S, A): |r_θ − r_θ'| ≤ |θ − θ'| ω/2 with
    ω <= 3.
    """
    generator = np.random.default_rng(1)
    omega = generator.uniform(1.0, 3.0, (CONTEXTS, ACTIONS))
    phase = generator.uniform(-1.0, 1.0, (CONTEXTS, ACTIONS))
    return np.asarray(0.5 + 0.5 * np.sin(omega * theta[:, None, None] + phase))


def net(tau: float) -> Array:
    """Parameters whose rewards are a τ-net: spacing 2τ/(ω/2), ω = 3; ends included."""
    steps = math.ceil(1.5 / (2.0 * tau))
    return (np.arange(steps) + 0.5) / steps


@dataclass(frozen=True)
class Nets:
    """SubOpt of the MLE over nets at n' = (2α−1)² n, sizes (K,). fixed (T, K, R) for NETS; growing (K, R) with
    τ = 1/√n'; exact (K, R): the whole class; limit (T, R): SubOpt at n = ∞; cover (T,): members of the nets.
    """

    sizes: Array
    fixed: Array
    growing: Array
    exact: Array
    limit: Array
    cover: Array


def nets(repetitions: int, seed: int, sizes: tuple[float, ...] = (1e3, 1e4, 1e5, 1e6)) -> Nets:
    """A one-parameter infinite class through nets, ε = 1; every repetition has its own truth, on no net."""
    generator = np.random.default_rng(seed)
    epsilon, pairs = 1.0, all_pairs(CONTEXTS, ACTIONS)
    truth = curve_members(generator.uniform(0.1, 0.9, repetitions))
    bandit = Bandit(truth, np.full((CONTEXTS, ACTIONS), -math.log(ACTIONS)), 0.2)

    def gap(counts: Counts, theta: Array) -> Array:
        members = curve_members(theta)
        chosen = total_loss(counts, pairs.difference(members), epsilon).argmin(axis=1)
        return bandit.suboptimality(bandit.gibbs(members[chosen]))

    whole = (np.arange(4000) + 0.5) / 4000  # the spacing is a tenth of the standard error at the largest n
    fixed = np.empty((len(NETS), len(sizes), repetitions))
    growing, exact = np.empty((2, len(sizes), repetitions))
    for row, size in enumerate(sizes):
        counts = offline_counts(generator, bandit, round(size / factor(epsilon) ** 2), repetitions, epsilon)
        fixed[:, row] = [gap(counts, net(tau)) for tau in NETS]
        growing[row], exact[row] = gap(counts, net(1.0 / math.sqrt(size))), gap(counts, whole)
    expected = expected_counts(bandit, 1e12, epsilon)
    limit = np.stack([gap(expected, net(tau)) for tau in NETS])
    return Nets(np.array(sizes), fixed, growing, exact, limit, np.array([float(len(net(tau))) for tau in NETS]))


def claims(whole: list[Whole], lemma: Array, found: Nets, seed: int) -> list[Claim]:
    """Definition 3.2, Lemma B.2, the event of Theorem 4.2 with c = 1, and the cost of a net. Given the event, the
    theorem's bound follows from the lemma, so that it is no claim of its own.
    """
    _, members = finite_class(np.random.default_rng(seed))
    missed = sum(float((~one.covered).sum()) for one in whole)
    runs = sum(one.covered.size for one in whole)
    share = wilson(missed, runs)
    above = wilson(sum(float((~one.below).sum()) for one in whole), runs)
    return [
        within("Definition 3.2 as typeset is positive somewhere", "PPKL Definition 3.2",
               typeset_concentrability(members), low=1e-12,
               what="the largest numerator over all members, contexts and actions"),
        within("Lemma B.2: a pessimistic g costs at most E_{pi*}(g - r*)^2 / kl_coef", "PPKL Lemma B.2",
               float(lemma.max()), high=1.0, paper="constant 1",
               what=f"largest gap / bound over {lemma.size} random problems"),
        within("Lemma B.2 holds with half that constant", "this project", float(lemma.max()), high=0.5 + 1e-6,
               what="largest gap / bound"),
        within("Algorithm 1, finite class, c = 1: the reward error stays below the bonus", "PPKL proof of Theorem 4.2",
               share, high=CONFIDENCE, what=f"the share of {runs} runs in which it does not"),
        within("Algorithm 1, finite class, c = 1: the reward it maximises is pessimistic, nowhere above r* but for a"
               " function of the prompt", "PPKL proof of Theorem 4.2", above, high=CONFIDENCE,
               what=f"the share of {runs} runs in which it is above somewhere"),
        *_net_claims(found, seed),
    ]


def _net_claims(found: Nets, seed: int) -> list[Claim]:
    """What a net costs, growing with n and at a fixed τ."""
    growth = bootstrap(ratio_of_means, np.stack([found.growing[-1], found.exact[-1]]), seed)
    exponent = bootstrap(slope_of_mean(np.array(NETS)), found.limit, seed)
    return [
        within("A net with tau = 1/sqrt((2 alpha - 1)^2 n) costs at most 10 %", "this project", growth, high=1.1,
               what="SubOpt on the net / on the whole one-parameter class"),
        within("The tau of Eq. 11 is tight: SubOpt of a fixed net at n = infinity is proportional to tau",
               "PPKL Theorem 4.2, read as tight", exponent, low=0.9, high=1.1, kind="reading",
               what="the exponent of tau over tau = 0.025 to 0.2"),
    ]
