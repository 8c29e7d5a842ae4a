"""`private-rlhf validate`: the papers' claims by small exact experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import output_folder


def validate(
    name: Annotated[str, typer.Argument(help="offline, online, kl_dp, dptd or private_rl: a paper; or `all`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, seconds instead of minutes.")] = False,
    output: Annotated[
        Path, typer.Option("--output", help="Results go to full/NAME or quick/NAME in it.")
    ] = Path("runs/validation"),
    sweep: Annotated[bool, typer.Option("--sweep", hidden=True)] = False,
    page: Annotated[str | None, typer.Option("--page", hidden=True)] = None,
) -> None:
    """Check the papers' claims by exact small experiments; a refuted claim is a verdict, not a failure."""
    check_installed("validate")
    output = output_folder(output, "--output")
    from private_rlhf.validation import lab

    if sweep or page:
        raise UserError(f"--sweep and --page must be given to the lab's command: {lab.IN_THE_LAB}")
    lab.validate(name, quick=quick, output=output)
