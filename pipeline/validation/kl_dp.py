"""KL regularisation as differential privacy: Lemma 1 and Proposition 1 by exact losses of Gibbs policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.figure import Figure
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.lab import COLOURS, Array, Claim, Kind, Report, new_figure, within, worst

ROUNDING = 1e-7
OURS = "KL-DP paper, corrected:"


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
    """Both halves of Proposition 1 on every data set over {0, 1} with at most `largest` records. The counterexample to
    the second half outputs the number of records; its table δ(ε) is under swap and add-remove neighbours."""
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
