"""`private-rlhf launch`: `accelerate launch` with one-line errors."""

from __future__ import annotations

from subprocess import CalledProcessError
from typing import Annotated

import typer

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    arguments: Annotated[list[str], typer.Argument(help="[options of accelerate] -m private_rlhf.stages.NAME …")],
) -> None:
    """Run a stage under `accelerate launch`, with its options; an error is one line."""
    from private_rlhf import launcher

    try:
        launcher.launch(arguments, {})
    except CalledProcessError as error:
        code = error.returncode
        raise typer.Exit(128 - code if code < 0 else code) from None
