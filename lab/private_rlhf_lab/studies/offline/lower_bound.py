"""PPKL Theorem 4.5 with 2α−1 in the place of e^ε−1: a lower bound that follows the truth at every ε, and what meets it.

Every ε-LDP channel of a binary label is a post-processing of randomised response, and randomised response contracts KL
by (2α−1)². So the proof goes through with a = √(SC)/((2α−1)√n) and gives ¼ e^−1 min(a²/(8 kl_coef), 3a/10) < minimax
SubOpt (`docs/explanation/lower-bound.md` has statement and proof). The hard instance and its policies are those of
`studies.offline.hard`. The policy that meets the bound is the private MLE, with or without the Fisher form
of pessimism; its SubOpt is known to second order (`expansion`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation.bandits import Array, factor, fisher_weights
from private_rlhf.validation.lab import COLOURS, Claim, Kind, new_figure, within, worst

from private_rlhf_lab.studies.offline import hard

THEOREM = "PPKL Theorem 4.5, with 2 alpha - 1"
FLOOR, _, MLE, PESSIMISTIC, _ = hard.POLICIES
OUTPUTS = 4  # of the random channels


def distance(coverage: float, epsilon: float, comparisons: float) -> float:
    """a = √(SC)/((2α−1)√n) of the corrected theorem."""
    return 0.5 * hard.rate_distance(coverage, epsilon, comparisons)


def bound(setting: hard.Setting) -> float:
    """¼ e^−1 min(a²/(8 kl_coef), 3a/10) at the corrected a, whatever distance the instance itself has."""
    a = distance(setting.coverage, setting.epsilon, setting.comparisons)
    return 0.25 * math.exp(-1.0) * min(a * a / (8.0 * setting.kl_coef), 0.3 * a)


def expansion(setting: hard.Setting, kappa: float) -> float:
    """SubOpt of the private MLE less κ Fisher bonuses as n → ∞, with π*(rare) = ½: E(error of the margin)²/(8 kl_coef).

    The error is 1/√I noise and κ (1 − 2/C)/√I bias, I = n·2(C−1)/(S C²)·w(b) the information of one context's labels.
    """
    chance = 2.0 * (setting.coverage - 1.0) / (hard.CONTEXTS * setting.coverage**2)
    weight = float(fisher_weights(np.array([setting.offset]), setting.epsilon)[0])
    lean = kappa * (1.0 - 2.0 / setting.coverage)
    return (1.0 + lean**2) / (8.0 * setting.kl_coef * setting.comparisons * chance * weight)


def at_the_bound(repetitions: int, seed: int, sizes: Sequence[int] = (10**3, 10**4, 10**5)) -> list[hard.Risks]:
    """The instance at the corrected distance, (2α−1)² n in `sizes`; the families and ε of `hard.grid`, a < B/2."""
    generator = np.random.default_rng(seed)
    made = []
    for coverage, kl_coef, reward_bound in ((4.0, 0.5, 2.0), (10.0, 0.2, 1.0)):
        for epsilon in hard.EPSILONS:
            for size in sizes:
                number = round(size / factor(epsilon) ** 2)
                a = distance(coverage, epsilon, number)
                if a < reward_bound / 2.0:
                    setting = hard.Setting(coverage, kl_coef, reward_bound, epsilon, number, a)
                    made.append(hard.simulate(generator, setting, repetitions))
    return made


def random_channels(generator: np.random.Generator, epsilon: Array) -> Array:
    """ε-LDP channels of a binary label, one an entry of epsilon (N,): probabilities (N, label, OUTPUTS).

    The likelihood ratios are e^(±ε u), u uniform in [0, 1], half of the outputs above 1 and half below; the masses of
    the two halves are set so that both rows add up to 1.
    """
    ratio = np.exp(epsilon[:, None] * generator.uniform(0.0, 1.0, (len(epsilon), OUTPUTS)))
    ratio[:, 1::2] = 1.0 / ratio[:, 1::2]
    mass = generator.dirichlet(np.ones(OUTPUTS), len(epsilon))
    excess = mass * (ratio - 1.0)
    mass[:, ::2] *= -excess[:, 1::2].sum(axis=1, keepdims=True)
    mass[:, 1::2] *= excess[:, ::2].sum(axis=1, keepdims=True)
    mass /= mass.sum(axis=1, keepdims=True)
    return np.stack([mass, mass * ratio], axis=1)


def contraction(channels: int, seed: int) -> tuple[Array, Array]:
    """KL after a channel / ((2α−1)² KL before) for pairs of laws of a label: of random channels with random pairs, and
    of randomised response with close pairs at ½, where it is largest; (channels,) each.
    """
    generator = np.random.default_rng(seed)
    epsilon = generator.choice(np.array(hard.EPSILONS), channels)
    scale = np.array([factor(float(each)) for each in epsilon])
    keep = 0.5 * (1.0 + scale)
    response = np.moveaxis(np.array([[keep, 1.0 - keep], [1.0 - keep, keep]]), -1, 0)
    anywhere = generator.uniform(0.02, 0.98, (channels, 2))
    middle = 0.5 + generator.uniform(0.005, 0.02, (channels, 1)) * np.array([1.0, -1.0])

    def ratio(rows: Array, likely: Array) -> Array:
        before = np.stack([1.0 - likely, likely], axis=-1)  # (channels, law, label)
        after = before @ rows
        return np.asarray(_kl(after) / (scale**2 * _kl(before)))

    return ratio(random_channels(generator, epsilon), anywhere), ratio(response, middle)


def _kl(laws: Array) -> Array:
    """KL of the first law from the second, (N, 2, outcomes) -> (N,), nats."""
    return np.asarray((laws[:, 0] * np.log(laws[:, 0] / laws[:, 1])).sum(axis=-1))


def ratios(risks: Sequence[hard.Risks], policy: str, *, published: bool = False) -> Array:
    """SubOpt of a policy over the corrected (or the published) bound, a row a setting, (K, R)."""
    return np.stack([
        one.mean(policy) / (one.setting.lower_bound if published else bound(one.setting)) for one in risks
    ])


def claims(at: Sequence[hard.Risks], rate: Sequence[hard.Risks], channels: int, seed: int) -> Iterator[Claim]:
    """at: the instance at the bound's own distance; rate: at the hardest distance of randomised response."""
    yield from _proof_claims(at, channels, seed)
    floor = ratios(rate, FLOOR)
    where = f"over {len(rate)} settings, epsilon = 0.1 to 4"
    lowest = bootstrap(lambda values: float(values.mean(axis=1).min()), floor, seed)
    highest = bootstrap(lambda values: float(values.mean(axis=1).max()), floor, seed)
    name = "The best possible SubOpt is 12 to 16 times the corrected bound, up to an eighth, at every epsilon"
    yield within(f"{name}: from below", THEOREM, lowest, low=10.5, kind="corrected", what=f"smallest ratio {where}")
    yield within(f"{name}: from above", THEOREM, highest, high=18.0, kind="corrected", what=f"largest ratio {where}")
    epsilons = np.array([one.setting.epsilon for one in rate])
    forms: tuple[tuple[str, str, Kind], ...] = (
        ("corrected", THEOREM, "corrected"),
        ("published", "PPKL abstract (matching bounds)", "statement"),
    )
    for title, source, kind in forms:
        given = ratios(rate, FLOOR, published=title == "published")
        spread = bootstrap(lambda values: _spread(values, epsilons), given, seed)
        yield within(f"The best possible SubOpt follows the {title} bound from epsilon = 0.1 to 4", source, spread,
                     high=1.1, kind=kind, what="largest / smallest over epsilon of SubOpt / bound, geometric means")
    yield from _matching_claims(rate, seed)


def _proof_claims(at: Sequence[hard.Risks], channels: int, seed: int) -> Iterator[Claim]:
    """The contraction on which the proof rests, and the bound itself where it was derived."""
    anywhere, response = contraction(channels, seed)
    yield within("Every epsilon-LDP channel of a label contracts KL by (2 alpha - 1)^2", THEOREM, worst(anywhere),
                 high=1.0, kind="corrected", what=f"largest KL after / that of KL before, {channels} random channels")
    yield within("Randomised response reaches that contraction", THEOREM, worst(response), low=0.999, high=1.0,
                 kind="corrected", what=f"largest KL after / that of KL before, {channels} close pairs")
    tightest = min(at, key=lambda one: float(ratios([one], FLOOR).mean()))
    lowest = bootstrap(lambda values: float(values.mean()), ratios([tightest], FLOOR), seed)
    yield within("The corrected bound is a lower bound, at every epsilon from 0.1 to 4", THEOREM, lowest, low=1.0,
                 kind="corrected", what="the best policy's SubOpt / the bound, at the setting where it is smallest")


def _matching_claims(rate: Sequence[hard.Risks], seed: int) -> Iterator[Claim]:
    """The upper bound to match: the private MLE with and without Fisher pessimism, per ε, and its expansion."""
    for policy, high, name in ((MLE, 2.5, "Private MLE"), (PESSIMISTIC, 4.0, "Private MLE less the Fisher bonus")):
        for epsilon in hard.EPSILONS:
            chosen = [one for one in rate if one.setting.epsilon == epsilon]
            both = np.stack([ratios(chosen, policy), ratios(chosen, FLOOR)])
            value = bootstrap(lambda values: float((values[0].mean(axis=1) / values[1].mean(axis=1)).max()), both, seed)
            yield within(f"{name}, epsilon = {epsilon:g}: SubOpt within {high:g} times the best possible",
                         "this project", value, high=high, what="largest SubOpt / that of the posterior mean")
    largest = max(one.setting.comparisons * factor(one.setting.epsilon) ** 2 for one in rate)
    far = [one for one in rate if one.setting.comparisons * factor(one.setting.epsilon) ** 2 > 0.9 * largest]
    for policy, kappa in ((MLE, 0.0), (PESSIMISTIC, 1.0)):
        scale = np.array([expansion(one.setting, kappa) for one in far])
        values = np.stack([one.mean(policy) for one in far]) / scale[:, None]
        most = bootstrap(lambda values: float(np.abs(values.mean(axis=1) - 1.0).max()), values, seed)
        yield within(f"SubOpt of the {policy} is (1 + kappa^2 (1 - 2/C)^2)/(8 kl_coef I), kappa = {kappa:g}",
                     "this project", most, high=0.1, what="largest |SubOpt / expansion - 1| at the largest n")


def _spread(values: Array, epsilons: Array) -> float:
    """Largest over smallest ε of the geometric mean over settings, values (K, R)."""
    logs = np.log(values.mean(axis=1))
    means = [logs[epsilons == epsilon].mean() for epsilon in np.unique(epsilons)]
    return math.exp(max(means) - min(means))


def figure(rate: Sequence[hard.Risks]) -> Figure:
    """SubOpt over the corrected bound against ε for the best policy and the MLEs, a panel a family; dashed: over Eq. 12
    as published.
    """
    drawing, axes = new_figure(2)
    for axis, coverage in zip(axes, (4.0, 10.0), strict=True):
        chosen = [one for one in rate if one.setting.coverage == coverage]
        epsilons = sorted({one.setting.epsilon for one in chosen})
        for place, policy in enumerate((FLOOR, MLE, PESSIMISTIC)):
            axis.plot(epsilons, _levels(chosen, policy, published=False), "o-", color=COLOURS[place], label=policy)
        axis.plot(epsilons, _levels(chosen, FLOOR, published=True), "s--", color=COLOURS[5],
                  label=f"{FLOOR} / Eq. 12 as published")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="ε", title=f"SubOpt / corrected bound, C = {coverage:g}")
    axes[0].legend(fontsize=6)
    return drawing


def _levels(risks: Sequence[hard.Risks], policy: str, *, published: bool) -> list[float]:
    """Geometric mean of SubOpt / bound over n, per ε in rising order."""
    epsilons = np.array([one.setting.epsilon for one in risks])
    logs = np.log(ratios(risks, policy, published=published).mean(axis=1))
    return [math.exp(logs[epsilons == epsilon].mean()) for epsilon in np.unique(epsilons)]


def rows(risks: Sequence[hard.Risks]) -> list[dict[str, object]]:
    """For lower_bound.csv."""
    return [
        {"coverage": one.setting.coverage, "kl_coef": one.setting.kl_coef, "epsilon": one.setting.epsilon,
         "n": one.setting.comparisons, "distance": one.setting.distance, "corrected_bound": bound(one.setting),
         "published_bound": one.setting.lower_bound,
         **{policy: float(one.mean(policy).mean()) for policy in (FLOOR, MLE, PESSIMISTIC)}}
        for one in risks
    ]
