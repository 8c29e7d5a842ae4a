"""The other keys of this user: what they released, so that no label is drawn under two keys unseen.

The user's own folder keeps the place of each key's ledger (`ledger_file`). Records are compared by their keyed tags
under the other key, on this machine, and nothing of the comparison leaves it. Other users and other machines are not
seen, nor noisy sums and counts, which keep no records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.user import user_folder
from private_rlhf.privacy.events import Generation
from private_rlhf.privacy.keys import Lock, PrivacyKey, load_key
from private_rlhf.privacy.ledger_file import LedgerFile, added_epsilon


@dataclass(frozen=True)
class OtherKey:
    """A key of this user that released labels. path: its file. key: None where it, or its ledger, cannot be read.
    epsilon: what its ledger charges on top of its labels; where it cannot be read, all that was released under it."""

    key_id: str
    path: Path
    key: PrivacyKey | None
    store: Generation
    epsilon: float

    @property
    def state(self) -> tuple[str, str, float]:
        """Facts that change with every release under the key."""
        return self.key_id, self.store.digest, self.epsilon


def other_keys(own_id: str) -> list[OtherKey]:
    """The keys of this user that released labels, but for the one with this id. A key that is gone counts as far as
    its last revision said what it had released."""
    anchors = sorted((user_folder() / "ledgers").glob("*.json"))
    return [other for anchor in anchors if anchor.stem != own_id and (other := _other(anchor)) is not None]


def _other(anchor: Path) -> OtherKey | None:
    try:
        facts = read_json(anchor)
        folder, spent = Path(str(facts["folder"])), float(facts.get("epsilon", 0.0))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = folder.with_name(folder.name.removesuffix(".state"))
    try:
        key = load_key(path)
        file = LedgerFile(key)
        if file.key_id != anchor.stem:
            raise UserError(f"{path}: is another key by now")
        book = file.read()
    except (UserError, OSError):
        return OtherKey(anchor.stem, path, None, Generation(), spent) if spent else None
    if not book.events.events:
        return None
    charges = [entry for entry in book.entries if "other" not in entry]  # what it charges for others is theirs
    return OtherKey(file.key_id, path, key, book.events, added_epsilon(charges))


@contextmanager
def one_at_a_time(seconds: float) -> Iterator[None]:
    """In the block no other release of this user becomes final. UserError if one takes longer than `seconds`."""
    lock = Lock(user_folder() / "releases.lock")
    try:
        if not lock.acquire(seconds):
            raise UserError(f"{lock.path}: another release of yours is becoming final; run again when it has ended")
    except OSError:
        pass  # a home that cannot be written remembers no keys either
    try:
        yield
    finally:
        lock.release()


def missing_charge(entries: list[dict[str, object]], key_id: str, epsilon: float) -> float:
    """The part of ε that is not charged yet for releases of the other key."""
    before = math.fsum(float(str(entry["epsilon"])) for entry in entries if entry.get("other") == key_id)
    return max(0.0, epsilon - before)
