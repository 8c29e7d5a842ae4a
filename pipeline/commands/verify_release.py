"""`private-rlhf verify-release`: whether a bundle is whole, says what it must, and is signed by whom it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify_release(
    bundle: Annotated[Path, typer.Argument(help="Folder written by `private-rlhf privatize`.")],
    signer: Annotated[str | None, typer.Option("--signer", help="Public key that its holder published.")] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Refuse a copy whose tool set other modes and times.")
    ] = False,
) -> None:
    """Read every row of a bundle, write its files again from them, compare, and check manifest and signature."""
    from private_rlhf.data.verify import verify_release as verify
    from private_rlhf.privacy.card import totals_sentence
    from private_rlhf.privacy.guarantee import who_is_trusted
    from private_rlhf.privacy.mechanism import NOISY_SUM

    verified = verify(bundle, signer, as_published)
    release, total, copied = verified.release, verified.record_epsilon, verified.copied
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
