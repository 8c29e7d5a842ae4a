"""Shared by commands: options, the two uses of a stage's command, and commands that moved to private-rlhf-lab."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from private_rlhf.core.errors import UserError

Force = Annotated[bool, typer.Option("--force", help="Replace a file that this command did not write.")]


def one_way(ctx: typer.Context, config: Path | None, run_dir: Path | None, overrides: Sequence[str] | None) -> None:
    """Refuse (UserError) options of the standalone use with --config, and those of the stage without it."""
    command = str(ctx.info_name)
    if config is not None:
        shared = {"config", "run_dir", "data", "accept_code", "overrides"}
        standalone = [part for part in ctx.command.params if part.name not in shared]
        if surplus := [part.opts[0] for part in standalone if _is_given(ctx.params[str(part.name)])]:
            raise UserError(f"{command} --config does not take {', '.join(surplus)}: set section.key=value")
        return
    stage = {"--run-dir": run_dir, "--accept-code": ctx.params["accept_code"]}
    stage |= {"--data": ctx.params["data"]} if command == "evaluate" else {}
    ignored = [*(name for name, value in stage.items() if _is_given(value)), *map(repr, overrides or [])]
    if ignored:
        raise UserError(f"{command} without --config does not take {ignored[0]}: give --config, or leave it out")


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is equal to False


def all_given(command: str, options: dict[str, Any]) -> list[Any]:
    """The values of options that are required without a recipe. UserError: one is missing."""
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise UserError(f"{command} without --config needs {', '.join(missing)}")
    return list(options.values())


def escape_help(command: Any) -> None:
    """Make the help of a command, of its options and of the commands below it print as written.

    Typer reads these texts as rich's markup, in which [#MODEL] is a tag and not shown.
    """
    for each in (command, *command.params):
        if text := getattr(each, "help", None):
            each.help = re.sub(r"(\[[a-z#/@][^\[]*?\])", r"\\\1", text)  # rich.markup.escape is slow to import
    for below in getattr(command, "commands", {}).values():
        escape_help(below)


def refuse_digit_groups(command: Any, arguments: Sequence[str]) -> None:
    """UserError for a number option that is given as 1_0, which Python reads as 10."""
    for place, each in enumerate(arguments):
        command = getattr(command, "commands", {}).get(each, command)  # from here on the options are its own
        option, equals, value = each.partition("=")
        value = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
        if option in _number_options(command) and "_" in value:
            raise UserError(f"{option} must be a number without underscores, got {value!r}: write its digits")


def _number_options(command: Any) -> set[str]:
    """The options of a command whose values are numbers."""
    numbers: set[str] = set()
    for param in command.params:  # typer has a click of its own in recent versions, where a type is described otherwise
        described = getattr(param, "type_descriptor", None)
        kind = described.annotation if described is not None else getattr(getattr(param, "type", None), "name", "")
        if kind in (int, float) or str(kind).startswith(("int", "float")):
            numbers.update(param.opts)
    return numbers


def refuse_moved(app: typer.Typer, name: str, path: str) -> None:
    """Add the hidden command `name`, which takes any arguments and names `private-rlhf-lab PATH` in its refusal."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, hidden=True, context_settings=anything)
    def moved(ctx: typer.Context) -> None:
        raise UserError(f"{path} has moved: install private-rlhf-lab and run private-rlhf-lab {path} …")
