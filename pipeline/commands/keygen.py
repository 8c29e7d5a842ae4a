"""`private-rlhf keygen`: the owner's secret key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.outputs import output_file
from private_rlhf.core.user import default_key


def keygen(
    output: Annotated[
        Path | None, typer.Option("--output", help="Where the new secret key goes (mode 0600); default: your own key.")
    ] = None,
) -> None:
    """Make the owner's secret key: your own, which every command uses by default, or another one."""
    from private_rlhf.privacy.keys import keygen as make_key
    from private_rlhf.privacy.keys import state_folder

    place = default_key() if output is None else output_file(output, "--output", secret=True)
    key = make_key(place)
    print(f"new key in {key}: keep it secret and outside every run directory")
    print(f"back it up together with {state_folder(key)}, which keeps what was released under it")
