"""`private-rlhf verify-release`: whether a bundle is whole, says what it must, and is signed by whom it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.core.errors import UserError


def verify_release(
    bundle: Annotated[Path, typer.Argument(help="Folder written by `private-rlhf privatize`.")],
    signer: Annotated[str | None, typer.Option("--signer", help="Public key that its holder published.")] = None,
) -> None:
    """Read every row of a bundle, and check its manifest, digests and signature."""
    from pipeline.data.release import read_release
    from pipeline.data.totals import check_totals
    from pipeline.privacy.card import totals_sentence
    from pipeline.privacy.guarantee import who_is_trusted
    from pipeline.privacy.signature import is_public_key

    if signer is not None and not is_public_key(signer):
        raise UserError("--signer takes a public key of 64 hexadecimal digits, as `private-rlhf ledger show` prints it")
    release = read_release(bundle.expanduser())
    release.check_rows()
    total = check_totals(release)
    if signer is not None and release.signer != signer:
        raise UserError(f"{bundle}: is signed by {release.signer or 'nobody'}, not by {signer}")
    facts = release.manifest.guarantee
    epsilon = "∞" if facts["epsilon"] is None else f"{facts['epsilon']:g}"
    mark = f", {facts['mark']}" if facts["mark"] else ""
    who = f"signed by {release.signer}" if release.signer else "unsigned: nobody vouches for it"
    what = f"labels at ε = {epsilon}"
    if not release.manifest.labelled:
        what = f"pairs without labels, of which one noisy sum is released at ε = {epsilon} and δ = {facts['delta']:g}"
    trusted = who_is_trusted(facts if release.signer else {**facts, "unsigned": True})
    print(f"{bundle}: {len(release)} {what}{mark}, {who}; who must be trusted: {trusted}")
    if total is not None:
        person = (release.manifest.totals or {}).get("person")
        print(f"{bundle}: as counted from its rows, {totals_sentence({'record': total, 'person': person})}")
