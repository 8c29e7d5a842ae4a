"""What Theorem 4.2 says of everything but n and ε: β, B, log N and D²; and Remark 4.4 on regularised against
unregularised rates.

Each problem varies one of them and holds the rest; contexts have two responses, so that all is a margin per context.
The theorem is SubOpt <= c β D²_{π*} e^B log(N/δ)/((2α−1)² n). Its e^B is a slip: Eq. 15 bounds |σ(x) − σ(y)|² from
below by σ'(B) (x − y)² where it must be σ'(B)² (x − y)². Without privacy a sharper argument restores e^B, because the
labels' variance is as small as σ'(B) there; behind randomised response the variance is that of the flips, and e^(2B) is
the truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.core.stats import Estimate, bootstrap, standard_error
from private_rlhf.validation.bandits import (
    Array,
    Bandit,
    Counts,
    factor,
    offline_counts,
    slope_of_mean,
    total_loss,
)
from private_rlhf.validation.lab import COLOURS, Claim, Kind, new_figure, within
from scipy.linalg import hadamard

from private_rlhf_lab.studies.offline.finite import centred
from private_rlhf_lab.studies.offline.hard import tabular_margin

BETAS = (2.0, 4.0, 8.0, 16.0)
RANGES = (4.0, 6.0, 8.0, 10.0)
SIZES = (4, 8, 16, 32, 64)
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
CUBES = (2, 4, 8, 16, 32)
STEPS = (0.5, 1.0, 1.5, 2.0, 3.0)  # half-distances in units of 1/((2α−1) √n)
NUMBERS = (1e3, 1e4, 1e5, 1e6)


@dataclass(frozen=True)
class Sweep:
    """SubOpt (K, R) of the private MLE where one quantity takes `values` (K,), all in the same unit."""

    name: str
    epsilon: float
    values: Array
    subopt: Array

    def exponent(self, seed: int) -> Estimate:
        """Of SubOpt in `values`."""
        return bootstrap(slope_of_mean(self.values), self.subopt, seed)


def two_responses(margin: Array, rare: Array, kl_coef: float) -> Bandit:
    """Contexts with margins (..., S) of the first response, to which π_ref gives `rare` (S,)."""
    reference = np.broadcast_to(np.stack([rare, 1.0 - rare], axis=-1), (*margin.shape, 2))
    return Bandit(np.stack([margin, np.zeros_like(margin)], axis=-1), np.log(reference[..., :, :]), kl_coef)


def gap(bandit: Bandit, margin: Array) -> Array:
    """SubOpt of the Gibbs policies of estimated margins (R, S), (R,)."""
    return bandit.suboptimality(bandit.gibbs(np.stack([margin, np.zeros_like(margin)], axis=-1)))


def _draw(generator: np.random.Generator, bandit: Bandit, size: float, repetitions: int, epsilon: float) -> Counts:
    """`size` is (2α−1)² n."""
    return offline_counts(generator, bandit, round(size / factor(epsilon) ** 2), repetitions, epsilon)


def betas(repetitions: int, seed: int, epsilon: float = 1.0) -> Sweep:
    """β = 1/kl_coef, with π* at ½ of the rare response always: margin log(C−1)/β, C = 4, so D² and C* stay."""
    generator = np.random.default_rng(seed)
    found = []
    for beta in BETAS:
        bandit = two_responses(np.full(8, math.log(3.0) / beta), np.full(8, 0.25), 1.0 / beta)
        counts = _draw(generator, bandit, 1e6, repetitions, epsilon)
        found.append(gap(bandit, tabular_margin(counts, epsilon, 2.0)))
    return Sweep("beta", epsilon, np.array(BETAS), np.stack(found))


def ranges(repetitions: int, seed: int, epsilon: float) -> Sweep:
    """e^B: one context, rewards B and 0, both responses equally likely, β = 1/(10 B): D² = 1, π* as good as fixed.

    SubOpt is divided by β, and n = 100 e^(2B) labels a (2α−1)²: by 1/((2α−1)² n).
    """
    generator = np.random.default_rng(seed)
    found = []
    for bound in RANGES:
        bandit = two_responses(np.array([bound]), np.array([0.5]), 10.0 * bound)
        size = 100.0 * math.exp(2.0 * bound)
        counts = _draw(generator, bandit, size, repetitions, epsilon)
        found.append(gap(bandit, tabular_margin(counts, epsilon, bound)) * bandit.kl_coef * size)
    return Sweep("e^B", epsilon, np.exp(np.array(RANGES)), np.stack(found))


def codes(repetitions: int, seed: int, epsilon: float = 1.0) -> Sweep:
    """log N with D² fixed: N rows of a Hadamard matrix over 64 contexts, rewards ± a: any two differ in half of them.

    At every N the half-distance a is the one of a grid where the mean SubOpt of the MLE is largest.
    """
    generator, contexts, size = np.random.default_rng(seed), max(SIZES), 1e4
    rows = hadamard(contexts).astype(np.float64)
    found = []
    for members in SIZES:
        worst: Array | None = None
        for step in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0):
            code = rows[:members] * step / math.sqrt(size)
            bandit = two_responses(code[0], np.full(contexts, 0.25), 0.2)
            chosen = total_loss(_draw(generator, bandit, size, repetitions, epsilon), code, epsilon).argmin(axis=1)
            risk = gap(bandit, code[chosen])
            worst = risk if worst is None or risk.mean() > worst.mean() else worst
        found.append(worst)
    return Sweep("log N", epsilon, np.log(np.array(SIZES)), np.stack(found))  # type: ignore[arg-type]


def shares(repetitions: int, seed: int, epsilon: float = 1.0) -> tuple[Sweep, Array]:
    """D²_{π*} with C* fixed: a share of 8 contexts has reference mass 1/16 on the response that π* takes half of the
    time, the others ½; the class is one parameter, a margin shift of all contexts. And C* at every share (K,).
    """
    generator, beta = np.random.default_rng(seed), 5.0
    found, concentration, ratio = [], [], []
    for share in SHARES:
        rare = np.where(np.arange(8) < 8 * share, 1.0 / 16.0, 0.5)
        margin = np.log(1.0 / rare - 1.0) / beta
        bandit = two_responses(margin, rare, 1.0 / beta)
        counts = _draw(generator, bandit, 1e5, repetitions, epsilon)
        shift = _shift(counts, margin, epsilon)
        found.append(gap(bandit, margin + shift[:, None]))
        difference = centred(np.tile([1.0, 0.0], (8, 1)), bandit.log_reference)
        policy = np.exp(bandit.gibbs(bandit.reward))
        variance = (np.exp(bandit.log_reference) * difference**2).sum(axis=1).mean()
        concentration.append((policy * difference**2).sum(axis=1).mean() / variance)
        ratio.append(float((policy / np.exp(bandit.log_reference)).max()))
    return Sweep("D^2", epsilon, np.array(concentration), np.stack(found)), np.array(ratio)


def _shift(counts: Counts, margin: Array, epsilon: float) -> Array:
    """The MLE of one shift of all margins, (R,), over a grid as fine as a tenth of its standard error."""
    grid = np.linspace(-0.6, 0.6, 1201)
    return np.asarray(grid[total_loss(counts, margin + grid[:, None], epsilon).argmin(axis=1)])


def cubes(repetitions: int, seed: int, epsilon: float = 1.0) -> Sweep:
    """S contexts of the hard instance (C = 4) at fixed n, the class of all 2^S signs: D²_{π*} log N is like C S²."""
    generator, size = np.random.default_rng(seed), 1e5
    found = []
    for contexts in CUBES:
        sign = np.tile([1.0, -1.0], contexts // 2)
        a = 2.0 * math.sqrt(4.0 * contexts / size)
        bandit = two_responses(0.5 * math.log(3.0) + sign * a, np.full(contexts, 0.25), 0.5)
        counts = _draw(generator, bandit, size, repetitions, epsilon)
        found.append(gap(bandit, tabular_margin(counts, epsilon, 2.0)))
    return Sweep("S^2", epsilon, np.array(CUBES) ** 2.0, np.stack(found))


def objectives(repetitions: int, seed: int, epsilon: float) -> tuple[Sweep, Sweep]:
    """The worst margin's loss of reward without KL (the better response by the MLE) and SubOpt with it (kl_coef 1),
    against n, on the same labels: one context, responses equally likely, margins ± STEPS/((2α−1) √n).
    """
    generator = np.random.default_rng(seed)
    plain: list[Array] = []
    regularised: list[Array] = []
    for size in NUMBERS:
        losses, gaps = [], []
        for step in STEPS:
            a = step / math.sqrt(size)
            bandit = two_responses(np.array([a]), np.array([0.5]), 1.0)
            margin = tabular_margin(_draw(generator, bandit, size, repetitions, epsilon), epsilon, 1.0)
            losses.append(a * 0.5 * (1.0 - np.sign(margin[:, 0])))
            gaps.append(gap(bandit, margin))
        for made, each in ((plain, losses), (regularised, gaps)):
            made.append(max(each, key=lambda values: float(values.mean())))
    numbers = np.array([round(size / factor(epsilon) ** 2) for size in NUMBERS], dtype=np.float64)
    losses_of = (("n, unregularised", plain), ("n", regularised))
    first, second = (Sweep(name, epsilon, numbers, np.stack(made)) for name, made in losses_of)
    return first, second


@dataclass(frozen=True)
class Dependence:
    """sweeps: in the order of `claims`. ratio: C* along the sweep of D²."""

    sweeps: dict[str, Sweep]
    ratio: Array


def measure(repetitions: int, seed: int) -> Dependence:
    """Every sweep, bit-reproducible; the cheap ones with ten times the repetitions."""
    many = 10 * repetitions
    concentration, ratio = shares(2 * repetitions, seed + 3)
    unregularised, regularised = objectives(many, seed + 5, 0.5)
    public, _ = objectives(many, seed + 6, 2.0)
    return Dependence(
        {
            "beta": betas(many, seed),
            "range, private": ranges(many, seed + 1, 0.5),
            "range, public": ranges(many, seed + 1, math.inf),
            "log N": codes(repetitions, seed + 2),
            "D^2": concentration,
            "S^2": cubes(many, seed + 4),
            "n, unregularised": unregularised,
            "n, unregularised, epsilon = 2": public,
            "n": regularised,
        },
        ratio,
    )


def claims(found: Dependence, seed: int) -> Iterator[Claim]:
    """The exponent of every quantity, and the two rates of Remark 4.4."""
    theorem = "PPKL Theorem 4.2"
    cases: tuple[tuple[str, str, str, float, float, Kind, str], ...] = (
        ("beta", "SubOpt grows in proportion to beta = 1/kl_coef (D^2 and C* fixed)", theorem,
         0.85, 1.05, "statement", "beta over 2 to 16, epsilon = 1"),
        ("range, public", "SubOpt grows no faster than e^B without privacy", theorem,
         -math.inf, 1.1, "statement", "e^B over B = 4 to 10"),
        ("range, private", "SubOpt grows no faster than e^B", theorem,
         -math.inf, 1.1, "statement", "e^B over B = 4 to 10, epsilon = 0.5"),
        ("range, private", "SubOpt grows no faster than e^(2B): Eq. 15 with sigma'(B)^2", "PPKL Theorem 4.2, corrected",
         -math.inf, 2.05, "corrected", "e^B over B = 4 to 10, epsilon = 0.5"),
        ("log N", "SubOpt grows in proportion to log N (D^2 fixed)", theorem,
         0.7, 1.1, "statement", "log N over N = 4 to 64, epsilon = 1, worst distance of the members"),
        ("D^2", "SubOpt grows no faster than D^2 (C* fixed)", theorem,
         -math.inf, 1.0, "statement", "D^2 over 1 to 7.5, epsilon = 1"),
        ("S^2", "D^2 log N is tight on the hard instance of Theorem 4.5", "PPKL Theorem 4.2, read as tight",
         0.9, 1.1, "reading", "D^2 log N ~ S^2 over S = 2 to 32 contexts, epsilon = 1"),
        ("n, unregularised", "Without KL the worst loss falls like 1/sqrt n", "PPKL Remark 4.4",
         -0.55, -0.45, "statement", "n over 3 decades, epsilon = 0.5"),
        ("n", "With KL, on the same labels, the worst SubOpt falls like 1/n", "PPKL Remark 4.4",
         -1.05, -0.95, "statement", "n over 3 decades, epsilon = 0.5"),
    )  # fmt: skip
    stated = {"n, unregularised": "exponent -1/2", "n": "exponent -1"}
    for name, text, source, low, high, kind, what in cases:
        yield within(text, source, found.sweeps[name].exponent(seed), low=low, high=high, kind=kind,
                     paper=stated.get(name, "exponent 1"), what=f"the exponent of {what}")
    both = [found.sweeps[f"n, unregularised{suffix}"] for suffix in ("", ", epsilon = 2")]
    scale = np.stack([1.0 / (factor(each.epsilon) * np.sqrt(each.values)) for each in both])
    spread = bootstrap(lambda values: _spread(values, scale), np.stack([each.subopt for each in both]), seed)
    yield within("Without KL the worst loss is proportional to 1/((2 alpha - 1) sqrt n)", "PPKL Remark 4.4", spread,
                 high=1.1, what="larger / smaller of epsilon = 0.5 and 2 in that unit")


def _spread(values: Array, scale: Array) -> float:
    """Largest over smallest row of the geometric mean over n of mean / scale, (E, K, R) and (E, K)."""
    return math.exp(float(np.ptp(np.log(values.mean(axis=2) / scale).mean(axis=1))))


def figure(found: Dependence) -> Figure:
    """SubOpt in units of its smallest against each quantity in units of its smallest; grey: in proportion."""
    names = ("beta", "range, private", "range, public", "log N", "D^2", "S^2")
    drawing, axes = new_figure(2)
    for place, name in enumerate(names):
        sweep, axis = found.sweeps[name], axes["range" in name]
        mean = sweep.subopt.mean(axis=1)
        axis.plot(sweep.values / sweep.values[0], mean / mean[0], "o-", color=COLOURS[place % 5], label=name)
    for axis, end in zip(axes, (300.0, 500.0), strict=True):
        axis.plot([1.0, end], [1.0, end], color=COLOURS[5], linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="quantity / its smallest", title="SubOpt / its smallest")
        axis.legend()
    return drawing


def rows(found: Dependence) -> list[dict[str, object]]:
    """For dependence.csv."""
    return [
        {"sweep": name, "epsilon": sweep.epsilon, "value": value, "subopt": subopt.mean(),
         "standard_error": float(standard_error(subopt))}
        for name, sweep in found.sweeps.items()
        for value, subopt in zip(sweep.values, sweep.subopt, strict=True)
    ]
