"""`private-rlhf verify-release`: whether a bundle is whole, says what it must, and is signed by whom it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.errors import UserError


def verify_release(
    bundle: Annotated[Path, typer.Argument(help="Folder written by `private-rlhf privatize`.")],
    signer: Annotated[str | None, typer.Option("--signer", help="Public key that its holder published.")] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Refuse a copy whose tool set other modes and times.")
    ] = False,
) -> None:
    """Read every row of a bundle, write its files again from them, compare, and check manifest and signature."""
    from private_rlhf.data.container import is_copy, unpublished
    from private_rlhf.data.release import read_release
    from private_rlhf.data.totals import check_totals
    from private_rlhf.privacy.card import totals_sentence
    from private_rlhf.privacy.guarantee import who_is_trusted
    from private_rlhf.privacy.mechanism import NOISY_SUM
    from private_rlhf.privacy.signature import is_public_key

    if signer is not None and not is_public_key(signer):
        raise UserError("--signer takes a public key of 64 hexadecimal digits, as `private-rlhf ledger show` prints it")
    release = read_release(bundle.expanduser())
    release.check_rows()
    difference, copied = unpublished(release.directory), is_copy(release.directory)
    if difference and (as_published or not copied):
        raise UserError(f"{difference}, which may carry a label: `cp -r` makes a copy without it")
    total = check_totals(release)
    if signer is not None and release.signer != signer:
        raise UserError(f"{bundle}: is signed by {release.signer or 'nobody'}, not by {signer}")
    facts = release.manifest.guarantee
    epsilon = "∞" if facts["epsilon"] is None else f"{facts['epsilon']:g}"
    mark = f", {facts['mark']}" if facts["mark"] else ""
    who = f"signed by {release.signer}" if release.signer else "unsigned: nobody vouches for it"
    what = f"labels at ε = {epsilon}"
    if facts["mechanism"] == NOISY_SUM:
        what = f"pairs without labels, of which one noisy sum is released at ε = {epsilon} and δ = {facts['delta']:g}"
    trusted = who_is_trusted(facts if release.signer else {**facts, "unsigned": True})
    print(f"{bundle}: {len(release)} {what}{mark}, {who}; who must be trusted: {trusted}")
    if total is not None:
        person = (release.manifest.totals or {}).get("person")
        print(f"{bundle}: as counted from its rows, {totals_sentence({'record': total, 'person': person})}")
    print("modes and times are " + ("those of a copy, and not compared" if copied else "those it was published with"))
    if not release.comparable:
        print(f"written by pyarrow {release.writer}, and another is installed: settings are compared, bytes are not")
