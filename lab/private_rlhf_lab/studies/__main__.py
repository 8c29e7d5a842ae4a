"""Run the studies of the papers.

python -m private_rlhf_lab.studies NAME|all [--quick] [--page FILE] [--output FOLDER]
python -m private_rlhf_lab.studies NAME|all --sweep [--output FOLDER]    long searches, resumable
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.core.outputs import begins_with, output_file, output_folder
from private_rlhf.validation import lab

from private_rlhf_lab.studies import page as pages

STUDIES = tuple(pages.TITLES)


def studies(
    name: Annotated[str, typer.Argument(help=f"{', '.join(STUDIES)}, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, minutes instead of hours.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Long searches instead: hours, resumable.")] = False,
    page: Annotated[Path | None, typer.Option("--page", help="Write all full results as one Markdown page.")] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Results go to full/NAME, quick/NAME or sweep/NAME in it.")
    ] = Path("runs/studies"),
) -> None:
    """Check the papers' claims in depth; a refuted claim is a verdict, not a failure."""
    output = output_folder(output, "--output")
    if sweep:
        if quick or page:
            raise UserError("--sweep must be given without --quick and --page: leave them out")
        return run_sweeps(name, output)
    if page and quick:
        raise UserError("--page shows full results: leave out --quick")
    if page is not None:
        page = output_file(page, "--page", rewrites=begins_with("# What the papers claim"))
        output_folder(page.with_suffix(""), "--page", rewrites=None if page.exists() else ())  # of the page's figures
    modules = {study: f"private_rlhf_lab.studies.{study}.run" for study in STUDIES}
    try:
        lab.validate(name, quick=quick, output=output, studies=modules)
    finally:
        if page and (name == "all" or name in STUDIES):
            pages.write(output / "full", page)
    return None


def run_sweeps(name: str, output: Path) -> None:
    """Run the long searches of one study or `all` in OUTPUT/sweep/NAME. UserError for a study without any."""
    with_sweep = [each for each in STUDIES if importlib.util.find_spec(f"private_rlhf_lab.studies.{each}.sweep")]
    if name != "all" and name not in with_sweep:
        raise UserError(f"{name!r} has no sweep: choose {', '.join([*with_sweep, 'all'])}")
    for chosen in with_sweep if name == "all" else (name,):
        importlib.import_module(f"private_rlhf_lab.studies.{chosen}.sweep").run_sweep(output / "sweep" / chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a study that failed, 2 for a wrong argument, with one line on stderr."""
    command = typer.Typer(add_completion=False)
    command.command()(studies)
    try:
        command(args=arguments, prog_name="private_rlhf_lab.studies", standalone_mode=False)
    except (UserError, RunStopped) as error:
        print(f"private_rlhf_lab.studies: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
