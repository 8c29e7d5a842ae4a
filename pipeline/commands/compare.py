"""The `compare` command: finished runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.outputs import begins_with, output_file

PAGE = r"# \d+ runs on \d+ held-out prompts"


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the others are compared with the first.")],
    output: Annotated[Path | None, typer.Option("--output", help="Write the page here too (Markdown).")] = None,
    force: Force = False,
) -> None:
    """Put runs on one page: paired by held-out prompt, corrected for how many are compared."""
    if output is not None:
        output = output_file(output, "--output", rewrites=begins_with(PAGE), inputs=runs, force=force)
    from private_rlhf.core import atomic
    from private_rlhf.evaluation.runs import compare_runs

    page = compare_runs(runs)
    print(page)
    if output is not None:
        atomic.write_text(output, page)
