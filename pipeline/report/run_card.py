"""The privacy status and the card of a run: the release's guarantee with facts of the run."""

from __future__ import annotations

import math
from typing import Any

from private_rlhf.accounting.epsilon_delta import Guarantee
from private_rlhf.accounting.people import randomized_response
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.card import NO_LABELS, alpha_text, at_delta, events_text, ledger_rows, privacy_card
from private_rlhf.privacy.guarantee import (
    PrivacyStatus,
    dropped_text,
    external_reward,
    extra_rewards,
    outside_judge,
    status_of,
)
from private_rlhf.report.run_facts import RunFacts
from private_rlhf.report.sections import epsilon_text, known, number

Row = tuple[str, list[str]]
LABELS_PER_PERSON = (1, 10, 100)
DROPPED = "answers as they came in answers.jsonl"
CENTRAL = (
    "none is claimed for the released policy, and none follows from its KL penalty: the epsilon above, by randomised"
    " response alone, is what holds. KL regularisation makes something else differentially private: a stated number"
    " of draws, released alone by a trusted curator, from the exact Gibbs policy of a ridge-regularised, norm-bounded"
    " Bradley-Terry fit on frozen public features (`private-rlhf account rlhf`). It covers no weights, no PPO policy,"
    " no tuned backbone and no fit by the private likelihood."
)


def privacy_status(facts: RunFacts) -> PrivacyStatus:
    """The status of a run.

    Raises:
        UserError: the release states no guarantee, or the recipe has another ε.
    """
    stages, recipe = facts.manifests.values(), facts.recipe.get("privatize") or {}
    declared = bool((facts.recipe.get("data") or {}).get("public_labels"))
    status = status_of(
        facts.release,
        overrides=[stage.get("override") for stage in stages],
        declared_public=declared or any(stage.get("declared_public") for stage in stages),
        seeded=recipe.get("insecure_seed") is not None,
    )
    _check_same_epsilon(status.epsilon, recipe.get("epsilon"))
    return status


def _check_same_epsilon(released: float | None, wanted: Any) -> None:
    """The recipe in the run directory is that of the last start; the labels may be of an earlier one."""
    if wanted is None:
        return
    wanted = wanted if known(wanted) else None
    same = released is wanted if released is None or wanted is None else math.isclose(released, wanted, rel_tol=1e-9)
    if not same:
        raise UserError(
            f"privatize.epsilon is {wanted or 'inf'} in the recipe but {released or 'inf'} in the released labels: "
            "run the stages again (--from privatize)"
        )


def run_card(facts: RunFacts, status: PrivacyStatus) -> dict[str, Any]:
    """The card of this run, as JSON types."""
    extra: dict[str, Any] = {"run": facts.name}
    model = (facts.recipe.get("model") or {}).get("source")
    if model:
        extra["model"] = str(model)
    external = external_reward(facts.reward_fit)
    if external:
        extra["external_reward_model"] = external
    trained = facts.manifests.get("ppo", {}).get("report", {})
    added = extra_rewards(trained.get("extra_rewards") or [])
    if added:
        extra["extra_rewards"] = added
    judge = outside_judge(facts.evaluation.get("judge") or {})
    if judge:
        extra["evaluation_judge"] = judge
    if trained.get("reference_policy"):
        extra["reference_policy"] = trained["reference_policy"]
    demonstrations = (facts.recipe.get("data") or {}).get("demonstrations")
    if demonstrations:
        extra["what_sft_read"] = f"demonstrations: {demonstrations}"
    labels = facts.evaluation.get("evaluation_labels") or facts.recipe.get("evaluation_labels")
    if labels:
        extra["evaluation_labels"] = str(labels)
    released = (facts.manifests.get("privatize") or facts.manifests.get("online") or {}).get("report", {})
    if released.get("adopted"):
        extra["labels_from"] = "a bundle released elsewhere; its ledger is with the holder of the labels"
    if "labeller" in released:
        drawn = "each answer drawn once, before it was stored" if released["labeller"] != "files" else DROPPED
        extra["labels_from"] = (
            f"{released['labeller']}: questions of this run, each pair asked once, {drawn}; no key, and no ledger"
            " beyond this run"
        )
    if released.get("signer") or released.get("adopted"):
        extra["labels_signed_by"] = released.get("signer") or "nobody: who wrote this bundle is not known"
    ledger = released.get("ledger")
    ledger = facts.manifests.get("statistic", {}).get("report", {}).get("ledger") or ledger
    ledger = (facts.evaluation.get("label_counts") or {}).get("ledger") or ledger  # the latest one
    randomised = status.private and status.epsilon is not None and status.delta is None
    accounts = labeller_accounts(status.epsilon or 0.0) if randomised else {}
    if accounts:
        extra["one_labeller"] = "; ".join(_loss(labels, each) for labels, each in accounts.items())
        extra["central_guarantee"] = CENTRAL
    extra |= {"overrides": status.reasons, "declared_public": status.declared_public}
    extra["evaluation_events"] = released.get("evaluation_events")
    card = privacy_card(facts.release, ledger=ledger, **extra)
    return card | {"accounts": [each.as_dict() for each in accounts.values()]}


def labeller_accounts(epsilon: float) -> dict[int, Guarantee]:
    """By m = 1, 10, 100: what a labeller with m labels of this run loses, mε at δ = 0; the exact ε at 1e-6 in details.

    Where labellers are known, the card's person level says what the busiest one lost in all releases of the key.
    """
    return {labels: randomized_response(epsilon, labels) for labels in LABELS_PER_PERSON}


def _loss(labels: int, account: Guarantee) -> str:
    exact = account.details["exact"]
    return (
        f"{labels} label{'s' * (labels > 1)}: epsilon {account.epsilon:g} at delta 0,"
        f" {exact['epsilon']:.3g} at delta {exact['delta']:g}"
    )


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
        ("Who must be trusted", card["who_must_be_trusted"]),
        ("ε per event", epsilon_text(epsilon) + at_delta(card["delta"]).replace("delta", "δ")),
        ("Realised α", _alpha(card)),
        ("Guarantee", card["statement"]),
        ("Several releases", card["several_releases"]),
        *ledger_rows(card).items(),
        ("Totals", card["totals"]),
        ("Person level", card["person_level"]["statement"]),
        ("Events", events_text(card)),
        ("Rows left out", dropped_text(card["dropped"]) if card["dropped"] else None),
        ("Source, as declared", card["source"]),
        *((name.replace("_", " ").capitalize(), value) for name, value in card["facts"].items()),
        ("The mark", card["who_marks"]),
    ]
    return [(label, _paragraphs(value)) for label, value in rows if value not in (None, "", [])]


def _alpha(card: dict[str, Any]) -> str:
    if card["delta"] is not None:
        return NO_LABELS
    return f"the probability that a label is kept: {alpha_text(card)}"


def _paragraphs(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(part) for part in value]
    return [number(value, 4) if isinstance(value, float) else str(value)]
