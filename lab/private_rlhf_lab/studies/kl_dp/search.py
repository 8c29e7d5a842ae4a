"""A search over neighbouring data sets for the largest measured loss relative to its bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.accounting.draws import Thresholds
from private_rlhf.accounting.guarantee import Guarantee
from private_rlhf.validation.lab import Claim, Kind, within, worst

from private_rlhf_lab.studies.kl_dp.exact import Array, hockey_stick

ROUNDING = 1e-7
OURS = "KL-DP paper, corrected:"


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


def threshold_ratios(
    first: Array,
    second: Array,
    core: Array,
    spread: Array,
    log_reference: Array,
    actions: Array,
    promise: Callable[[int, Thresholds], Guarantee],
) -> Array:
    """Measured δ over promised δ where that is below 1, for an approximate statement with thresholds.

    first, second (b, A): log policies of the pairs. core, spread (b, A): widths ‖φ_a‖ under the smaller and the larger
    set. actions (A, d): their features. promise: of pair i for a split. The core level is the smallest width; τ lies
    just above it, or half way up.
    """
    ratios = []
    reference = np.exp(log_reference)
    for i in range(len(first)):
        inner = core[i].min()
        for tau in (1.001 * inner, 0.5 * (spread[i].min() + spread[i].max())):
            outer, centre = spread[i] > tau, core[i] <= inner
            if not outer.any() or tau <= inner:
                continue
            odds = reference[outer].sum() / reference[centre].sum()
            apart = np.linalg.norm(actions[outer][:, None] - actions[centre][None], axis=2).max()
            result = promise(i, Thresholds(float(tau), float(inner), float(odds), float(apart)))
            if result.delta < 1.0:
                ratios.append(float(hockey_stick(first[i], second[i], result.epsilon)) / max(result.delta, 1e-12))
    return np.array(ratios)
