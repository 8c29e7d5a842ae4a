"""Statements of a release: the rows that were left out, and the guarantee with its NOT PRIVATE mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from private_rlhf.core.errors import UserError
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.mechanism import NOISY_SUM, Mechanism, PublicLabels

NOT_PRIVATE = "NOT PRIVATE"
REASONS = {  # by key mode
    "none": "epsilon is infinite: the labels were declared public and are released as they are",
    "insecure_seed": "the flips derive from a seed, so anyone who guesses the seed can undo them",
}


@dataclass
class DropCounts:
    """Counts of rows that were left out, by reason; each a symmetric function of the two responses of every row.

    identical: the two responses are the same. empty: prompt or a response has no text. duplicates: an earlier row
    holds the same unordered pair (the first is kept, whatever the labels say). over_cap: one person has more events
    than are released of anyone (a choice that depends on no label); None without such a cap. ties: their labels said
    so, which leaving them out reveals; None where the holder did not ask for that.
    """

    identical: int = 0
    empty: int = 0
    duplicates: int = 0
    over_cap: int | None = None
    ties: int | None = None

    def as_dict(self) -> dict[str, int]:
        """For the manifest."""
        return {name: count for name, count in asdict(self).items() if count is not None}


def nothing_left(source: str, counts: DropCounts) -> UserError:
    """The error of a source of which every row was dropped."""
    over = f", {counts.over_cap} were over the cap per person" if counts.over_cap else ""
    return UserError(
        f"{source}: no rows are left; {counts.identical} had identical responses and {counts.empty} an empty prompt"
        f" or response{over}; check that `chosen` and `rejected` are two different answers to the prompt"
    )


LOCAL = {  # what differs where each answer was randomised before anyone had it, by the operating system's coins
    "statement": "for each event, P[z | label] <= e^epsilon P[z | other label]; there is no key to lose",
    "several_releases": "each event is drawn once; a second draw of the same event would add its epsilon",
}


RandomisedBy = Literal["page", "command", "terminal", "label-filter", "files"]
"""In local mode, where true answers became private labels; `files`: not known, they came in a file."""
RANDOMISED_BY: tuple[RandomisedBy, ...] = get_args(RandomisedBy)
TRUSTED: Mapping[str | None, str] = {
    "page": "the page and the browser in which each person answers; what they send is private already",
    "command": "the machine where answers are given, and the program that gives them: this process saw the true labels"
    " and randomised each before it was stored",
    "terminal": "the machine where answers are given: this process saw the true labels and randomised each before it"
    " was stored",
    "label-filter": "the machine where label-filter ran, and whatever gave it the true labels; its record holds the"
    " draw of every answer",
    "files": "whoever wrote answers.jsonl, and every machine that saw answers before they were randomised",
    None: "not known: it is not recorded where the labels were randomised",
}
CLAIMS: Mapping[str | None, str] = {
    "files": "as stated by whoever wrote answers.jsonl; not verified here",
    None: "as stated without a record of who randomised the labels; not verified here",
}
UNSIGNED_CLAIM = "as stated by an unsigned manifest; not verified here"


def key_mode(mechanism: Mechanism, key: PrivacyKey | None) -> str:
    """Source of the randomness: "keyed", "insecure_seed" or "none" (public labels). UserError without a key."""
    if isinstance(mechanism, PublicLabels):
        return "none"
    if key is None:
        raise UserError(
            "privatising needs a key; make one with `private-rlhf keygen --output FILE` and pass --key FILE"
        )
    return key.mode


def guarantee(mechanism: Mechanism, key: PrivacyKey | None) -> dict[str, Any]:
    """The mechanism's guarantee with the key mode, and the NOT PRIVATE mark (else null) with its reason."""
    return stated(mechanism, key_mode(mechanism, key))


def stated(
    mechanism: Mechanism, mode: str, randomised_by: RandomisedBy | None = None, unsigned: bool = False
) -> dict[str, Any]:
    """`guarantee` where the key mode is known and the key is not. randomised_by: in local mode, where that is known.
    unsigned: it was taken over from a bundle that nobody signed."""
    facts = mechanism.guarantee() | {"key_mode": mode} | (LOCAL if mode == "local" else {})
    facts |= {"randomised_by": randomised_by} if mode == "local" and randomised_by else {}
    facts |= {"unsigned": True} if unsigned and mode not in REASONS else {}
    return facts | {"mark": NOT_PRIVATE if mode in REASONS else None, "mark_reason": REASONS.get(mode)}


def claim_of(facts: Mapping[str, Any]) -> str | None:
    """By whose word the labels of a release are private, by its guarantee; None where this program made them so, or a
    key's holder signed for it."""
    if facts.get("unsigned"):
        return UNSIGNED_CLAIM
    return CLAIMS.get(facts.get("randomised_by")) if facts["key_mode"] == "local" else None


def who_is_trusted(facts: Mapping[str, Any]) -> str:
    """The parties that see true labels, and so must be trusted with them, by a release's guarantee."""
    mode, claim = facts["key_mode"], claim_of(facts)
    if mode in REASONS:
        return "everybody who sees the release: it is not private"
    if mode == "local":
        trusted = TRUSTED[facts.get("randomised_by")]
    elif facts.get("mechanism") == NOISY_SUM:
        trusted = (
            "the holder of the labels and the key, and the machine that adds up every true label before it adds noise;"
            " whoever sees only what is released need not be trusted"
        )
    else:
        trusted = (
            "whoever holds the raw labels or the key, until each label is randomised; training, and whoever sees only"
            " what is released, sees no true label"
        )
    return f"{trusted} ({claim})" if claim else trusted
