"""Raw pairs in, canonical records with private labels out, in memory: for small sources, and as a plain reference.

What the engine (`pipeline.data.curate`) releases of the same rows is the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.errors import UserError
from pipeline.privacy.entries import EventLog
from pipeline.privacy.keys import PrivacyKey
from pipeline.privacy.mechanism import Mechanism, PublicLabels
from pipeline.privacy.records import PreferenceRecord, PrivateRecord, RawPair, canonical_record, event_bytes, is_blank

NOT_PRIVATE = "NOT PRIVATE"


@dataclass
class DropCounts:
    """How many rows were left out, and why; each a symmetric function of the two responses of every row.

    identical: the two responses are the same. empty: prompt or a response has no text. duplicates: an earlier row
    holds the same unordered pair (the first is kept, whatever the labels say).
    """

    identical: int = 0
    empty: int = 0
    duplicates: int = 0

    def as_dict(self) -> dict[str, int]:
        """For the manifest."""
        return asdict(self)


def nothing_left(source: str, counts: DropCounts) -> UserError:
    """The error of a source of which every row was dropped."""
    return UserError(
        f"{source}: no rows are left; {counts.identical} had identical responses and {counts.empty} an empty prompt"
        " or response; check that `chosen` and `rejected` are two different answers to the prompt"
    )


def key_mode(mechanism: Mechanism, key: PrivacyKey | None) -> str:
    """Where the randomness came from: "keyed", "insecure_seed" or "none" (public labels). UserError without a key."""
    if isinstance(mechanism, PublicLabels):
        return "none"
    if key is None:
        raise UserError(
            "privatising needs a key; make one with `private-rlhf keygen --output FILE` and pass --key FILE"
        )
    return key.mode


def guarantee(mechanism: Mechanism, key: PrivacyKey | None) -> dict[str, Any]:
    """The mechanism's guarantee with the key mode, and the NOT PRIVATE mark (else null) with its reason."""
    mode = key_mode(mechanism, key)
    reasons = {
        "none": "epsilon is infinite: the labels were declared public and are released as they are",
        "insecure_seed": "the flips derive from a seed, so anyone who guesses the seed can undo them",
    }
    facts = mechanism.guarantee() | {"key_mode": mode}
    return facts | {"mark": NOT_PRIVATE if mode in reasons else None, "mark_reason": reasons.get(mode)}


def _release(mechanism: Mechanism, key: PrivacyKey | None, record: PreferenceRecord) -> int:
    if isinstance(mechanism, PublicLabels):
        return record.label
    if key is None:
        raise AssertionError("`key_mode` refuses a private mechanism without a key")
    return mechanism.release(key.prf, event_bytes(record.record_id), record.label)


def privatize_records(
    pairs: Iterable[RawPair],
    mechanism: Mechanism,
    key: PrivacyKey | None,
    source: str = "the input",
    log: EventLog | None = None,
) -> tuple[list[PrivateRecord], DropCounts]:
    """Canonicalise, drop, keep the first of each unordered pair, randomise; records come back in `record_id` order.

    source: the input's name in error messages. log: takes the events for the ledger. Apart from reading `pairs` (and
    writing `log`) this is a pure function, and swapping chosen and rejected in any rows changes their private labels
    alone. UserError if a row is not valid Unicode or no row is left.
    """
    key_mode(mechanism, key)
    counts = DropCounts()
    kept: dict[str, PrivateRecord] = {}
    for pair in pairs:
        prompt, chosen, rejected, row = pair
        try:
            record = canonical_record(prompt, chosen, rejected)
        except UnicodeEncodeError:
            raise UserError(
                f"{source}, row {row}: holds a lone surrogate, which is not valid Unicode; repair or remove the row"
            ) from None
        if record is None:
            counts.identical += 1
        elif is_blank(prompt) or is_blank(chosen) or is_blank(rejected):
            counts.empty += 1
        elif record.record_id in kept:
            counts.duplicates += 1
        else:
            kept[record.record_id] = PrivateRecord(*record[:4], _release(mechanism, key, record))
            if log is not None and key is not None:
                log.add(key.prf, record)
    if not kept:
        raise nothing_left(source, counts)
    return [kept[record_id] for record_id in sorted(kept)], counts
