"""A published or derived claim with the number that decides it. Verdicts follow from the criterion, never by hand."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["holds", "refuted", "undecided"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """claim: one sentence. source: paper and theorem, or note. criterion: what `measured` must satisfy, in words and
    numbers. interval: uncertainty of `measured` where it is a random estimate; None for an exact enumeration or a
    search. verdict: made by the constructors below.
    """

    claim: str
    source: str
    criterion: str
    measured: float
    interval: Interval | None
    verdict: Verdict

    def __post_init__(self) -> None:
        if not math.isfinite(self.measured):
            raise ValueError(f"measured must be finite, got {self.measured} for: {self.claim}")

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def within(
    claim: str,
    source: str,
    measured: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    what: str,
    interval: Interval | None = None,
) -> Claim:
    """The claim that a number lies in [low, high].

    what: names the number, for the criterion. With an interval the claim holds if all of it lies inside, is refuted if
    all of it lies outside on one side, and is undecided otherwise; without one `measured` itself decides.
    ValueError for NaN or infinite `measured` or an interval that does not contain it.
    """
    floor, ceiling = interval if interval is not None else (measured, measured)
    if not floor <= measured <= ceiling:
        raise ValueError(f"the interval {interval} does not contain {measured} for: {claim}")
    verdict: Verdict = "undecided"
    if low <= floor and ceiling <= high:
        verdict = "holds"
    elif ceiling < low or floor > high:
        verdict = "refuted"
    bounds = [f">= {low:.10g}"] * math.isfinite(low) + [f"<= {high:.10g}"] * math.isfinite(high)
    subject = f"95 % interval of {what}" if interval is not None else what
    return Claim(claim, source, f"{subject} {' and '.join(bounds)}", float(measured), interval, verdict)
