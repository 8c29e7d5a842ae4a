"""The checks of a published bundle: rows, manifest, file attributes and signature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.data.container import is_copy, unpublished
from private_rlhf.data.release import Release, read_release
from private_rlhf.data.totals import check_totals
from private_rlhf.privacy.signatures import is_public_key


@dataclass(frozen=True)
class Verification:
    """A bundle that passed.

    Attributes:
        release: the bundle.
        record_epsilon: the largest total ε of a pair, as counted from the rows; None without private labels.
        copied: it is a copy, whose modes and times are not compared.
    """

    release: Release
    record_epsilon: float | None
    copied: bool


def verify_release(folder: str | Path, signer: str | None = None, as_published: bool = False) -> Verification:
    """Read every row of a bundle, write its files again from them, compare, and check manifest and signature.

    Args:
        folder: written by `private-rlhf privatize`.
        signer: public key of 64 hexadecimal digits that must have signed it; None accepts any and none.
        as_published: refuse a copy whose tool set other modes and times.

    Raises:
        UserError: a check fails.
    """
    if signer is not None and not is_public_key(signer):
        raise UserError(f"signer must be 64 hexadecimal digits, got {signer!r}: `private-rlhf ledger show` prints them")
    release = read_release(Path(folder).expanduser())
    release.check_rows()
    difference, copied = unpublished(release.directory), is_copy(release.directory)
    if difference and (as_published or not copied):
        raise UserError(f"{difference}, which may carry a label: `cp -r` makes a copy without it")
    total = check_totals(release)
    if signer is not None and release.signer != signer:
        raise UserError(f"{folder}: is signed by {release.signer or 'nobody'}, not by {signer}")
    return Verification(release, total, copied)
