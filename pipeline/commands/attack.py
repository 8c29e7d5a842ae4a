"""`private-rlhf attack`: does a release, or a run, tell more of its labels than ε allows?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.outputs import output_file


def attack(
    targets: Annotated[list[Path], typer.Argument(help="Releases or run directories; with --plant: raw preferences.")],
    raw: Annotated[str | None, typer.Option("--raw", help="The raw preferences, for their owner alone.")] = None,
    canaries: Annotated[int | None, typer.Option("--canaries", help="How many canary events.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Key file that planted canaries lie beside.")] = None,
    truth: Annotated[Path | None, typer.Option("--truth", help="Labels of planted canaries.")] = None,
    plant: Annotated[Path | None, typer.Option("--plant", help="Write the source with canaries here (JSONL).")] = None,
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
    options = (raw, canaries, key, truth, plant, epsilon, output, as_json)
    raise typer.Exit(run_attack(Request(targets, release, *options)))
