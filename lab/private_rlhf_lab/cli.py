"""The command line of the lab: `private-rlhf-lab COMMAND`, with the exit codes of private-rlhf."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from private_rlhf.cli import exit_code

from private_rlhf_lab import account_command, benchmark_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Studies, accountants and benches around private-rlhf.",
)
app.add_typer(account_command.app, name="account")
app.add_typer(benchmark_command.app, name="benchmark")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; every foreseeable error is one line on stderr."""
    return exit_code(lambda: typer.main.get_command(app), "private-rlhf-lab", arguments)


if __name__ == "__main__":
    sys.exit(main())
