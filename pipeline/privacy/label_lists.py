"""Randomised response for a list of labels in a program of yours: no file, store or ledger is written."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.privacy.keys import PrivacyKey, as_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.prf import KEY_BYTES, frame

_DOMAIN = b"label in a list/v1"


def privatize(
    labels: Sequence[int],
    epsilon: float,
    key: PrivacyKey | str | Path | None = None,
    ids: Sequence[str] | None = None,
) -> list[int]:
    """Randomise each label on its own, at `epsilon`-label-LDP; returns labels in {-1, +1} in the same order.

    Without a key every call draws fresh noise, so two calls on one label cost the sum of their ε. With a key the result
    is a function of key, id, label and ε: repeated calls give the same labels, and all calls on one id together cost
    the largest ε. Nothing counts ε here: `private-rlhf privatize` keeps a ledger.

    Args:
        labels: -1 or +1 each, in a list or an array.
        epsilon: finite, above 0; smaller is more private.
        key: a key, or the path of a file that `private-rlhf keygen` made; None for a key that is forgotten at once.
        ids: with a key, a distinct text per label. It names one labelling event for good: another label under it would
            share its noise. It must not depend on the label.

    Raises:
        UserError: an invalid ε, label or key, or ids that are missing, repeated, not texts or without a key.
    """
    mechanism = RandomizedResponse(epsilon)
    if (key is None) != (ids is None):
        raise UserError("key and ids must be given together: without ids a key cannot tell labels apart")
    labels = getattr(labels, "tolist", lambda: labels)()  # of NumPy, torch, pandas and Arrow
    if not isinstance(labels, Sequence):  # a set has no order, and forgets labels
        raise UserError(f"labels must be a list or an array of -1 and +1, got {type(labels).__name__}: make it a list")
    names = [str(number) for number in range(len(labels))] if ids is None else list(ids)
    texts = {name for name in names if isinstance(name, str)}
    if not len(texts) == len(names) == len(labels):
        raise UserError(f"ids must be distinct texts, one per label, got {len(texts)} for {len(labels)}: use str")
    prf = (PrivacyKey(secrets.token_bytes(KEY_BYTES)) if key is None else as_key(key)).prf
    events = [prf.digest([frame(_DOMAIN), frame(name.encode(errors="surrogatepass"))]) for name in names]
    return [mechanism.release(prf, event, label) for event, label in zip(events, labels, strict=True)]
