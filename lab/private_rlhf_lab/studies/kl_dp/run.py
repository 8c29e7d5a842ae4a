"""The study kl_dp: every accountant of Gibbs draws against brute force, and what the privacy is worth."""

from __future__ import annotations

from private_rlhf.validation.lab import Claim, Report, within

from private_rlhf_lab.studies.kl_dp import bandit, combined, conventions, equal_utility, extremes, linear, plots, rlhf
from private_rlhf_lab.studies.kl_dp.search import OURS, ROUNDING, Search


def run(quick: bool) -> Report:
    """All searches, the counterexamples and the comparison; deterministic. `quick` takes smaller sets, fewer fits."""
    curves = equal_utility.measure(8 if quick else 60)
    searches = [
        *combined.lemma(4000 if quick else 20_000),
        *bandit.searches(5 if quick else 8),
        *linear.searches(2 if quick else 4),
        *rlhf.searches(3 if quick else 5, (0.5, 2.0) if quick else (0.5, 1.0, 2.0)),
        *rlhf.threshold_searches(2 if quick else 4),
        *conventions.searches(2 if quick else 4),
        *combined.many_draws(200 if quick else 2000),
        *combined.inexact(300 if quick else 3000),
        combined.randomised_labels(),
        equal_utility.search(curves),
    ]
    proposition, sizes = combined.proposition_one()
    figure, parameters = plots.parameters()
    return Report(
        name="kl_dp",
        claims=[
            *(search.verdict() for search in searches),
            *extremes.claims(),
            *conventions.claims(),
            *_published(20_000 if not quick else 4000),
            *proposition,
            *equal_utility.claims(curves),
        ],
        tables={
            "tightness": [search.row() for search in searches],
            "parameters": [{"delta": None, **row} for row in parameters],
            "proposition_1": sizes,
            "equal_utility": equal_utility.table(curves),
        },
        figures={
            "parameters": figure,
            "tightness": plots.tightness(_statements(searches)),
            "proposition_1": plots.proposition(sizes),
            "equal_utility": plots.utility(curves),
        },
    )


def _statements(searches: list[Search]) -> list[Search]:
    return [search for search in searches if search.source.startswith(OURS)]


def _published(pairs: int) -> list[Claim]:
    """Constants that the paper's text suggests and that single instances violate."""
    return [
        within("RLHF: gamma = 1/(2 + e^B + e^-B) is enough when feature norms are at most 1",
               "reading of the KL-DP paper, Theorem 3", rlhf.halved_exponent_ratio(2.0, pairs), high=1.0 + ROUNDING,
               kind="reading",
               what="label-flip loss / bound of the extremal preference set at B = 2"),
        within("RLHF: the bound with lambda in Sigma holds without a ridge in the likelihood", "KL-DP paper eq. 26",
               rlhf.unridged_ratio(100.0), high=1.0 + ROUNDING, kind="reading",
               what="label-flip loss / bound of one pair at lambda = 100, B = 1"),
    ]
