"""Commands that now belong to the second distribution, private-rlhf-lab: each is refused in one line."""

from __future__ import annotations

import typer
from private_rlhf.core.errors import UserError


def refuse(app: typer.Typer, name: str, path: str) -> None:
    """Adds the hidden command `name`, which takes any arguments and names `private-rlhf-lab PATH`."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, hidden=True, context_settings=anything)
    def moved(ctx: typer.Context) -> None:
        raise UserError(f"{path} has moved: install private-rlhf-lab and run private-rlhf-lab {path} …")
