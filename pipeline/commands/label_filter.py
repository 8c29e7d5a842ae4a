"""`private-rlhf label-filter`: labels are randomised where they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def label_filter(
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of each event, > 0.")],
    store: Annotated[Path, typer.Option("--store", help="File of the draws (0600), made on first use; keep it.")],
    labels: Annotated[str, typer.Option("--labels", help="The two labels: -1,1 or 0,1 or A,B.")] = "-1,1",
    id_field: Annotated[str, typer.Option("--id-field", help="Field with the event's id.")] = "id",
    label_field: Annotated[str, typer.Option("--label-field", help="Field with the label.")] = "label",
    keep: Annotated[str, typer.Option("--keep", help="Further fields to pass through, comma-separated.")] = "",
) -> None:
    """Local mode: randomise labels on their way from stdin to stdout, JSON lines, once per event."""
    from private_rlhf.core.noise import LabelNoise
    from private_rlhf.privacy.local import filter_stdin

    if epsilon > 0 and (warning := LabelNoise.of(epsilon).warning):
        typer.echo(f"beware: {warning}", err=True)

    raise typer.Exit(filter_stdin(epsilon, store, labels, id_field, label_field, keep))
