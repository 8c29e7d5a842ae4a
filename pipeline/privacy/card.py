"""The privacy card: what a release protects, how well, and what it does not; for the report and every model card."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from private_rlhf.core.errors import UserError, one_line
from private_rlhf.core.noise import LabelNoise, upper_text
from private_rlhf.core.noise_levels import levels_text
from private_rlhf.privacy.guarantee import NO_CLAIM_ROW, dropped_text, status_of
from private_rlhf.privacy.person import DELTA

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
    " max(alpha, p, 1-p) of the time after seeing a private label; alpha is not a ceiling for that.",
    "Patterns over many labels: a model trained on private labels predicts labels, also ones it never saw. That is"
    " utility, and no defence against it is claimed.",
    "A person with many events: the loss adds up over that person's events.",
    "Other users and other machines: what was released of the same labels there, under any key, is outside the ledger's"
    " sight, and adds to what it states. So does what keys of this user released that are gone, and counts"
    " under another key.",
)
NAMED_COLUMNS = (
    "The columns that the holder of the labels named ({}): they are released as they are. If one of them tells a label"
    " (a score, a comment, a time), the label is not protected."
)
WHO_MARKS = (
    "NOT PRIVATE is set by the program, when epsilon is infinite or the randomness came from a seed, and by the holder"
    " of the labels who overrides a refusal; LABELS DECLARED PUBLIC by the holder who declares them so. No option"
    " removes it: make a new release with a key, and a new run of it."
)
ON_TOP: Mapping[str | None, str] = {
    "counts": " (noisy counts, on top)", "sum": " (one noisy sum, on top)",
    "stated": " (stated by the holder, on top)",
}
MOST_CELL = 20_000
NO_PERSON_LEVEL = {"statement": "none: see the mark"}


def privacy_card(
    manifest: Mapping[str, Any],
    *,
    ledger: Mapping[str, Any] | None = None,
    overrides: Sequence[str | None] = (),
    declared_public: bool = False,
    evaluation_events: int | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """The card as JSON types.

    manifest: of the release (`ReleaseManifest.as_dict()`). ledger: what the key's ledger states (`Ledger.card_facts`),
    None if the release is in no ledger. overrides, declared_public: as in `status_of`. evaluation_events: how many are
    held out from training; None: not known. facts: anything else to print (model, stage, evaluation labels); never a
    statistic of true labels.
    UserError if the manifest does not state its guarantee.
    """
    status = status_of(manifest, overrides=overrides, declared_public=declared_public)
    guarantee, epsilon, private = manifest["guarantee"], status.epsilon, status.private
    try:
        unit, neighbouring, mechanism = guarantee["unit"], guarantee["neighbouring"], guarantee["mechanism"]
    except KeyError:
        raise UserError("the manifest does not state its guarantee; write the release again") from None
    columns = manifest.get("extra_columns") or ()
    named = [NAMED_COLUMNS.format(", ".join(columns))] if columns else []
    statement, totals = guarantee.get("statement"), manifest.get("totals")
    if statement and status.claim:
        statement += f" ({status.claim})"
    known = ledger if private and ledger is not None else {}
    return {
        "mark": status.mark,
        "mark_reason": status.mark_reason,
        "who_marks": WHO_MARKS,
        "unit": unit,
        "neighbouring": neighbouring,
        "mechanism": mechanism,
        "statement": statement if private else "none",
        "key_mode": guarantee["key_mode"],
        "epsilon_per_event": epsilon,
        "epsilon_total_per_event": max(epsilon or 0.0, known.get("epsilon_total", 0.0)) if private else epsilon,
        "several_releases": guarantee.get("several_releases") if private else NO_CLAIM_ROW,
        "releases": list(known.get("releases", [])),
        "budgets": dict(known.get("budgets", {})),
        "keep_prob": status.keep_prob,
        "warning": status.noise.warning,
        "totals": totals_sentence(totals) if private and totals else None,
        "delta_total": known.get("delta_total", 0.0),
        "who_must_be_trusted": status.trusted,
        "person_level": _person_level(known.get("labelers"), totals) if private else NO_PERSON_LEVEL,
        "levels": manifest.get("levels") if private else None,
        "events": manifest.get("rows"),
        "evaluation_events": evaluation_events,
        "dropped": dict(manifest.get("dropped", {})),
        "source": manifest.get("source"),
        "protected": PROTECTED if private else "Nothing is claimed: see the mark.",
        "not_protected": [*named, *NOT_PROTECTED] if private else ["The labels.", *NOT_PROTECTED[:1]],
        "facts": facts,
    }


def totals_sentence(totals: Mapping[str, float | None] | None) -> str:
    """The largest totals of a release that states them; person: as stated, for rows do not name persons."""
    if totals is None:
        return "not stated"
    person = "not known" if totals["person"] is None else f"{totals['person']:g}, as stated"
    return f"largest total ε of any pair: {totals['record']:g}; of any person: {person}"


def _person_level(
    labelers: Mapping[str, Any] | None, totals: Mapping[str, float | None] | None
) -> dict[str, Any]:
    """The most that all events of one labeller cost; labelers: the ledger's facts about them, if any; totals: what the
    release states instead."""
    levels = [(level["epsilon"], level["events"]) for level in (labelers or {}).get("busiest", [])]
    if not levels and totals and totals["person"] is not None:
        return {"statement": f"at most epsilon {totals['person']:g} of one person, as the release states"}
    if labelers is None or not levels:
        return {"statement": "unknown: the data have no labeller column; a person with m events has m times epsilon"}
    events, total = labelers.get("most_events", sum(count for _, count in levels)), labelers["max_epsilon"]
    exact, delta = labelers.get("max_epsilon_at_delta", total), labelers.get("delta", DELTA)
    statement = f"at most {events} events of one person: epsilon {total:g}, or {upper_text(exact)} at delta {delta:g}"
    if labelers["unattributed_events"]:
        statement += f"; unknown for {labelers['unattributed_events']} events that name no labeller"
    facts = {"max_events": events, "epsilon": total, "epsilon_at_delta": exact, "delta": delta}
    return facts | {"statement": statement}


def render_markdown(card: Mapping[str, Any]) -> str:
    """The card as a Markdown section; ends with a line break."""
    lines = ["## Privacy card", ""]
    if card["mark"]:
        lines += [f"**{card['mark']}**: {markdown(card['mark_reason'])}.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {markdown(value)} |" for name, value in card_rows(card).items()]
    lines += ["", f"**Protected.** {card['protected']}", "", "**Not protected.**", ""]
    lines += [f"- {markdown(item)}" for item in card["not_protected"]]
    lines += ["", f"**The mark.** {card['who_marks']}", ""]
    return "\n".join(lines)


def card_rows(card: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the card, by name."""
    epsilon, tested = card["epsilon_per_event"], card["evaluation_events"]
    rows = {
        "Unit": card["unit"],
        "Neighbouring data": card["neighbouring"],
        "Mechanism": f"{card['mechanism']} (randomness: {card['key_mode']})",
        "Who must be trusted": card["who_must_be_trusted"],
        "Epsilon per event": "infinite" if epsilon is None else f"{epsilon:g}",
        **({"Epsilon of each event": levels_sentence(card["levels"])} if card.get("levels") else {}),
        "Several releases": card["several_releases"],
        **ledger_rows(card),
        **({"Totals": card["totals"]} if card["totals"] else {}),
        "Realised alpha (probability that a label is kept)": alpha_text(card),
        "Guarantee": card["statement"],
        "Person level": card["person_level"]["statement"],
        "Events": f"{card['events']} to train" + ("" if tested is None else f", {tested} to evaluate"),
        "Rows left out": dropped_text(card["dropped"]) if card["dropped"] else "none stated",
        "Source, as declared": card["source"],
    }
    return rows | {name.replace("_", " ").capitalize(): value for name, value in card["facts"].items()}


def levels_sentence(levels: Mapping[str, Any]) -> str:
    """The number of events at each ε, who set it, and the information of the labels beside that at one ε for all.

    levels: as a manifest states them. Labels carry tanh²(ε/2) of a true one's information each, at a margin of 0.
    """
    events = [(float(epsilon), int(count)) for epsilon, count in levels["events"]]
    total = sum(count for _, count in events)
    carried = sum(count * LabelNoise.of(epsilon).factor ** 2 for epsilon, count in events)
    least = total * LabelNoise.of(min(epsilon for epsilon, count in events if count)).factor ** 2
    return (
        f"{levels_text({'levels': events})}; the level is released and was set {levels['chosen']}, which nobody checks:"
        " if it depended on the label, it tells it. The labels carry as much as"
        f" {carried:.1f} true ones, and at the least level for all {least:.1f}"
    )


def alpha_text(card: Mapping[str, Any]) -> str:
    """The probability that a label was kept, and what that means where it is nearly 1."""
    if card.get("levels"):
        kept = (f"{LabelNoise.of(epsilon).keep_text(6)} at {epsilon:g}" for epsilon, _ in card["levels"]["events"])
        return "; ".join(filter(None, (", ".join(kept), card["warning"])))
    stated = {"epsilon": card["epsilon_per_event"], "keep_prob": card["keep_prob"]}
    return "; ".join(filter(None, (LabelNoise.from_json(stated).keep_text(6), card["warning"])))


def at_delta(delta: float | None) -> str:
    """Suffix of an ε that holds only up to the δ of earlier versions' noisy sums; empty without."""
    return f" at delta {delta:g}" if delta else ""


def ledger_rows(card: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the card about the key's ledger, by name; empty for a release that is not in a ledger."""
    if not card["releases"]:
        return {}
    limits = [f"{limit:g} per {kind}" for kind, limit in card["budgets"].items() if limit is not None]
    releases = [
        f"{each['source']}: {each['events']} events at {levels_text(each)}"
        f"{at_delta(each.get('delta'))}{ON_TOP.get(each.get('kind'), '')}"
        for each in card["releases"]
    ]
    total = f"{card['epsilon_total_per_event']:g}{at_delta(card['delta_total'])}"
    return {
        "Largest total of any event under this key": total,
        "Releases under this key": "; ".join(releases),
        "Budgets": ", ".join(limits) or "none stated",
    }


def markdown(value: Any) -> str:
    """A value as one line of Markdown that shows it as it is: names of sources, columns and runs are others' texts, and
    may hold HTML, links, or the end of a table's cell."""
    escaped = html.escape(one_line(str(value), MOST_CELL), quote=False)
    return re.sub(r"([\\*|\[\]])", r"\\\1", escaped)
