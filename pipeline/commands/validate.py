"""`private-rlhf validate`: the papers' claims by small exact experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.errors import UserError
from private_rlhf.core.extras import check_installed
from private_rlhf.core.outputs import begins_with, output_file, output_folder


def validate(
    name: Annotated[str, typer.Argument(help="Module of private_rlhf.validation, or `all`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, seconds instead of minutes.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Long searches instead: hours, resumable.")] = False,
    page: Annotated[Path | None, typer.Option("--page", help="Write all full results as one Markdown page.")] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Results go to full/NAME, quick/NAME or sweep/NAME in it.")
    ] = Path("runs/validation"),
) -> None:
    """Check the papers' claims by exact small experiments; a refuted claim is a verdict, not a failure."""
    check_installed("validate")
    output = output_folder(output, "--output")
    if page is not None:
        page = output_file(page, "--page", rewrites=begins_with("# What the papers claim"))
        output_folder(page.with_suffix(""), "--page", rewrites=None if page.exists() else ())  # of the page's figures
    from private_rlhf.validation import lab

    if sweep:
        if quick or page:
            raise UserError("--sweep goes alone: leave out --quick and --page")
        lab.sweep(name, output)
    else:
        lab.validate(name, quick=quick, output=output, page=page)
