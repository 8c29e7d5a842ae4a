"""The privacy status and the card of a run: the release's guarantee with facts of the run."""

from __future__ import annotations

import math
from typing import Any

from private_rlhf.accounting.epsilon_delta import Guarantee
from private_rlhf.accounting.people import randomized_response
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import epsilon_of, upper_text
from private_rlhf.privacy.card import card_rows as table_rows
from private_rlhf.privacy.card import privacy_card
from private_rlhf.privacy.guarantee import (
    SYNTHETIC,
    PrivacyStatus,
    external_reward,
    extra_rewards,
    outside_judge,
    status_of,
)
from private_rlhf.report.run_facts import RunFacts
from private_rlhf.report.sections import known

Row = tuple[str, list[str]]
LABELS_PER_PERSON = (1, 10, 100)
DROPPED = "answers as they came in answers.jsonl"
CENTRAL = (
    "none is claimed for the released policy, and none follows from its KL penalty: the epsilon above, by randomised"
    " response, is what holds. KL regularisation makes another thing differentially private: a stated number of draws,"
    " released by a trusted curator who releases nothing besides, from the exact Gibbs policy of a ridge-regularised,"
    " norm-bounded Bradley-Terry fit on frozen public features (`private-rlhf-lab account rlhf`). It covers no weights,"
    " no PPO policy, no tuned backbone and no fit by the private likelihood."
)


def privacy_status(facts: RunFacts) -> PrivacyStatus:
    """The status of a run. UserError: the release states no guarantee, or the recipe has another ε."""
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


def _check_same_epsilon(released: float | None, in_recipe: Any) -> None:
    """The recipe in the run directory is that of the last start; the labels may be of an earlier one."""
    expected = in_recipe if known(in_recipe) else math.inf
    if in_recipe is not None and not math.isclose(epsilon_of(released), expected, rel_tol=1e-9):
        raise UserError(
            f"privatize.epsilon must be {epsilon_of(released)}, that of the released labels, got {expected}: run the"
            " stages again (--from privatize)"
        )


def run_card(facts: RunFacts, status: PrivacyStatus) -> dict[str, Any]:
    """The card of this run, as JSON types."""
    trained, recipe = facts.manifests.get(facts.aligner.lower(), {}).get("report", {}), facts.recipe
    demonstrations = (recipe.get("data") or {}).get("demonstrations")
    known_facts = {
        "run": facts.name,
        "model": (recipe.get("model") or {}).get("source"),
        "external_reward_model": external_reward(facts.reward_fit),
        "extra_rewards": extra_rewards(trained.get("extra_rewards") or []),
        "evaluation_judge": outside_judge(facts.evaluation.get("judge") or {}),
        "reference_policy": trained.get("reference_policy"),
        "what_sft_read": f"demonstrations: {demonstrations}" if demonstrations else None,
        "evaluation_labels": facts.evaluation.get("evaluation_labels") or recipe.get("evaluation_labels"),
    }
    extra: dict[str, Any] = {name: str(value) for name, value in known_facts.items() if value}
    released = (facts.manifests.get("privatize") or facts.manifests.get("online") or {}).get("report", {})
    if released.get("adopted"):
        extra["labels_from"] = "a bundle released elsewhere; its ledger is with the holder of the labels"
    if "labeller" in released:
        drawn = "each answer drawn once, before it was stored" if released["labeller"] != "files" else DROPPED
        extra["labels_from"] = (
            f"{released['labeller']}: questions of this run, each pair asked once, {drawn}; no key, and no ledger"
            " beyond this run"
        )
    if facts.synthetic_labels and status.private:
        extra["labels_from"] = SYNTHETIC
    if released.get("signer") or released.get("adopted"):
        extra["labels_signed_by"] = released.get("signer") or "nobody: who wrote this bundle is not known"
    counted = facts.evaluation.get("label_counts") or {}
    ledger = counted.get("ledger") or released.get("ledger")  # the latest one
    accounts = labeller_accounts(status.epsilon) if status.private and status.epsilon is not None else {}
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
        f" {upper_text(exact['epsilon'])} at delta {exact['delta']:g}"
    )


def card_rows(card: dict[str, Any]) -> list[Row]:
    """The card as (label, paragraphs) for the page."""
    rows: dict[str, Any] = {
        "Mark": f"{card['mark']}: {card['mark_reason']}" if card["mark"] else None,
        "Protected": card["protected"],
        "Not protected": card["not_protected"],
        **table_rows(card),
        "The mark": card["who_marks"],
    }
    paragraphs = {label: value if isinstance(value, list | tuple) else [value] for label, value in rows.items()}
    return [(label, list(map(str, parts))) for label, parts in paragraphs.items() if parts not in ([None], [""], [])]
