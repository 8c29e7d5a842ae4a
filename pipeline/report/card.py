"""The privacy card of a run: the release's guarantee with facts of the run, as JSON, Markdown and rows for the page."""

from __future__ import annotations

from typing import Any

from pipeline.privacy.card import ledger_rows, privacy_card
from pipeline.privacy.privatize import NOT_PRIVATE
from pipeline.report.inputs import RunFacts
from pipeline.report.status import PrivacyStatus
from pipeline.report.text import epsilon_text, number, significant

Row = tuple[str, list[str]]


def run_card(facts: RunFacts, status: PrivacyStatus) -> dict[str, Any]:
    """The card of this run, as JSON types."""
    extra: dict[str, Any] = {"run": facts.name}
    model = (facts.recipe.get("model") or {}).get("source")
    if model:
        extra["model"] = str(model)
    if status.public_labels:
        extra["labels"] = "declared public or synthetic by their holder"
    external = external_reward(facts.reward_fit)
    if external:
        extra["external_reward_model"] = external
    demonstrations = (facts.recipe.get("data") or {}).get("demonstrations")
    if demonstrations:
        extra["what_sft_read"] = f"demonstrations: {demonstrations}"
    labels = facts.evaluation.get("evaluation_labels") or facts.recipe.get("evaluation_labels")
    if labels:
        extra["evaluation_labels"] = str(labels)
    ledger = facts.manifests.get("privatize", {}).get("report", {}).get("ledger")
    ledger = (facts.evaluation.get("label_counts") or {}).get("ledger") or ledger  # the later one
    return privacy_card(marked(facts.release, status), ledger=ledger, **extra)


def external_reward(fit: dict[str, Any]) -> str | None:
    """What the card says of a reward model that was not fitted in this run, from the fit's facts; else None."""
    if fit.get("mode") != "external":
        return None
    if fit.get("fitted_by") == "others":
        return f"{fit['source']}, from outside this pipeline; the holder of the run declares its labels public"
    epsilon = fit.get("epsilon")
    labels = "public labels" if epsilon is None else f"labels released at ε = {epsilon_text(epsilon)} in another ledger"
    return f"{fit['source']}, fitted by this package to {labels}"


def marked(release: dict[str, Any], status: PrivacyStatus) -> dict[str, Any]:
    """The release's manifest for the card of a run: a run may be NOT PRIVATE although its labels are."""
    guarantee = release.get("guarantee") or {}
    if status.private or guarantee.get("mark"):
        return release
    return release | {"guarantee": guarantee | {"mark": NOT_PRIVATE, "mark_reason": "; ".join(status.reasons)}}


def card_rows(card: dict[str, Any]) -> list[Row]:
    """The card as (label, paragraphs) for the page."""
    epsilon = card["epsilon_per_event"]
    rows: list[tuple[str, Any]] = [
        ("Mark", f"{card['mark']}: {card['mark_reason']}" if card["mark"] else None),
        ("Protected", card["protected"]),
        ("Not protected", card["not_protected"]),
        ("Unit", card["unit"]),
        ("Neighbouring data", card["neighbouring"]),
        ("Mechanism", f"{card['mechanism']} (randomness: {card['key_mode']})"),
        ("ε per event", epsilon_text(epsilon)),
        ("Realised α", f"{significant(card['keep_prob'], 6)}, the probability that a label is kept"),
        ("Guarantee", card["statement"]),
        ("Several releases", card["several_releases"]),
        *ledger_rows(card).items(),
        ("Person level", card["person_level"]["statement"]),
        ("Events", card["events"]),
        ("Rows left out", ", ".join(f"{count} {name}" for name, count in card["dropped"].items())),
        ("Source, as declared", card["source"]),
        *((name.replace("_", " ").capitalize(), value) for name, value in card["facts"].items()),
        ("The mark", card["who_marks"]),
    ]
    return [(label, _paragraphs(value)) for label, value in rows if value not in (None, "", [])]


def _paragraphs(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(part) for part in value]
    return [number(value, 4) if isinstance(value, float) else str(value)]
