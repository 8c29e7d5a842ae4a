"""KL regularisation as differential privacy: Lemma 1 and Proposition 1 by exact losses of Gibbs policies.

Batched numpy; b batch, A actions.

Data sets are counts over a finite list of record types: enumerating multisets enumerates data sets, and a neighbour is
one count more or less (or moved, for a flipped label).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.lab import (
    COLOURS,
    Array,
    Claim,
    Integers,
    Kind,
    Report,
    minimise,
    new_figure,
    within,
    worst,
)
from scipy.special import expit

ROUNDING = 1e-7
OURS = "KL-DP paper, corrected:"
TOLERANCE = 1e-26  # nats; only rounding keeps a decrement above it


def loss(log_p: Array, log_q: Array) -> Array:
    """max_a |log p(a)/q(a)|, (…, A) twice -> (…,); ∞ where only one of them is 0, actions with p = q = 0 left out."""
    both = np.isneginf(log_p) & np.isneginf(log_q)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(both, 0.0, np.abs(log_p - log_q)).max(axis=-1))


def hockey_stick(log_p: Array, log_q: Array, epsilon: Array | float) -> Array:
    """max over both directions of Σ (p − e^ε q)_+: the exact δ of the pair at ε; (…, A) twice -> (…,)."""
    factor = np.exp(np.asarray(epsilon))[..., None]
    p, q = np.exp(log_p), np.exp(log_q)
    forward = np.maximum(p - factor * q, 0.0).sum(axis=-1)
    return np.asarray(np.maximum(forward, np.maximum(q - factor * p, 0.0).sum(axis=-1)))


def multisets(types: int, largest: int, smallest: int = 0) -> Array:
    """All counts over `types` record types with smallest..largest records, (b, types)."""
    rows = [
        np.bincount(np.array(chosen, dtype=np.int64), minlength=types)
        for size in range(smallest, largest + 1)
        for chosen in combinations_with_replacement(range(types), size)
    ]
    return np.array(rows, dtype=np.float64)


def bandit_utility(counts: Array, sums: Array, pessimism: float, *, optional: bool = False) -> Array:
    """u(a) = mean − β/√N, (b, K); −∞ for an arm without records, unless `optional`: then mean 0 and N = 1."""
    seen = np.maximum(counts, 1.0)
    utility = sums / seen - pessimism / np.sqrt(seen)
    return utility if optional else np.where(counts > 0, utility, -np.inf)


def gram(counts: Array, features: Array, ridge: float) -> Array:
    """λI + Σ c_t φ_t φ_tᵀ, (b, T), (T, d) -> (b, d, d)."""
    return np.einsum("bt,ti,tj->bij", counts, features, features) + ridge * np.eye(features.shape[1])


def least_eigenvalue(matrix: Array) -> Array:
    """λ_min of symmetric matrices, (b, d, d) -> (b,)."""
    return np.asarray(np.linalg.eigvalsh(matrix)[:, 0], dtype=np.float64)


def width(actions: Array, matrix: Array) -> Array:
    """‖φ_a‖_{Σ^−1}, (A, d), (b, d, d) -> (b, A)."""
    solved = np.linalg.solve(matrix, np.broadcast_to(actions.T, (len(matrix), *actions.T.shape)))
    return np.asarray(np.sqrt(np.einsum("ai,bia->ba", actions, solved)))


def ridge_estimate(counts: Array, features: Array, rewards: Array, ridge: float) -> Array:
    """θ̂ = Σ^−1 Σ c φ r, (b, d)."""
    moments = np.einsum("bt,ti,t->bi", counts, features, rewards)
    return np.asarray(np.linalg.solve(gram(counts, features, ridge), moments[..., None])[..., 0])


def bradley_terry(counts: Array, signed: Array, ridge: float, radius: float) -> Array:
    """The minimiser of Σ c_t log(1 + exp(−θᵀ(y x)_t)) + (κ/2)‖θ‖² over ‖θ‖ ≤ B, (b, T), (T, d) -> (b, d).

    By Newton's method; where the free minimiser leaves the ball, the ridge grows until its norm is B (the multiplier of
    the constraint is a ridge). κ = 0 is allowed with radius < ∞. Residuals are at rounding level.
    """
    batch, dimension = len(counts), signed.shape[1]
    least = max(ridge, 1e-9)
    start = np.zeros((batch, dimension))
    theta, _ = minimise(_Logistic(counts, signed, np.full(batch, least)), start, tolerance=TOLERANCE)
    outside = np.flatnonzero(np.linalg.norm(theta, axis=1) > radius)
    if not len(outside):
        return theta
    few, inner = counts[outside], theta[outside]
    # The gradient of the loss is at most Σ c‖x‖, so this multiplier holds the minimiser inside.
    low, high = np.zeros(len(outside)), few @ np.linalg.norm(signed, axis=1) / radius + 1e-9
    for _ in range(60):
        middle = 0.5 * (low + high)
        inner, _ = minimise(_Logistic(few, signed, least + middle), inner, steps=6, tolerance=TOLERANCE)
        large = np.linalg.norm(inner, axis=1) > radius
        low, high = np.where(large, middle, low), np.where(large, high, middle)
    theta[outside] = inner * (radius / np.linalg.norm(inner, axis=1, keepdims=True))
    return theta


@dataclass(frozen=True)
class _Logistic:
    """Ridge-penalised logistic losses; counts (b, T), signed (T, d), ridge (b,)."""

    counts: Array
    signed: Array
    ridge: Array

    def value(self, theta: Array, rows: Integers) -> Array:
        losses = (self.counts[rows] * np.logaddexp(0.0, -(theta @ self.signed.T))).sum(axis=1)
        return np.asarray(losses + 0.5 * self.ridge[rows] * (theta**2).sum(axis=1))

    def derivatives(self, theta: Array, rows: Integers) -> tuple[Array, Array]:
        missing = expit(-(theta @ self.signed.T))
        ridge, counts = self.ridge[rows, None], self.counts[rows]
        hessian = gram(counts * missing * (1.0 - missing), self.signed, 0.0) + ridge[..., None] * np.eye(len(theta[0]))
        return ridge * theta - (counts * missing) @ self.signed, hessian


@dataclass(frozen=True)
class Search:
    """claim: what is bounded by what. ratios: measured/bound per neighbouring pair, (n,)."""

    claim: str
    source: str
    ratios: Array

    def verdict(self) -> Claim:
        """Holds if no pair exceeds its bound by more than rounding."""
        return within(self.claim, self.source, worst(self.ratios), high=1.0 + ROUNDING, kind=self.kind,
                      what=f"largest measured / bound over {self.ratios.size} neighbouring pairs")

    @property
    def kind(self) -> Kind | None:
        """Corrected or a reading by its source; else as `within` has it."""
        if self.source.startswith("reading"):
            return "reading"
        return "corrected" if self.source.startswith(OURS) else None

    def row(self) -> Mapping[str, object]:
        """For tightness.csv."""
        return {"claim": self.claim, "source": self.source, "pairs": self.ratios.size,
                "largest": worst(self.ratios), "median": float(np.median(self.ratios)) if self.ratios.size else None}


def joined(claim: str, source: str, parts: Sequence[Array]) -> Search:
    """One search from the ratios of several settings."""
    return Search(claim, source, np.concatenate([np.atleast_1d(part).ravel() for part in parts]))


def lemma(instances: int, seed: int = 0) -> list[Search]:
    """Lemma 1 and its approximate part on random policies: five actions, the last two in A2, large changes there."""
    generator = np.random.default_rng(seed)
    log_reference = np.log(generator.dirichlet(np.full(5, 0.5), instances) + 1e-12)
    before = generator.normal(0.0, 2.0, (instances, 5))
    change = generator.uniform(-1.0, 1.0, (instances, 5)) * generator.uniform(0.01, 1.0, (instances, 1))
    change[:, 3:] = generator.normal(0.0, 4.0, (instances, 2))
    first = gibbs_log_policy(before, log_reference, 1.0)
    second = gibbs_log_policy(before + change, log_reference, 1.0)
    spread = np.ptp(change, axis=1)
    near = np.ptp(change[:, :3], axis=1)
    twice = 2.0 * np.abs(change[:, :3]).max(axis=1)
    outside = np.exp(np.stack([first[:, 3:], second[:, 3:]])).sum(axis=2)
    pointwise = np.abs(first - second)[:, :3].max(axis=1)
    corrected = near - np.log1p(-outside.max(axis=0))
    measured = hockey_stick(first, second, near)
    single = hockey_stick(first, second, twice)
    source = "KL-DP paper Lemma 1"
    return [
        joined("Lemma 1: the loss is at most range(d)", f"{OURS} Lemma 1", [loss(first, second) / spread]),
        joined("Lemma 1, approximate: delta = larger mass of A2", f"{OURS} Lemma 1, approximate",
               [measured / outside.max(axis=0)]),
        joined("Corrected ratio on A1: range - log(1 - mass of A2)", f"{OURS} Appendix A", [pointwise / corrected]),
        joined("Published proof step: ratio on A1 at most e^(2 Delta)", f"{source}, appendix A", [pointwise / twice]),
        joined("Lemma 1 read one-sidedly: delta = mass of A2 under D alone", f"reading of the {source}",
               [single / outside.min(axis=0)]),
    ]


def proposition_one(largest: int = 3) -> tuple[list[Claim], list[dict[str, float]]]:
    """Both halves of Proposition 1 on every data set over {0, 1} with at most `largest` records.

    The counterexample to the second half outputs the number of records. Also the table δ(ε) of that mechanism under
    swap and under add-remove neighbours.
    """
    data = [(n, ones) for n in range(largest + 1) for ones in range(n + 1)]
    swaps = [(a, b) for a, b in product(data, repeat=2) if a[0] == b[0] and abs(a[1] - b[1]) == 1]
    adds = [(a, b) for a, b in product(data, repeat=2) if b[0] == a[0] + 1 and b[1] - a[1] in (0, 1)]

    def size(state: tuple[int, int]) -> Array:
        return np.log(np.where(np.arange(largest + 1) == state[0], 1.0, 1e-300))

    def gibbs(state: tuple[int, int]) -> Array:
        mean = state[1] / max(state[0], 1)
        return gibbs_log_policy(np.array([mean, 0.0]), np.log([0.01, 0.99]), 0.5)

    rows = []
    for epsilon in np.linspace(0.0, 20.0, 21):
        delta = [max(float(hockey_stick(size(a), size(b), epsilon)) for a, b in kind) for kind in (swaps, adds)]
        rows.append({"epsilon": float(epsilon), "delta_swap": delta[0], "delta_add_remove": delta[1]})
    added = max(float(loss(gibbs(a), gibbs(b))) for a, b in adds)
    swapped = max(float(loss(gibbs(a), gibbs(b))) for a, b in swaps)
    source = "KL-DP paper Proposition 1"
    first = within("An e-add-remove-DP mechanism is 2e-swap-DP (first half)", source, swapped / (2.0 * added),
                   high=1.0 + ROUNDING,
                   what="largest swap loss / (2 * largest add-remove loss) of a Gibbs policy over all data sets")
    premise = within("The mechanism that outputs the number of records is 0-swap-DP",
                     "KL-DP paper Proposition 1, second half", rows[0]["delta_swap"], high=1e-12,
                     what="largest delta over swap neighbours at epsilon 0")
    second = within("A swap-DP mechanism is add-remove DP (second half)", source, rows[-1]["delta_add_remove"],
                    high=1e-12, what="largest delta at epsilon 20 over add-remove neighbours of that mechanism")
    return [first, premise, second], rows


def proposition(rows: Sequence[Mapping[str, float]]) -> Figure:
    """δ against ε of the mechanism that outputs the number of records."""
    figure, (axes,) = new_figure(1)
    epsilon = [row["epsilon"] for row in rows]
    axes.plot(epsilon, [row["delta_swap"] for row in rows], color=COLOURS[0], label="swap neighbours")
    axes.plot(epsilon, [row["delta_add_remove"] for row in rows], color=COLOURS[1], label="add-remove neighbours")
    axes.set(xlabel="ε", ylabel="exact δ", ylim=(-0.05, 1.1), title="Output |D|: swap-DP, not add-remove DP")
    axes.legend()
    return figure


def run(quick: bool) -> Report:
    """Lemma 1 on random policies and both halves of Proposition 1; `quick` takes fewer policies."""
    searches = lemma(4000 if quick else 20_000)
    claims, sizes = proposition_one()
    return Report(
        name="kl_dp",
        claims=[*(search.verdict() for search in searches), *claims],
        tables={"tightness": [search.row() for search in searches], "proposition_1": sizes},
        figures={"proposition_1": proposition(sizes)},
    )
