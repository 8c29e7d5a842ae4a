"""PRL Appendix B: an infinite class through an explicit β-cover, its price in regret and how fine it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.private_rl.rates import BOUND, EPSILON, ROOT, Growth, growth
from private_rlhf_lab.studies.private_rl.updates import PAPER
from private_rlhf_lab.studies.private_rl.worlds import covered_worlds

MATCHED = "cover with beta ~ K^(-2/5)"


@dataclass(frozen=True)
class Covers:
    """Growth by number of parameter values N a stage (β = 1/(2N)), private and not; and private with N ~ K^{2/5}."""

    private: Mapping[int, Growth]
    plain: Mapping[int, Growth]
    matched: Growth

    def rows(self) -> list[dict[str, object]]:
        """For a CSV."""
        kinds = [("private", n, each) for n, each in self.private.items()]
        kinds += [("non-private", n, each) for n, each in self.plain.items()]
        found = [{"kind": kind, "members": n, **row} for kind, n, each in kinds for row in each.rows()]
        counts = [matched_members(int(k)) for k in self.matched.episodes]
        return found + [
            {"kind": "private", "members": n, **row} for n, row in zip(counts, self.matched.rows(), strict=True)
        ]


def matched_members(episodes: int) -> int:
    """N with β = 1/(2N) proportional to K^{−2/5}, so that βK grows as K^{3/5}; 32 at K = 128,000."""
    return max(2, round(32 * (episodes / 128_000) ** 0.4))


def measure(quick: bool) -> Covers:
    """Covers of 2 to 32 values a stage."""
    counts = [500 * 4**power for power in range(4 if quick else 5)]
    count, runs = (16, 1) if quick else (32, 4)
    sizes = (2, 4, 8, 16) if quick else (2, 4, 8, 16, 32)
    worlds = {n: covered_worlds(n, count) for n in sizes}
    parts = [growth(BOUND, covered_worlds(matched_members(k), count), [k], runs) for k in counts]
    return Covers(
        {n: growth(BOUND, worlds[n], counts, runs) for n in sizes},
        {n: growth(ROOT, worlds[n], counts, runs) for n in sizes},
        Growth(MATCHED, np.array(counts), np.concatenate([each.regret for each in parts])),
    )


def claims(covers: Covers) -> list[Claim]:
    """The extra regret of a cover is of order βK; a cover that grows with K keeps the exponent 3/5."""
    last = float(covers.matched.episodes[-1])
    finest = covers.plain[max(covers.plain)].regret[-1]
    # (covers, instances), in units of βK
    extra = np.stack([(each.regret[-1] - finest) * 2 * n / last for n, each in covers.plain.items()])
    largest = bootstrap(lambda drawn: float(drawn.mean(axis=1).max()), extra, 22, 2000)
    return [
        within("A beta-cover costs at most beta K more regret than the finest, without privacy",
               f"{PAPER} Corollary B.2", largest, high=1.0,
               what="largest mean extra regret / (beta K)"),
        covers.matched.exponent(
            f"A cover with beta proportional to K^(-2/5) keeps the exponent at most 3/5, eps = {EPSILON:g}",
            "Corollary B.2", 0.6, slice(None)),
    ]
