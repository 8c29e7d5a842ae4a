"""Options of commands that are a stage with --config, and stand alone without."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.core.errors import UserError

Force = Annotated[bool, typer.Option("--force", help="Replace a file that this command did not write.")]


def one_way(
    ctx: typer.Context, config: Path | None, run_dir: Path | None, overrides: Sequence[str] | None
) -> None:
    """A command that is a stage or stands alone gets the options of one of the two: none is ignored."""
    command = str(ctx.info_name)
    if config is not None:
        shared = {"config", "run_dir", "data", "accept_code", "overrides"}
        own = [part for part in ctx.command.params if part.name not in shared]
        given = [part.opts[0] for part in own if ctx.params[str(part.name)] is not None]
        if given:
            raise UserError(f"{command} --config takes no {', '.join(given)}: the recipe says that (section.key=value)")
    elif run_dir is not None or overrides:
        surplus = "--run-dir" if run_dir is not None else f"'{(overrides or [''])[0]}'"
        raise UserError(f"{command} without --config takes no {surplus}: give --config, or leave it out")


def all_given(command: str, options: dict[str, Any]) -> list[Any]:
    """The values of options that are needed where no recipe is given."""
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise UserError(f"{command} without --config needs {', '.join(missing)}")
    return list(options.values())


def refuse_digit_groups(command: Any) -> None:
    """Make every number option of a command, and of those below it, refuse 1_0, which Python reads as 10."""
    for each in getattr(command, "commands", {}).values():
        refuse_digit_groups(each)
    for param in command.params:
        if param.type.name.startswith(("int", "float")):
            param.type = _plain(copy(param.type))


def _plain(kind: Any) -> Any:
    convert = kind.convert

    def checked(value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str) and "_" in value:
            raise UserError(f"{param.opts[0]} must be a number without underscores, got {value!r}: write its digits")
        return convert(value, param, ctx)

    kind.convert = checked
    return kind
