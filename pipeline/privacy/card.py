"""The privacy card: what a release protects, how well, and what it does not; for the report and every model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.core.errors import UserError

PROTECTED = (
    "The label of each event (which of the two responses its labeller preferred), against everyone who sees everything"
    " that is released (files, manifests, logs, metrics, checkpoints, this card) and knows the prompts, the responses"
    " and the code."
)
NOT_PROTECTED = (
    "Prompts and responses: they are released as they are.",
    "The curator: whoever holds the raw labels or the key sees the true labels. In curator mode the promise covers"
    " what is released.",
    "Which events took place, and how many: record ids, row counts and drop counts are exact.",
    "What the text itself tells. A reader whose best guess from the text is right with probability p is right"
    " max(alpha, p, 1-p) of the time after seeing a private label; alpha is no ceiling for that.",
    "Patterns over many labels: a model trained on private labels predicts labels, also ones it never saw. That is"
    " utility, and no defence against it is claimed.",
    "A person with many events: the loss adds up over that person's events.",
)
WHO_MARKS = (
    "NOT PRIVATE is set by the program alone, when epsilon is infinite or the randomness came from a seed, and by the"
    " holder of the labels who overrides a refusal. Nobody can remove it from a release: make a new one with a key."
)


def person_epsilon(epsilon: float, events: int, delta: float) -> float:
    """The smallest e such that `events` labels of one person, each released at `epsilon`, are (e, delta)-private.

    Exact for randomised response with independent flips: k labels kept has loss (2k - m) epsilon under Binomial(m,
    alpha), so delta(e) = sum_k max(0, P(k) - e^e P(m - k)), convex and falling in e; solved by bisection from above.
    0 < delta < 1. UserError for events < 1 or delta outside (0, 1).
    """
    if events < 1 or not 0.0 < delta < 1.0:
        raise UserError(f"person_epsilon needs events >= 1 and 0 < delta < 1, got {events} and {delta}; correct them")
    log_keep = -math.log1p(math.exp(-epsilon))
    log_flip = log_keep - epsilon
    log_mass = [
        math.lgamma(events + 1)
        - math.lgamma(k + 1)
        - math.lgamma(events - k + 1)
        + k * log_keep
        + (events - k) * log_flip
        for k in range(events + 1)
    ]

    def spill(total: float) -> float:
        terms = (
            math.exp(mass) * -math.expm1(total - (2 * k - events) * epsilon)
            for k, mass in enumerate(log_mass)
            if (2 * k - events) * epsilon > total
        )
        return math.fsum(terms)

    low, high = 0.0, events * epsilon
    if spill(low) <= delta:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if spill(middle) <= delta else (middle, high)
    return high


def privacy_card(
    manifest: Mapping[str, Any],
    *,
    max_events_per_person: int | None = None,
    delta: float = 1e-6,
    **facts: Any,
) -> dict[str, Any]:
    """The card as JSON types.

    manifest: of the release (`ReleaseManifest.as_dict()`). max_events_per_person: the most events of one labeller,
    None if the data have no labeller column. delta: for the person-level (epsilon, delta). facts: anything else to
    print (model, stage, evaluation labels, overrides); never a statistic of true labels. UserError if the manifest
    does not state its guarantee.
    """
    try:
        guarantee = manifest["guarantee"]
        epsilon, keep_prob, key_mode = guarantee["epsilon"], guarantee["keep_prob"], guarantee["key_mode"]
        mark, reason = guarantee["mark"], guarantee.get("mark_reason")
        unit, neighbouring, mechanism = guarantee["unit"], guarantee["neighbouring"], guarantee["mechanism"]
    except (KeyError, TypeError):
        raise UserError("the manifest does not state its guarantee; write the release again") from None
    private = epsilon is not None and mark is None
    return {
        "mark": mark,
        "mark_reason": reason,
        "who_marks": WHO_MARKS,
        "unit": unit,
        "neighbouring": neighbouring,
        "mechanism": mechanism,
        "statement": guarantee.get("statement") if private else "none",
        "key_mode": key_mode,
        "epsilon_per_event": epsilon,
        "epsilon_total_per_event": epsilon,
        "several_releases": guarantee.get("several_releases"),
        "keep_prob": keep_prob,
        "person_level": _person_level(epsilon if private else None, max_events_per_person, delta),
        "events": manifest.get("rows"),
        "dropped": dict(manifest.get("dropped", {})),
        "source": manifest.get("source"),
        "protected": PROTECTED if private else "Nothing: see the mark.",
        "not_protected": list(NOT_PROTECTED) if private else ["The labels.", *NOT_PROTECTED[:1]],
        "facts": facts,
    }


def _person_level(epsilon: float | None, events: int | None, delta: float) -> dict[str, Any]:
    if epsilon is None:
        return {"statement": "none: the release is NOT PRIVATE"}
    if events is None:
        return {"statement": "unknown: the data have no labeller column; a person with m events has m times epsilon"}
    exact = person_epsilon(epsilon, events, delta)
    return {
        "max_events": events,
        "epsilon": events * epsilon,
        "epsilon_at_delta": exact,
        "delta": delta,
        "statement": f"at most {events} events of one person: epsilon {events * epsilon:g},"
        f" or {exact:.3g} at delta {delta:g}",
    }


def render_markdown(card: Mapping[str, Any]) -> str:
    """The card as a Markdown section; ends with a line break."""
    epsilon = card["epsilon_per_event"]
    lines = ["## Privacy card", ""]
    if card["mark"]:
        lines += [f"**{card['mark']}**: {card['mark_reason']}.", ""]
    rows = {
        "Unit": card["unit"],
        "Neighbouring data": card["neighbouring"],
        "Mechanism": f"{card['mechanism']} (randomness: {card['key_mode']})",
        "Epsilon per event": "infinite" if epsilon is None else f"{epsilon:g}",
        "Several releases": card["several_releases"],
        "Realised alpha (probability that a label is kept)": f"{card['keep_prob']:.6g}",
        "Guarantee": card["statement"],
        "Person level": card["person_level"]["statement"],
        "Events": card["events"],
        "Rows left out": ", ".join(f"{count} {name}" for name, count in card["dropped"].items()) or "none stated",
        "Source, as declared": card["source"],
    }
    rows |= {name.replace("_", " ").capitalize(): value for name, value in card["facts"].items()}
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    lines += ["", f"**Protected.** {card['protected']}", "", "**Not protected.**", ""]
    lines += [f"- {item}" for item in card["not_protected"]]
    lines += ["", f"**The mark.** {card['who_marks']}", ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
