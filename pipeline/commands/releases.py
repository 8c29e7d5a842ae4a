"""`private-rlhf verify-release`: whether a bundle is whole, says what it must, and is signed by whom it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.errors import print_lines
from private_rlhf.core.outputs import output_file


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

    verified = verify(bundle, signer, as_published)
    release, total, copied = verified.release, verified.record_epsilon, verified.copied
    facts = release.manifest.guarantee
    epsilon = "∞" if facts["epsilon"] is None else release.manifest.epsilon_text
    mark = f", {facts['mark']}" if facts["mark"] else ""
    who = f"signed by {release.signer}" if release.signer else "unsigned: nobody vouches for it"
    trusted = who_is_trusted(facts if release.signer else {**facts, "unsigned": True})
    print_lines(f"{bundle}: {len(release)} labels at ε = {epsilon}{mark}, {who}; who must be trusted: {trusted}")
    if total is not None:
        person = (release.manifest.totals or {}).get("person")
        print_lines(f"{bundle}: as counted from its rows, {totals_sentence({'record': total, 'person': person})}")
    times = "those of a copy, and not compared" if copied else "those it was published with"
    print_lines(f"modes and times are {times}")
    if not release.comparable:
        other = f"written by pyarrow {release.writer}, and another is installed"
        print_lines(f"{other}: settings are compared, bytes are not")


def attack(
    targets: Annotated[list[Path], typer.Argument(help="Releases or run directories; with --plant: raw preferences.")],
    raw: Annotated[str | None, typer.Option("--raw", help="The raw preferences; only their owner has them.")] = None,
    canaries: Annotated[int | None, typer.Option("--canaries", help="How many canary events.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Key file of canaries; to plant, default yours.")] = None,
    truth: Annotated[Path | None, typer.Option("--truth", help="Labels of planted canaries.")] = None,
    plant: Annotated[Path | None, typer.Option("--plant", help="Write the source with canaries here (JSONL).")] = None,
    carry: Annotated[str, typer.Option("--carry", help="With --plant: further columns, a,b (people, ε).")] = "",
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Claim to test; default: the manifests'.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the result here as JSON (0600).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    force: Force = False,
) -> None:
    """Attack releases: exit code 1 if labels leak beyond ε, 0 if no leak was found."""
    from private_rlhf.audit.command import RESULT, Request
    from private_rlhf.audit.command import attack as run_attack
    from private_rlhf.data.curate import Request as Release
    from private_rlhf.data.curate import privatize_source

    def release(data: str, output: Path, epsilon: float, key_file: Path) -> str:
        return privatize_source(Release(data, output, epsilon, key_file))

    if plant is not None:
        plant = output_file(plant, "--plant", inputs=(*targets, key), secret=True)
        truth = truth if truth is None else output_file(truth, "--truth", inputs=(*targets, key), secret=True)
    if output is not None:
        inputs, secret = (*targets, raw, key, truth), raw is not None
        output = output_file(output, "--output", rewrites=RESULT, inputs=inputs, force=force, secret=secret)
    options = (raw, canaries, key, truth, plant, tuple(filter(None, carry.split(","))), epsilon, output, as_json)
    raise typer.Exit(run_attack(Request(targets, release, *options)))
